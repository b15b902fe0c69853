"""kNN graphs of 1,000,000 generated rows beside pynndescent; two workers against one; 4,000,000.

peer     1M x 128, k=15, recall 0.95: ours on two workers, pynndescent on two threads
workers  ours with one worker and with two, on word vectors or, without data, on the 1M rows
growth   ours on 1M and on 4M rows: seconds and memory of a worker
"""

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from benchmarks import graph_data, graph_job, graph_methods, graph_recall, measure
from benchmarks.graph_methods import TUNED, Effort

K = 15
WIDTH = 128
N_ROWS = 1_000_000
GROWTH = 4
WARM_ROWS = 50_000
PARTS = ("peer", "workers", "growth")
PEER = "pynndescent"


@dataclass(frozen=True)
class Lake:
    """Rows in memory or on disk, the folder of their lake, the true neighbours of some."""

    folder: Path
    rows: NDArray[Any]
    title: str
    truth: graph_recall.Truth


def main() -> None:
    """Measure the parts that were asked for."""
    options = read_options()
    facts = measure.machine()
    with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as name:
        bench = Bench(Path(name), options)
        found = {part: getattr(bench, part)() for part in options.parts}
    versions = measure.versions(graph_job.PACKAGES)
    if found.get("peer", {}).get("peer"):
        versions[PEER] = found["peer"]["peer"]["version"]
    document = {"machine": facts, "versions": versions, "quick": options.quick, **found}
    measure.publish(options, "graph_scale", document, report(document))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--parts", type=_parts, default=PARTS, help="of peer,workers,growth")
    parser.add_argument("--rows", type=int, default=N_ROWS, help="generated rows")
    parser.add_argument("--data", type=Path, help="folder of the .npz files, for `workers`")
    parser.add_argument("--peers-python", default=sys.executable, help="Python that has the peers")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds")
    return parser.parse_args()


def _parts(text: str) -> tuple[str, ...]:
    """The parts named, in their order."""
    chosen = text.split(",")
    unknown = set(chosen) - set(PARTS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in chosen)


class Bench:
    """The parts; what several of them need is made once."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        self._n_rows = 2 * graph_data.QUICK_ROWS if options.quick else options.rows
        self._lakes: dict[str, Lake] = {}
        self._measured: dict[tuple[str, int], dict[str, Any]] = {}

    def peer(self) -> dict[str, Any]:
        """Ours and pynndescent on the generated rows."""
        lake = self._generated(1)
        ours = self._measure(lake)
        task = graph_methods.save_task(
            self._folder / "peers", lake.rows, lake.truth, K, self._options.peers_python
        )
        # A small first build compiles, so every round counts: the first is not a cold one here.
        effort = Effort(rounds=self._options.rounds, warm_rows=WARM_ROWS)
        found = graph_methods.run_peer(task, PEER, [TUNED["generated", K][PEER]], effort)
        if not found:
            return {"title": lake.title, "ours": ours, "peer": None}
        seconds = statistics.median(found[0].seconds)
        theirs = {**found[0]._asdict(), "warm_seconds": seconds}
        ratio = ours["warm_seconds"] / seconds
        return {"title": lake.title, "ours": ours, "peer": theirs, "ratio": ratio}

    def workers(self) -> dict[str, Any]:
        """Ours with two workers and with one."""
        lake = self._word_vectors() or self._generated(1)
        two, one = self._measure(lake), self._measure(lake, workers=1)
        ratio = one["warm_seconds"] / two["warm_seconds"]
        return {"title": lake.title, "two": two, "one": one, "ratio": ratio}

    def growth(self) -> dict[str, Any]:
        """Ours on the generated rows and on four times as many."""
        small, large = self._generated(1), self._generated(GROWTH)
        first, last = self._measure(small), self._measure(large)
        ratio = last["warm_seconds"] / first["warm_seconds"]
        sizes = {small.title: first, large.title: last}
        return {"sizes": sizes, "ratio": ratio}

    def _word_vectors(self) -> Lake | None:
        """GloVe, where it is there."""
        if self._options.data is None:
            return None
        rows = graph_data.load_set(self._options.data, "glove", self._options.quick)
        return None if rows is None else self._lake(rows.title, rows.vectors)

    def _generated(self, times: int) -> Lake:
        """So many times the generated rows; the first of them are always the same."""
        n_rows = times * self._n_rows
        title = f"generated {n_rows:,} x {WIDTH}"
        if title in self._lakes:
            return self._lakes[title]
        path = self._folder / f"rows-{n_rows}.npy"
        return self._lake(title, graph_data.save_generated(path, n_rows, WIDTH))

    def _lake(self, title: str, rows: NDArray[Any]) -> Lake:
        """The lake of the rows, and beside it a small one to warm workers with."""
        if title not in self._lakes:
            print(f"{title}: writing the lake", file=sys.stderr)
            folder = self._folder / f"lake-{len(self._lakes)}"
            graph_data.write_lake(folder / "lake", graph_data.blocks_of(rows))
            few = rows[:WARM_ROWS]
            graph_data.write_lake(folder / "warm" / "lake", graph_data.blocks_of(few))
            self._lakes[title] = Lake(folder, rows, title, graph_recall.find_truth(rows, K))
        return self._lakes[title]

    def _measure(self, lake: Lake, workers: int = graph_job.WORKERS) -> dict[str, Any]:
        """Our figures on the lake; measured once, whichever parts want them."""
        if (lake.title, workers) not in self._measured:
            print(f"{lake.title}: {workers} workers", file=sys.stderr)
            self._measured[lake.title, workers] = run_ours(lake, workers, self._options.rounds)
        return self._measured[lake.title, workers]


def run_ours(lake: Lake, workers: int, count: int) -> dict[str, Any]:
    """Our figures: warm rounds, memory, the recall of the last round."""
    job = graph_job.make_job(lake.folder, K, workers=workers)
    warm = graph_job.make_job(lake.folder / "warm", K, workers=workers)
    with graph_job.open_workers(workers) as runner, measure.Peaks() as peaks:
        rounds = graph_job.run_rounds(job, runner, graph_job.Rounds(count, warm=warm))
    ids = graph_job.read_neighbors(rounds[-1].output, lake.truth.queries)
    figures = {
        "workers": workers,
        "recall": graph_recall.score(lake.rows, lake.truth, ids, K),
        "own_recall": graph_job.read_metrics(rounds[-1].output, "recall")["recall"],
        "seconds": [found.seconds for found in rounds],
        "warm_seconds": graph_job.median_seconds(rounds),
        "steps": graph_job.step_seconds(rounds),
        "worker_peak_bytes": max(found.peak_bytes for found in rounds),
        "largest_bytes": peaks.largest,
    }
    graph_job.remove_rounds(job)
    graph_job.remove_output(warm)
    return figures


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts = [f"# kNN graphs at scale, k={K}", ""]
    parts += [measure.conditions(document["machine"], document["versions"]), "", *NOTES]
    if document["quick"]:
        parts += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    for name, write in (("peer", _peer), ("workers", _workers), ("growth", _growth)):
        if name in document:
            parts += ["", *write(document[name])]
    return "\n".join(parts) + "\n"


NOTES = (
    f"- generated: {graph_data.N_CLUSTERS:,} clusters that overlap, each of "
    f"{graph_data.SUBSPACE} dimensions and some noise, float32.",
    f"- recall: {graph_recall.N_QUERIES:,} seeded rows against exact search, for all by the "
    "same code.",
    "- seconds: medians of the runs named, on warm workers, on compiled code.",
    "- worker peak: resident memory of one worker in any task; largest process: sampled ten "
    "times a second, ingest and sample included.",
)
HEAD = ["", "recall", "runs", "seconds", "ratio", "worker peak MiB", "largest process MiB"]


def _row(title: str, found: dict[str, Any], ratio: str) -> list[str]:
    """One of our measurements."""
    return [
        title,
        graph_methods.show_recall(found["recall"]),
        str(len(found["seconds"])),
        f"{found['warm_seconds']:.1f}",
        ratio,
        measure.mebibytes(found["worker_peak_bytes"]),
        measure.mebibytes(found["largest_bytes"]),
    ]


def _steps(found: dict[str, Any]) -> str:
    steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["steps"].items())
    return f"Our steps, seconds: {steps}."


def _peer(found: dict[str, Any]) -> list[str]:
    peer, ours = found["peer"], found["ours"]
    ratio = f"{found['ratio']:.2f}" if peer else ""
    rows = [_row(f"lakemap, {ours['workers']} workers", ours, ratio)]
    if peer:
        name = f"{PEER} {peer['version']}, {graph_methods.describe(peer['settings'])}"
        row = [name, graph_methods.show_recall(peer["recall"]), str(len(peer["seconds"]))]
        row += [f"{peer['warm_seconds']:.1f}", "1.00", ""]
        rows.append([*row, measure.mebibytes(peer["peak_bytes"])])
    title = f"## {found['title']} beside {PEER}; the goal is a ratio of at most 1"
    return [title, "", measure.table(HEAD, rows), "", _steps(ours)]


def _workers(found: dict[str, Any]) -> list[str]:
    rows = [_row("two workers", found["two"], f"{found['ratio']:.2f}")]
    rows.append(_row("one worker", found["one"], "1.00"))
    title = f"## {found['title']}, two workers and one; the goal is a ratio of at least 1.8"
    parts = [title, "", measure.table(HEAD, rows)]
    return [*parts, "", "Two. " + _steps(found["two"]), "", "One. " + _steps(found["one"])]


def _growth(found: dict[str, Any]) -> list[str]:
    first = next(iter(found["sizes"].values()))["warm_seconds"]
    rows = [
        _row(title, size, f"{size['warm_seconds'] / first:.2f}")
        for title, size in found["sizes"].items()
    ]
    parts = ["## Growth; the goal is a ratio of at most 4.6, and no more memory", ""]
    parts.append(measure.table(HEAD, rows))
    return parts + [f"\n{title}. {_steps(size)}" for title, size in found["sizes"].items()]


if __name__ == "__main__":
    main()

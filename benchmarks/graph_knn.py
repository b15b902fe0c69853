"""kNN graphs of all rows at a recall of 0.95, beside pynndescent, hnswlib and faiss.

Every method is set to reach the recall as fast as it can, runs on two cores and is scored by the
same code on the same query rows. Warm: everything compiled, workers started. Cold: a new process
with an empty numba cache.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import graph_data, graph_job, graph_methods, graph_recall, measure
from benchmarks.graph_methods import RECALL, TUNED, Effort, Found, Task
from benchmarks.graph_peers import METHODS

CANDIDATE = "pynndescent"  # the only one that is measured in full before it is known to be best
CLOSE = 1.1  # a peer that one run shows this near to the best is measured in full
KS = (15, 45)


def main() -> None:
    """Measure, or with --tune search settings for the peers."""
    options = read_options()
    facts = measure.machine()
    found = {}
    for name in options.sets:
        rows = graph_data.load_set(options.data, name, options.quick)
        if rows is not None:
            with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as folder:
                found[name] = compare(rows, Path(folder), options)
    if options.tune:
        return
    if not found:
        measure.stop("no data set found; give --data the folder of the .npz files")
    document = {
        "machine": facts,
        "versions": measure.versions(graph_job.PACKAGES) | peer_versions(found),
        "quick": options.quick,
        "sets": found,
    }
    measure.publish(options, "graph_knn", document, report(document))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the .npz files")
    parser.add_argument("--sets", nargs="+", choices=graph_data.SETS, default=[*graph_data.SETS])
    parser.add_argument("--k", nargs="+", type=int, choices=KS, default=KS)
    parser.add_argument("--peers-python", default=sys.executable, help="Python that has the peers")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of ours and the best")
    parser.add_argument("--cold-rounds", type=int, default=3, help="cold starts of both")
    parser.add_argument("--skip-slow-peers", action="store_true", help=f"only {CANDIDATE}")
    parser.add_argument("--tune", action="store_true", help="search settings, measure nothing else")
    return parser.parse_args()


def compare(rows: graph_data.Rows, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of all methods on one data set, by k."""
    print(rows.title, file=sys.stderr)
    truth = graph_recall.find_truth(rows.vectors, max(options.k))
    if not options.tune:
        graph_data.write_lake(folder / "lake", graph_data.blocks_of(rows.vectors))
    cases = {}
    for k in options.k:
        task = graph_methods.save_task(
            folder / "peers", rows.vectors, truth, k, options.peers_python
        )
        if options.tune:
            tune(task, rows.name)
            continue
        ours = run_ours(task, folder, options)
        peers = run_peers(task, rows.name, options)
        cases[str(k)] = {
            "ours": ours,
            "peers": [peer_figures(peer) for peer in peers],
            "ratios": find_ratios(ours, peers),
        }
    return {"title": rows.title, "k": cases}


def tune(task: Task, name: str) -> None:
    """Print the fastest settings of each peer."""
    for method in METHODS:
        best = graph_methods.tune(task, method)
        told = f"{best.settings}: {best.recall:.4f}, {best.seconds[0]:.2f} s" if best else "none"
        print(f"best: {name} k={task.k} {method} {told}", flush=True)


def run_ours(task: Task, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Our figures: warm rounds, cold commands, the recall of the last round."""
    name = f"job-{task.k}"
    job = graph_job.make_job(folder, task.k, name)
    with graph_job.open_workers() as runner:
        rounds = graph_job.run_rounds(job, runner, graph_job.Rounds(options.rounds))
    last = rounds[-1].output
    ids = graph_job.read_neighbors(last, task.truth.queries)
    cold = [
        graph_job.run_cold(job, folder / f"{name}.yaml", folder / "numba")
        for _ in range(options.cold_rounds)
    ]
    own = graph_job.read_metrics(last, "recall")
    figures = {
        "recall": graph_recall.score(task.rows, task.truth, ids, task.k),
        "own_recall": {name: own[name] for name in ("recall", "recall_low", "recall_high")},
        "seconds": [found.seconds for found in rounds],
        "warm_seconds": graph_job.median_seconds(rounds),
        "steps": graph_job.step_seconds(rounds),
        "worker_peak_bytes": max(found.peak_bytes for found in rounds),
        "cold": [found._asdict() for found in cold],
        "cold_seconds": statistics.median(found.seconds for found in cold),
        "all_processes_bytes": max(found.peak_bytes for found in cold),
    }
    graph_job.remove_rounds(job)
    return figures


def run_peers(task: Task, name: str, options: argparse.Namespace) -> list[Found]:
    """The peers' figures; those that cannot be the best are run once, on some of the rows."""
    full = Effort(rounds=options.rounds + 1)
    found: list[Found] = []
    for method in [CANDIDATE] if options.skip_slow_peers else METHODS:
        trial = [TUNED[name, task.k][method]]
        if method == CANDIDATE:
            found += graph_methods.run_peer(task, method, trial, full)
            continue
        once = graph_methods.run_peer(task, method, trial, Effort(share=graph_methods.SLOW_SHARE))
        best = min((peer.warm_seconds for peer in found), default=float("inf"))
        if once and once[0].warm_seconds < CLOSE * best:
            once = graph_methods.run_peer(task, method, trial, full)
        found += once
    return [measure_cold(task, peer, options.cold_rounds) for peer in found]


def measure_cold(task: Task, peer: Found, times: int) -> Found:
    """The peer with its cold starts; a slow one, of which a share was searched, keeps its one."""
    return peer if peer.share > 1 else graph_methods.run_colds(task, peer, times)


def peer_figures(peer: Found) -> dict[str, Any]:
    """A peer's measurements and their medians, for the document."""
    medians = {"warm_seconds": peer.warm_seconds, "cold_seconds": peer.cold_seconds}
    return {**peer._asdict(), **medians}


def find_ratios(ours: dict[str, Any], peers: list[Found]) -> dict[str, Any]:
    """Our seconds against the fastest peer's, among those that reach the recall."""
    good = [peer for peer in peers if peer.recall >= RECALL]
    if not good:
        return {}
    warm = min(good, key=lambda peer: peer.warm_seconds)
    cold = min(good, key=lambda peer: peer.cold_seconds)
    return {
        "best_peer": warm.method,
        "warm": ours["warm_seconds"] / warm.warm_seconds,
        "cold": ours["cold_seconds"] / warm.cold_seconds,
        "best_cold_peer": cold.method,
        "best_cold": ours["cold_seconds"] / cold.cold_seconds,
    }


def peer_versions(found: dict[str, Any]) -> dict[str, str]:
    """Versions of the peers that ran."""
    peers = [peer for s in found.values() for case in s["k"].values() for peer in case["peers"]]
    return {METHODS[peer["method"]].distribution: peer["version"] for peer in peers}


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts = ["# kNN graphs", "", measure.conditions(document["machine"], document["versions"])]
    parts += ["", *NOTES]
    if document["quick"]:
        parts += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    parts += ["", "## Ours against the best peer", "", _summary(document["sets"])]
    for found in document["sets"].values():
        for k, case in found["k"].items():
            parts += ["", f"## {found['title']}, k={k}", "", _methods(case)]
            parts += ["", _steps(case["ours"])]
    return "\n".join(parts) + "\n"


NOTES = (
    f"- recall: {graph_recall.N_QUERIES:,} seeded rows against exact search; a row within 1e-5 of "
    "the k-th distance counts, the row itself does not.",
    "- seconds: median of the runs named; peers have all rows in memory as float32 and leave the "
    "graph there, ours reads its rows from a store and commits every step.",
    "- cold: from the start of a new process, imports, compilation and reading included, the "
    "numba cache empty; ours until the command has ended, but for the steps that measure recall. "
    "A median of cold starts, of a peer searched in part one.",
    "- a tenth: one run, all rows indexed, a tenth of them searched, the seconds of the search "
    "multiplied.",
    "- peak: resident memory of the largest process, and of all together in the cold run.",
)


def _summary(sets: dict[str, Any]) -> str:
    head = ["", "recall", "warm s", "to the best peer", "cold s", "to the same peer's cold"]
    head += ["to the best cold peer"]
    rows = []
    for found in sets.values():
        for k, case in found["k"].items():
            ours, ratios = case["ours"], case["ratios"]
            row = [f"{found['title']}, k={k}", graph_methods.show_recall(ours["recall"])]
            row += [f"{ours['warm_seconds']:.2f}"]
            row += [_ratio(ratios, "warm", "best_peer"), f"{ours['cold_seconds']:.1f}"]
            row += [_ratio(ratios, "cold", "best_peer")]
            rows.append([*row, _ratio(ratios, "best_cold", "best_cold_peer")])
    return measure.table(head, rows)


def _ratio(ratios: dict[str, Any], figure: str, peer: str) -> str:
    return f"{ratios[figure]:.2f} of {ratios[peer]}" if ratios else "no peer"


def _methods(case: dict[str, Any]) -> str:
    head = ["method", "settings", "recall", "runs", "seconds", "of the best peer", "cold s"]
    head += ["peak MiB", "all MiB"]
    ours, peers = case["ours"], case["peers"]
    good = [peer["warm_seconds"] for peer in peers if peer["recall"] >= RECALL]
    best = min(good, default=float("nan"))
    rows = [
        [
            f"lakemap, {graph_job.WORKERS} workers",
            f"neighbors.recall={RECALL}",
            graph_methods.show_recall(ours["recall"]),
            str(len(ours["seconds"])),
            f"{ours['warm_seconds']:.2f}",
            f"{ours['warm_seconds'] / best:.2f}",
            f"{ours['cold_seconds']:.1f}",
            measure.mebibytes(ours["worker_peak_bytes"]),
            measure.mebibytes(ours["all_processes_bytes"]),
        ]
    ]
    return measure.table(head, rows + [_peer_row(peer, best) for peer in peers])


def _peer_row(peer: dict[str, Any], best: float) -> list[str]:
    size = measure.mebibytes(peer["peak_bytes"])
    runs = max(1, len(peer["seconds"]) - 1)
    return [
        f"{peer['method']} {peer['version']}",
        graph_methods.describe(peer["settings"]),
        graph_methods.show_recall(peer["recall"]),
        str(runs) if peer["share"] == 1 else f"{runs}, a tenth",
        f"{peer['warm_seconds']:.2f}",
        f"{peer['warm_seconds'] / best:.2f}",
        f"{peer['cold_seconds']:.1f}",
        size,
        size,
    ]


def _steps(ours: dict[str, Any]) -> str:
    own = ours["own_recall"]
    steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in ours["steps"].items())
    interval = f"{own['recall_low']:.4f} to {own['recall_high']:.4f}"
    return f"Our steps, seconds: {steps}. Its own recall: {own['recall']:.4f} ({interval})."


if __name__ == "__main__":
    main()

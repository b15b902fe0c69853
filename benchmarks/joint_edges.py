"""Joint P and training edges out of core, beside scipy and numpy with everything in memory.

Ours: the stages symmetrize and edges on warm workers, reading affinities from a store and
committing P and every shard of edges. The reference: one process with all arrays in memory, scipy
for (P + P.T) / 2n and numpy for as many positives and negatives, shuffled.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from benchmarks import graph_data, graph_job, measure
from pipeline.stage import forget_peak_memory, peak_memory
from pipeline.stages.edges import EdgeSettings, settings

K = 45
N_ROWS = 200_000
WIDTH = 100
BEFORE = ("ingest", "sample", "neighbors", "affinity")
STAGES = ("symmetrize", "edges")
GOAL = 1.5
PACKAGES = (*graph_job.PACKAGES, "scipy")


class Affinities(NamedTuple):
    """Neighbours of n rows and their conditional affinities, (n, k) each."""

    ids: NDArray[np.int64]
    values: NDArray[np.float32]


class Edges(NamedTuple):
    """Edges in training order."""

    heads: NDArray[Any]  # (m,)
    tails: NDArray[Any]  # (m,)
    negatives: NDArray[Any]  # (m, negatives)


def main() -> None:
    """Measure both on the same affinities."""
    options = read_options()
    facts = measure.machine()
    rows = load_rows(options)
    with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as folder:
        found = compare(rows, Path(folder), options.rounds)
    document = {
        "machine": facts,
        "versions": measure.versions(PACKAGES),
        "quick": options.quick,
        "data": rows.title,
        "k": K,
        **found,
    }
    measure.publish(options, "joint_edges", document, report(document))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the .npz files; else generated rows")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each")
    return parser.parse_args()


def load_rows(options: argparse.Namespace) -> graph_data.Rows:
    """GloVe where it is there, else generated rows."""
    rows = graph_data.load_set(options.data, "glove", options.quick) if options.data else None
    if rows is not None:
        return rows
    n_rows = graph_data.QUICK_ROWS if options.quick else N_ROWS
    return graph_data.Rows("generated", np.concatenate([*graph_data.generate(n_rows, WIDTH)]))


def compare(rows: graph_data.Rows, folder: Path, n_rounds: int) -> dict[str, Any]:
    """Figures of ours and of the reference."""
    graph_data.write_lake(folder / "lake", graph_data.blocks_of(rows.vectors))
    job = graph_job.make_job(folder, K)
    print(f"{rows.title}: neighbours and affinities first", file=sys.stderr)
    with graph_job.open_workers() as runner:
        plan = graph_job.Rounds(n_rounds, STAGES, BEFORE)
        rounds = graph_job.run_rounds(job, runner, plan)
    affinities = read_affinities(Path(job.output))
    config = settings(job)
    forget_peak_memory()
    seconds, n_entries = time_reference(affinities, config, n_rounds)
    reference_bytes = peak_memory()
    ours, theirs = graph_job.median_seconds(rounds), statistics.median(seconds)
    return {
        "edges": config.samples,
        "negatives": config.negatives,
        "reference_entries": n_entries,
        "entries": graph_job.read_metrics(rounds[-1].output, "symmetrize")["n_entries"],
        "seconds": [found.seconds for found in rounds],
        "median": ours,
        "steps": graph_job.step_seconds(rounds),
        "peak_bytes": max(found.peak_bytes for found in rounds),
        "reference_seconds": seconds,
        "reference_median": theirs,
        "reference_peak_bytes": reference_bytes,
        "ratio": ours / theirs,
    }


def read_affinities(output: Path) -> Affinities:
    """All affinities, from the stores."""
    neighbors = graph_job.open_step(output, "neighbors")
    affinity = graph_job.open_step(output, "affinity")
    return Affinities(
        neighbors.rows("ids", 0, neighbors.n_rows), affinity.rows("values", 0, affinity.n_rows)
    )


def time_reference(
    affinities: Affinities, config: EdgeSettings, rounds: int
) -> tuple[list[float], int]:
    """Seconds of each round but the first, which is not counted, and the entries of P."""
    seconds, n_entries = [], 0
    for _ in range(rounds + 1):
        started = time.perf_counter()
        joint = join(affinities)
        draw(joint, config.samples, config.negatives, np.random.default_rng(config.seed))
        seconds.append(time.perf_counter() - started)
        n_entries = joint.nnz
    return seconds[1:], n_entries


def join(affinities: Affinities) -> Any:
    """P = (p(j|i) + p(i|j)) / 2n as a sparse matrix; sorting its rows first would cost more."""
    n_rows, k = affinities.ids.shape
    starts = np.arange(0, n_rows * k + 1, k)
    parts = (affinities.values.ravel(), affinities.ids.ravel(), starts)
    conditional = sparse.csr_array(parts, shape=(n_rows, n_rows))
    joint = conditional + conditional.T
    joint.data /= 2 * n_rows
    return joint


def draw(joint: Any, n_edges: int, n_negatives: int, rng: np.random.Generator) -> Edges:
    """Edges drawn by P and uniform negatives that are not the head, in random order."""
    n_rows = joint.shape[0]
    cumulative = np.cumsum(joint.data, dtype=np.float64)
    # Sorted needles walk the cumulative sum in memory order: faster than random ones.
    heights = np.sort(rng.random(n_edges)) * cumulative[-1]
    entries = np.searchsorted(cumulative, heights, side="right")
    np.minimum(entries, len(cumulative) - 1, out=entries)
    heads = np.searchsorted(joint.indptr, entries, side="right") - 1
    tails = joint.indices[entries].astype(np.int64)
    order = rng.permutation(n_edges)
    heads, tails = heads[order], tails[order]
    negatives = rng.integers(n_rows - 1, size=(n_edges, n_negatives))
    negatives += negatives >= heads[:, np.newaxis]
    return Edges(heads, tails, negatives)


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in document["steps"].items())
    rows = [
        _row(f"lakemap, {graph_job.WORKERS} workers", document, ""),
        _row("scipy and numpy, one process", document, "reference_"),
    ]
    head = ["", "seconds", "ratio", "entries of P", "peak MiB of one process"]
    parts = [
        f"# Joint P and edges: {document['data']}, k={K}",
        "",
        measure.conditions(document["machine"], document["versions"]),
        "",
        f"From affinities to {document['edges']:,} edges with {document['negatives']} negatives "
        f"each. Ours reads and writes stores, the reference has all in memory. Medians of "
        f"{len(document['seconds'])}; the goal is a ratio of at most {GOAL}.",
        "",
        measure.table(head, rows),
        "",
        f"Our steps, seconds: {steps}.",
    ]
    if document["quick"]:
        parts += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    return "\n".join(parts) + "\n"


def _row(name: str, document: dict[str, Any], prefix: str) -> list[str]:
    median = document[f"{prefix}median"]
    return [
        name,
        f"{median:.2f}",
        f"{median / document['reference_median']:.2f}",
        f"{document[f'{prefix}entries']:,}",
        measure.mebibytes(document[f"{prefix}peak_bytes"]),
    ]


if __name__ == "__main__":
    main()

"""Perplexity calibration and UMAP memberships on one core, beside openTSNE's and umap-learn's own.

All are given the same distances of 200,000 rows to 90 neighbours. Only the functions are timed,
after a call that is not counted; every entry is compared.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from benchmarks import graph_data, measure
from benchmarks.calibration_peers import NOT_INSTALLED, WARM_ROWS
from pipeline.kernels.affinity import calibrate
from pipeline.kernels.memberships import find_memberships

Floats = NDArray[np.float32]

N_ROWS = 200_000
K = 90
PERPLEXITY = 30.0
WIDTH = 100
N_OTHERS = 4096
BLOCK = 4096
TOLERANCE = 1e-4
PACKAGES = ("lakemap", "numpy", "numba")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
OURS: dict[str, tuple[str, Callable[[Floats], Floats]]] = {
    "openTSNE": ("perplexity", lambda distances: calibrate(distances, PERPLEXITY).affinities),
    "umap-learn": ("memberships", lambda distances: find_memberships(distances).values),
}


def main() -> None:
    """Measure each of ours beside its peer."""
    options = read_options()
    facts = measure.machine()
    rows = load_rows(options)
    with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as name:
        folder = Path(name)
        np.save(folder / "distances.npy", make_distances(rows.vectors))
        found = {peer: compare(peer, folder, options) for peer in OURS}
    peers = {peer: case["peer"]["version"] for peer, case in found.items() if case["peer"]}
    document = {
        "machine": facts,
        "versions": measure.versions(PACKAGES) | peers,
        "quick": options.quick,
        "rows": len(rows.vectors),
        "k": K,
        "perplexity": PERPLEXITY,
        "data": rows.title,
        "cases": found,
    }
    measure.publish(options, "calibration", document, report(document))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the .npz files; else generated rows")
    parser.add_argument("--peers-python", default=sys.executable, help="Python that has the peers")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    return parser.parse_args()


def load_rows(options: argparse.Namespace) -> graph_data.Rows:
    """GloVe where it is there, else generated rows."""
    rows = graph_data.load_set(options.data, "glove", options.quick) if options.data else None
    if rows is not None:
        return graph_data.Rows(rows.name, rows.vectors[:N_ROWS])
    n_rows = graph_data.QUICK_ROWS if options.quick else N_ROWS
    return graph_data.Rows("generated", np.concatenate([*graph_data.generate(n_rows, WIDTH)]))


def make_distances(vectors: NDArray[Any]) -> Floats:
    """Squared distances of every row to the nearest among 4,096 other rows, (n, 90), ascending."""
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(vectors), min(N_OTHERS, len(vectors) // 2), replace=False)
    others = vectors[chosen].astype(np.float32)
    lengths = np.einsum("ij,ij->i", others, others)
    distances = np.empty((len(vectors), K), np.float32)
    for start in range(0, len(vectors), BLOCK):
        block = vectors[start : start + BLOCK].astype(np.float32)
        near = lengths - 2 * (block @ others.T)
        near += np.einsum("ij,ij->i", block, block)[:, np.newaxis]
        near[near < 1e-2] = np.inf  # the row itself, or nearly
        distances[start : start + BLOCK] = np.sort(np.partition(near, K, axis=1)[:, :K], axis=1)
    return distances


def compare(peer: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both, and the largest difference of any entry.

    Rows in which openTSNE itself misses the perplexity, as it does where distances are large
    against their spread, are counted and left out of the difference.
    """
    distances: Floats = np.load(folder / "distances.npy")
    title, call = OURS[peer]
    values, seconds = time_ours(call, distances, options.rounds)
    case = {"title": title, "seconds": seconds, "median": statistics.median(seconds)}
    theirs = run_peer(peer, folder, options)
    if theirs is None:
        return {**case, "peer": None}
    found = np.load(folder / "values.npy")
    missed = misses(found) if peer == "openTSNE" else np.zeros(len(found), bool)
    return {
        **case,
        "peer": theirs,
        "ratio": theirs["median"] / case["median"],
        "largest_difference": float(np.abs(found - values)[~missed].max()),
        "rows_missed_by_peer": int(missed.sum()),
        "rows_missed": int(misses(values).sum()) if peer == "openTSNE" else 0,
    }


def misses(affinities: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows, (n,), whose perplexity is not the requested one to a relative 1e-4."""
    p = affinities.astype(np.float64)
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1)
    return np.asarray(np.abs(np.exp(entropy) / PERPLEXITY - 1) > TOLERANCE)


def time_ours(
    call: Callable[[Floats], Floats], distances: Floats, rounds: int
) -> tuple[Floats, list[float]]:
    """The values and the seconds of each round, on one thread."""
    seconds = []
    with threadpool_limits(limits=1):
        values = call(distances[:WARM_ROWS])
        for _ in range(rounds):
            started = time.perf_counter()
            values = call(distances)
            seconds.append(time.perf_counter() - started)
    return values, seconds


def run_peer(peer: str, folder: Path, options: argparse.Namespace) -> dict[str, Any] | None:
    """The peer's seconds; None when it is not installed."""
    script = Path(__file__).with_name("calibration_peers.py")
    files = [str(folder / "distances.npy"), str(folder / "values.npy")]
    command = [options.peers_python, str(script), peer, *files]
    try:
        measured = measure.run_measured(
            [*command, str(PERPLEXITY), str(options.rounds)], ONE_THREAD
        )
    except measure.CommandError as error:
        if error.code != NOT_INSTALLED:
            raise
        print(f"{peer} not installed: pip install {peer}", file=sys.stderr)
        return None
    told = json.loads(measured.stdout.splitlines()[-1])
    return {**told, "median": statistics.median(told["seconds"]), "peak": measured.largest_bytes}


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts = [
        f"# Calibration: {document['rows']:,} rows, k={K}, one core",
        "",
        measure.conditions(document["machine"], document["versions"]),
        "",
        f"Distances of {document['data']} to the nearest among {N_OTHERS:,} of its rows; "
        f"perplexity {PERPLEXITY:g}. Medians; a first call, which compiles, is not counted.",
        "",
        _table(document["cases"]),
        "",
        "Missed: rows whose perplexity is off by more than a relative 1e-4, ours / the peer's; the "
        "difference is of the other rows. Memberships have no such rows.",
    ]
    if document["quick"]:
        parts += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    return "\n".join(parts) + "\n"


def _table(cases: dict[str, Any]) -> str:
    head = ["", "seconds", "peer", "its seconds", "times faster", "largest difference"]
    head += ["missed", "peer MiB"]
    rows = []
    for name, case in cases.items():
        row, peer = [case["title"], f"{case['median']:.3f}"], case["peer"]
        if peer is None:
            rows.append([*row, f"{name} not installed", "", "", "", "", ""])
            continue
        row += [f"{name} {peer['version']}", f"{peer['median']:.3f}", f"{case['ratio']:.1f}"]
        verdict = "" if case["largest_difference"] < TOLERANCE else f" (above {TOLERANCE:g})"
        row += [f"{case['largest_difference']:.1e}{verdict}"]
        row += [f"{case['rows_missed']:,} / {case['rows_missed_by_peer']:,}"]
        row += [measure.mebibytes(peer["peak"])]
        rows.append(row)
    return measure.table(head, rows)


if __name__ == "__main__":
    main()

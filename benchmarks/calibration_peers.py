"""The calibration of openTSNE or umap-learn, on one thread; imports nothing of this project.

python calibration_peers.py NAME DISTANCES.npy VALUES.npy PERPLEXITY ROUNDS

DISTANCES is (n, k) float32, squared, without the row itself. Each is given what it takes inside
its package, in the number format it wants; only its own functions are timed. A first call that
is not counted compiles them. Exit code 3: it is not installed.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

NOT_INSTALLED = 3
WARM_ROWS = 2000
Call = Callable[[], Any]


def prepare_opentsne(module: Any, distances: Any, perplexity: float) -> Call:
    """As openTSNE/affinity.py calls it: plain distances, float64."""
    plain = np.sqrt(distances.astype(np.float64))
    wanted = np.array([perplexity])
    return lambda: module.compute_gaussian_perplexity(plain, wanted, num_threads=1)


def prepare_umap(module: Any, distances: Any, _: float) -> Call:
    """As umap/umap_.py calls them: plain distances, float32, the row itself in front."""
    n_rows, k = distances.shape
    plain = np.zeros((n_rows, k + 1), np.float32)
    np.sqrt(distances, out=plain[:, 1:])
    ids = np.full((n_rows, k + 1), n_rows, np.int32)  # any but the row itself
    ids[:, 0] = np.arange(n_rows)

    def call() -> Any:
        sigmas, rhos = module.smooth_knn_dist(plain, float(k + 1))
        found = module.compute_membership_strengths(ids, plain, sigmas, rhos)
        return found[2].reshape(n_rows, k + 1)[:, 1:]

    return call


PEERS = {
    "openTSNE": ("openTSNE._tsne", "openTSNE", prepare_opentsne),
    "umap-learn": ("umap.umap_", "umap-learn", prepare_umap),
}


def main(name: str, distances_file: str, values_file: str, perplexity: str, rounds: str) -> None:
    """Load, warm up, time, write, report."""
    place, distribution, prepare = PEERS[name]
    try:
        module = importlib.import_module(place)
    except ImportError:
        sys.exit(NOT_INSTALLED)
    distances = np.load(distances_file)
    prepare(module, distances[:WARM_ROWS], float(perplexity))()
    call, seconds = prepare(module, distances, float(perplexity)), []
    for _ in range(int(rounds)):
        started = time.perf_counter()
        values = call()
        seconds.append(time.perf_counter() - started)
    np.save(values_file, np.asarray(values))
    print(json.dumps({"version": version(distribution), "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])

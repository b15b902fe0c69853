"""One peer on one data set, in a process of its own; imports nothing of this project.

python peers.py NAME DATA.npz N_TRAIN N_TEST PLACES.npz

Fits on the training rows, transforms the test rows, writes both sets of places, and prints the
seconds of each as JSON. Everything is a first call, so compilation counts. Exit code 3: the peer
is not installed.
"""

import importlib
import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np

NOT_INSTALLED = 3
DISTRIBUTIONS = {"umap": "umap-learn", "openTSNE": "openTSNE"}


def make_umap(module: Any) -> Any:
    """umap-learn as it comes; without a seed, because a seed would confine it to one core."""
    return module.UMAP()


def make_opentsne(module: Any) -> Any:
    """openTSNE as it comes, on all cores."""
    return module.TSNE(n_jobs=-1, random_state=0)


MAKERS = {"umap": make_umap, "openTSNE": make_opentsne}


def main(name: str, data: str, n_train: str, n_test: str, places: str) -> None:
    """Fit, transform, write, report."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        sys.exit(NOT_INSTALLED)
    with np.load(data, allow_pickle=False) as arrays:
        train = arrays["x_train"][: int(n_train)].astype(np.float32)
        test = arrays["x_test"][: int(n_test)].astype(np.float32)
    started = time.perf_counter()
    fitted = MAKERS[name](module).fit(train)
    fit_seconds = time.perf_counter() - started
    started = time.perf_counter()
    test_places = fitted.transform(test)
    transform_seconds = time.perf_counter() - started
    train_places = fitted.embedding_ if name == "umap" else fitted
    np.savez(places, train=np.asarray(train_places), test=np.asarray(test_places))
    document = {
        "version": version(DISTRIBUTIONS[name]),
        "fit_seconds": fit_seconds,
        "transform_seconds": transform_seconds,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])

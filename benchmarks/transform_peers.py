"""One peer's transform, in a process of its own; imports nothing of this project.

python transform_peers.py NAME DATA.npz N_TRAIN

Fits on the training rows, transforms the test rows once cold and then three times, and prints the
seconds as JSON. Exit code 3: the peer is not installed. ParametricUMAP is fitted on 2,000 rows,
because the time of its network does not depend on what it has learned.
"""

import importlib
import json
import sys
import time
from importlib.metadata import version
from typing import Any

import numpy as np

NOT_INSTALLED = 3
WARM_ROUNDS = 3
PEERS = {"umap": "umap-learn", "openTSNE": "openTSNE", "umap.parametric_umap": "umap-learn"}


def fit_umap(module: Any, rows: Any) -> Any:
    """umap-learn as it comes; without a seed, because a seed would confine it to one core."""
    return module.UMAP().fit(rows)


def fit_opentsne(module: Any, rows: Any) -> Any:
    """openTSNE as it comes, on all cores."""
    return module.TSNE(n_jobs=-1, random_state=0).fit(rows)


def fit_parametric(module: Any, rows: Any) -> Any:
    """ParametricUMAP's own network."""
    return module.ParametricUMAP().fit(rows[:2000])


FITS = {"umap": fit_umap, "openTSNE": fit_opentsne, "umap.parametric_umap": fit_parametric}


def main(name: str, data: str, n_train: str) -> None:
    """Fit, transform, report."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        sys.exit(NOT_INSTALLED)
    with np.load(data, allow_pickle=False) as arrays:
        train = arrays["x_train"][: int(n_train)].astype(np.float32)
        test = arrays["x_test"].astype(np.float32)
    fitted = FITS[name](module, train)
    seconds = []
    for _ in range(1 + WARM_ROUNDS):
        started = time.perf_counter()
        fitted.transform(test)
        seconds.append(time.perf_counter() - started)
    document = {"version": version(PEERS[name]), "rows": len(test), "seconds": seconds}
    print(json.dumps(document))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Data sets, methods and scores of the tables: every method on the same rows, by the same code."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.manifold import trustworthiness
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from benchmarks import measure
from benchmarks.lake_to_map import Rows
from benchmarks.peers import DISTRIBUTIONS, NOT_INSTALLED
from encoders.artifact import Encoder
from encoders.baselines import fit_autoencoder, fit_embedding
from encoders.fit import FitConfig
from encoders.networks import NetworkConfig
from encoders.objectives import ObjectiveConfig
from encoders.preprocessing import PreprocessingConfig, fit_preprocessing
from pipeline.estimator import DEFAULT, Lakemap
from pipeline.stages.train import COMPONENTS

K = 10
TRUST_K = 12
TRUST_ROWS = 5000
PAPER_K = 1
PAPER_TRUST_K = 5
MOST_TRAINING = 10_000  # the cap of the paper's release
MOST_TEST = 10_000
BASELINE_CLIP = 1e6
BASELINE_LEARNING_RATE = 3e-3


# Scores of every run by set and method, or by what is varied and its value.
Found = dict[str, dict[str, Any]]


class Places(NamedTuple):
    """Map positions of the training and the test rows, and the seconds of the fit."""

    train: NDArray[Any]
    test: NDArray[Any]
    fit_seconds: float


def load(folder: Path, name: str, seed: int, n_train: int = MOST_TRAINING) -> Rows:
    """The set: its official split, or a seeded fifth as test rows; training rows drawn by seed."""
    path = folder / f"{name}.npz"
    if not path.is_file():
        measure.stop(f"{path} is missing; benchmarks/README.md says what it must hold")
    rng = np.random.default_rng([seed, 1])
    with np.load(path, allow_pickle=False) as arrays:
        if "x_train" in arrays.files:
            parts = Rows(*(arrays[key] for key in Rows._fields))
        else:
            x, y = arrays["x"], arrays["y"]
            order = rng.permutation(len(x))
            n_test = len(x) // 5
            test, train = order[:n_test], order[n_test:]
            parts = Rows(x[train], y[train], x[test], y[test])
    chosen = rng.permutation(len(parts.x_train))[:n_train]
    tested = rng.permutation(len(parts.x_test))[:MOST_TEST]
    return Rows(
        parts.x_train[chosen], parts.y_train[chosen], parts.x_test[tested], parts.y_test[tested]
    )


def score(rows: Rows, places: Places) -> dict[str, float]:
    """10-NN accuracy (training rows: among the others), trustworthiness, and the paper's figures.

    The paper's are of 1-NN, and of trustworthiness with k=5 on as many training rows as it has.
    """
    near = NearestNeighbors(n_neighbors=K).fit(places.train).kneighbors(return_distance=False)
    votes = rows.y_train[near]
    counts = (votes[:, :, np.newaxis] == votes[:, np.newaxis]).sum(2)
    winners = votes[np.arange(len(votes)), counts.argmax(1)]
    trust_rows, paper_rows = slice(TRUST_ROWS), slice(MOST_TRAINING)
    return {
        "train_accuracy": float((winners == rows.y_train).mean()),
        "test_accuracy": _guess(rows, places, K),
        "train_trustworthiness": _trust(
            rows.x_train[trust_rows], places.train[trust_rows], TRUST_K
        ),
        "test_trustworthiness": _trust(rows.x_test[trust_rows], places.test[trust_rows], TRUST_K),
        "train_nearest": float((votes[:, 0] == rows.y_train).mean()),
        "test_nearest": _guess(rows, places, PAPER_K),
        "train_paper_trustworthiness": _trust(
            rows.x_train[paper_rows], places.train[paper_rows], PAPER_TRUST_K
        ),
        "fit_seconds": places.fit_seconds,
    }


def _guess(rows: Rows, places: Places, k: int) -> float:
    """The share of test rows whose label the k nearest training rows tell."""
    classifier = KNeighborsClassifier(k).fit(places.train, rows.y_train)
    return float(classifier.score(places.test, rows.y_test))


def _trust(vectors: NDArray[Any], places: NDArray[Any], k: int) -> float:
    k = min(k, len(vectors) // 2 - 1)
    return float(trustworthiness(vectors.astype(np.float32), places, n_neighbors=k))


def ours(rows: Rows, seed: int, **settings: Any) -> Places:
    """Lakemap, with its defaults but for the settings."""
    batch = min(settings.pop("batch", DEFAULT.batch), len(rows.x_train) // 2 * 2)
    mapped = Lakemap(random_state=seed, batch=batch, **settings)
    return _timed(lambda: mapped.fit(rows.x_train).encoder_, rows)


def autoencoder(rows: Rows, seed: int) -> Places:
    """The same encoder, trained with a decoder to give the rows back."""
    return _timed(lambda: _baseline(rows, seed, None), rows)


def supervised(rows: Rows, seed: int, targets: NDArray[Any]) -> Places:
    """The same encoder, trained to put the training rows where another method has put them."""
    return _timed(lambda: _baseline(rows, seed, targets / targets.std()), rows)


def _baseline(rows: Rows, seed: int, targets: NDArray[Any] | None) -> Encoder:
    network = NetworkConfig(DEFAULT.encoder.kind, DEFAULT.encoder.hidden, DEFAULT.encoder.layers)
    config = FitConfig(
        ObjectiveConfig(clip=BASELINE_CLIP),
        steps=DEFAULT.steps,
        learning_rate=BASELINE_LEARNING_RATE,
        clip_layer=BASELINE_CLIP,
        exaggeration=1.0,
        seed=seed,
        threads=torch.get_num_threads(),
    )
    steps = fit_preprocessing(rows.x_train, PreprocessingConfig(pca=COMPONENTS))
    x, batch = rows.x_train, DEFAULT.batch
    if targets is None:
        trained = fit_autoencoder(x, steps, network, config, batch)
    else:
        trained = fit_embedding(x, targets, steps, network, config, batch)
    return Encoder(network, steps, trained)


def _timed(fit: Callable[[], Encoder], rows: Rows) -> Places:
    started = time.perf_counter()
    encoder = fit()
    seconds = time.perf_counter() - started
    return Places(encoder.embed(rows.x_train), encoder.embed(rows.x_test), seconds)


def pca(rows: Rows, seed: int) -> Places:
    """The two principal components."""
    started = time.perf_counter()
    fitted = PCA(2, random_state=seed).fit(rows.x_train.astype(np.float32))
    seconds = time.perf_counter() - started
    train, test = (fitted.transform(x.astype(np.float32)) for x in (rows.x_train, rows.x_test))
    return Places(train, test, seconds)


def mean(scores: Sequence[dict[str, float]], key: str) -> float:
    """The mean of one score over the runs."""
    return statistics.fmean(found[key] for found in scores)


def peer(name: str, rows: Rows, python: str) -> tuple[Places, str] | None:
    """umap-learn or openTSNE as they come, and the version; None when it is not installed."""
    script = Path(__file__).with_name("peers.py")
    with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as folder:
        data, found = Path(folder, "rows.npz"), Path(folder, "places.npz")
        np.savez(data, **rows._asdict())
        sizes = [str(len(rows.x_train)), str(len(rows.x_test))]
        try:
            told = measure.run_measured([python, str(script), name, str(data), *sizes, str(found)])
        except measure.CommandError as error:
            if error.code != NOT_INSTALLED:
                raise
            print(f"{DISTRIBUTIONS[name]} not installed in {python}", file=sys.stderr)
            return None
        facts = json.loads(told.stdout.splitlines()[-1])
        with np.load(found, allow_pickle=False) as arrays:
            return Places(arrays["train"], arrays["test"], facts["fit_seconds"]), facts["version"]

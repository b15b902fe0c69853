"""Makes affinities.npz: distances of rows easy and hard, and what the peers make of them.

Run it where openTSNE, umap-learn and scikit-learn are installed; it imports nothing of ours:
python tests/golden/make.py tests/golden/affinities.npz

distances   (n, k) float32, squared, ascending, without the row itself
opentsne    (n, k) float32, p(j|i)
umap        (n, k) float32, memberships
perplexity  of opentsne
versions    of the peers
"""

import importlib
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors

N_DIGITS, K, PERPLEXITY = 150, 45, 15.0
PEERS = ("openTSNE", "umap-learn", "scikit-learn")

Doubles = NDArray[np.float64]


def digit_rows() -> Doubles:
    """Squared distances of some digits to their neighbours, (N_DIGITS, K)."""
    rows = load_digits().data
    found = NearestNeighbors(n_neighbors=K + 1, algorithm="brute").fit(rows)
    distances = found.kneighbors(rows[:N_DIGITS])[0][:, 1:]
    return np.asarray(np.rint(distances**2))  # pixels are whole numbers


def hard_rows(digits: Doubles) -> Doubles:
    """Rows with duplicates, ties, distant scales and heavy tails, (m, K)."""
    rng = np.random.default_rng(0)
    scaled = [digits[i] * scale for i, scale in enumerate((1e-8, 1e-4, 1e-1, 1e2, 1e6, 1e8))]
    duplicates = [
        np.where(np.arange(K) < n_zeros, 0, digits[7])
        for n_zeros in (1, 2, 5, 6, 7, 14, 15, 16, 30, K - 1, K)
    ]
    ties = [
        np.where(np.arange(K) < n_ties, digits[8, 0], digits[8] + 1)
        for n_ties in (2, 5, 6, 7, 14, 15, 30, K - 1, K)
    ]
    stairs = [
        np.repeat([near, 1.0, far], [n_near, 20, K - 20 - n_near]) * (1 + rng.random(K) / 1e3)
        for near, far in ((1e-6, 1e3), (0, 1e6), (1e-2, 1e2))
        for n_near in (3, 12)
    ]
    drawn = [rng.random(K), rng.chisquare(2, K), *rng.lognormal(sigma=3, size=(6, K))]
    return np.sort(np.stack([*scaled, *duplicates, *ties, *stairs, *drawn]), axis=1)


def gaussian(distances: NDArray[np.float32]) -> NDArray[np.float32]:
    """p(j|i) of openTSNE, called as its own affinities call it."""
    peer: Any = importlib.import_module("openTSNE._tsne")
    plain = np.sqrt(distances.astype(np.float64))
    found = peer.compute_gaussian_perplexity(plain, np.array([PERPLEXITY]), num_threads=1)
    return np.asarray(found, np.float32)


def memberships(distances: NDArray[np.float32]) -> NDArray[np.float32]:
    """Memberships of umap-learn, which has each row as its own first neighbour, at distance 0."""
    peer: Any = importlib.import_module("umap.umap_")
    n_rows, k = distances.shape
    plain = np.concatenate([np.zeros((n_rows, 1), np.float32), np.sqrt(distances)], axis=1)
    own = np.arange(n_rows)[:, np.newaxis]
    ids = np.concatenate([own, np.broadcast_to(n_rows + np.arange(k), (n_rows, k))], axis=1)
    sigmas, rhos = peer.smooth_knn_dist(plain, float(k + 1), local_connectivity=1.0, bandwidth=1.0)
    values = peer.compute_membership_strengths(ids.astype(np.int32), plain, sigmas, rhos)[2]
    return np.asarray(values.reshape(n_rows, k + 1)[:, 1:], np.float32)


def main(path: str) -> None:
    """Write the file."""
    digits = digit_rows()
    distances = np.concatenate([digits, hard_rows(digits)]).astype(np.float32)
    np.savez_compressed(
        path,
        distances=distances,
        opentsne=gaussian(distances),
        umap=memberships(distances),
        perplexity=np.array(PERPLEXITY),
        versions=np.array([f"{name} {version(name)}" for name in PEERS]),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

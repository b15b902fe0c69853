"""The recall of any method's neighbours: one code, one set of query rows, exact distances."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

N_QUERIES = 1000
TOLERANCE = 1e-5  # farther than the true k-th by so little is as near
_SPARE = 32  # candidates beyond k, so that what float32 misjudges is put right in float64
_BLOCK_ROWS = 1 << 16


class Truth(NamedTuple):
    """Query rows and how far the k-th neighbour of each is, for every k up to some number."""

    queries: NDArray[np.int64]  # (q,) ascending
    distances: NDArray[np.float64]  # (q, k) ascending in each row


def find_truth(rows: NDArray[Any], k: int, seed: int = 0) -> Truth:
    """The true distances of seeded query rows; rows is (n, d), any numbers, maybe on disk."""
    rng = np.random.default_rng(seed)
    queries = np.sort(rng.choice(len(rows), min(N_QUERIES, len(rows)), replace=False))
    vectors = rows[queries].astype(np.float32)
    ids = np.empty((len(queries), 0), np.int64)
    values = np.empty((len(queries), 0), np.float32)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS].astype(np.float32)
        near = np.einsum("ij,ij->i", block, block) - 2 * (vectors @ block.T)
        inside = (queries >= start) & (queries < start + len(block))
        near[inside, queries[inside] - start] = np.inf
        best = _least(near, k + _SPARE)
        ids = np.concatenate([ids, best + start], axis=1)
        values = np.concatenate([values, np.take_along_axis(near, best, 1)], axis=1)
        best = _least(values, k + _SPARE)
        ids, values = np.take_along_axis(ids, best, 1), np.take_along_axis(values, best, 1)
    return Truth(queries, np.sort(measure_distances(rows, queries, ids), axis=1)[:, :k])


def _least(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Where the least values of each row are, (q, count), in any order."""
    count = min(count, values.shape[1])
    return np.argpartition(values, count - 1, axis=1)[:, :count]


def measure_distances(
    rows: NDArray[Any], queries: NDArray[np.int64], ids: NDArray[np.int64]
) -> NDArray[np.float64]:
    """How far each query row is from the rows `ids`, (q, m), in float64; itself infinitely."""
    distances = np.empty(ids.shape)
    for place, (query, others) in enumerate(zip(queries, ids, strict=True)):
        gaps = rows[others].astype(np.float64) - rows[query].astype(np.float64)
        distances[place] = np.sqrt(np.einsum("ij,ij->i", gaps, gaps))
    distances[ids == queries[:, np.newaxis]] = np.inf
    return distances


def score(rows: NDArray[Any], truth: Truth, found: NDArray[Any], k: int) -> float:
    """The share of the k nearest that were found; found is (q, m), nearest first, m >= k.

    The row itself, a number below 0 and a number that comes twice count for nothing.
    """
    limits = truth.distances[:, k - 1] * (1 + TOLERANCE)
    hits = 0
    distances = measure_distances(rows, truth.queries, np.maximum(found, 0).astype(np.int64))
    distances[found < 0] = np.inf
    for ids, away, limit in zip(found, distances, limits, strict=True):
        others = np.isfinite(away)
        chosen = np.unique(ids[others][:k], return_index=True)[1]
        hits += int(np.count_nonzero(away[others][chosen] <= limit))
    return hits / (k * len(found))

"""How well a map keeps labels and neighborhoods."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

Reals = NDArray[np.floating[Any]]
Labels = NDArray[np.integer[Any]]
Positions = NDArray[np.int64]

_BLOCK_VALUES = 1 << 22


def knn_accuracy(
    reference_xy: Reals,
    reference_labels: Labels,
    query_xy: Reals,
    query_labels: Labels,
    k: int,
    leave_one_out: bool = False,
) -> float:
    """Return the share of queries whose label is the majority among their k nearest references.

    xy are (n, 2), labels (n,) integer codes. Of labels with equally many votes the one with the
    nearest member wins. With leave_one_out the queries are the references; each ignores itself.
    """
    n_others = len(reference_xy) - int(leave_one_out)
    if not 1 <= k <= n_others or len(query_xy) == 0:
        raise ValueError(f"{k} neighbors of {len(query_xy)} queries among {n_others} references")
    tree = KDTree(reference_xy)
    n_right = 0
    for part in _blocks(len(query_xy), k * k):
        if leave_one_out:
            own = np.arange(part.start, part.stop)
            nearest = _without_own(_query(tree, query_xy[part], k + 1), own)
        else:
            nearest = _query(tree, query_xy[part], k)
        n_right += int((_majority(reference_labels[nearest]) == query_labels[part]).sum())
    return n_right / len(query_xy)


def trustworthiness(rows: Reals, xy: Reals, k: int) -> float:
    """Return the trustworthiness of the map, 0..1: are neighbors in xy also near in rows?

    rows is (n, d), xy (n, 2); k is below n / 2. Each of the k nearest in xy costs its rank in
    rows beyond k (Venna and Kaski, 2001). Memory is O(n), not O(n^2).
    """
    return _faithfulness(rows, _nearest(xy, k), k)


def continuity(rows: Reals, xy: Reals, k: int) -> float:
    """Return the continuity of the map, 0..1: are neighbors in rows also near in xy?"""
    return _faithfulness(xy, _nearest(rows, k), k)


def neighbor_recall(rows: Reals, xy: Reals, k: int) -> float:
    """Return the mean share of each row's k nearest in rows that are among its k nearest in xy."""
    in_rows, in_xy = _nearest(rows, k), _nearest(xy, k)
    shared = sum(
        int((in_rows[part, :, np.newaxis] == in_xy[part, np.newaxis, :]).sum())
        for part in _blocks(len(rows), k * k)
    )
    return shared / in_rows.size


def _query(tree: KDTree, xy: Reals, k: int) -> Positions:
    """Return the k nearest points of the tree for each of xy, (n, k), nearest first."""
    _, nearest = tree.query(xy, k=np.arange(1, k + 1))
    return np.asarray(nearest, dtype=np.int64)


def _without_own(nearest: Positions, own: Positions) -> Positions:
    """Return nearest, (n, k + 1), without each row's own position, or its last: (n, k).

    Among many equal points a row's own position need not be in its list.
    """
    dropped = nearest == own[:, np.newaxis]
    dropped[:, -1] |= ~dropped.any(axis=1)
    kept: Positions = nearest[~dropped].reshape(len(nearest), -1)
    return kept


def _majority(labels: Labels) -> Labels:
    """Return the commonest label of each row, (n,), of labels (n, k) with the nearest first."""
    votes = (labels[:, :, np.newaxis] == labels[:, np.newaxis, :]).sum(axis=2)
    winner = votes.argmax(axis=1)  # the first of equals, so the nearest
    return np.asarray(labels[np.arange(len(labels)), winner])


def _faithfulness(space: Reals, neighbors: Positions, k: int) -> float:
    """Return 1 minus the scaled sum of the ranks beyond k that neighbors, (n, k), have in space."""
    n_rows = len(space)
    if not 2 * k < n_rows:
        raise ValueError(f"k is {k} for {n_rows} rows; ranks need k below half the rows")
    penalty = 0
    for part, distances in _distance_blocks(space):
        near = np.take_along_axis(distances, neighbors[part], axis=1)
        for column in near.T:
            n_nearer = np.count_nonzero(distances < column[:, np.newaxis], axis=1)
            penalty += int(np.maximum(n_nearer + 1 - k, 0).sum())
    return 1.0 - penalty * 2.0 / (n_rows * k * (2.0 * n_rows - 3.0 * k - 1.0))


def _nearest(points: Reals, k: int) -> Positions:
    """Return the k nearest other points of each point, (n, k) int64, in no particular order."""
    if not 1 <= k < len(points):
        raise ValueError(f"{k} neighbors of {len(points)} points; need 1..{len(points) - 1}")
    nearest = [
        np.argpartition(distances, k - 1, axis=1)[:, :k]
        for _, distances in _distance_blocks(points)
    ]
    return np.concatenate(nearest)


def _distance_blocks(points: Reals) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Return slices of the points and their squared distances, (b, n), to all; own is +inf."""
    X = points.astype(np.float64)
    X -= X.mean(axis=0)  # far from the origin the product below loses its digits
    norms = np.einsum("ij,ij->i", X, X)
    for part in _blocks(len(X), len(X)):
        distances = X[part] @ X.T
        distances *= -2
        distances += norms
        distances += norms[part, np.newaxis]
        own = np.arange(part.start, part.stop)
        distances[own - part.start, own] = np.inf
        yield part, distances


def _blocks(n_rows: int, width: int) -> Iterator[slice]:
    """Return slices that cover n_rows rows of `width` values in blocks of bounded size."""
    step = max(1, _BLOCK_VALUES // max(1, width))
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))

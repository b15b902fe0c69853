"""Cells of the vector space: k-means centroids and the cells nearest to each row."""

import faiss
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_N_ITERATIONS = 20


def train_centroids(rows: Floats, n_cells: int, seed: int) -> Floats:
    """Return the k-means centroids, (n_cells, d) float32, of rows (n, d) float32.

    Every row is used: the caller has drawn the sample.
    """
    n_rows, width = rows.shape
    if not 1 <= n_cells <= n_rows:
        raise ValueError(f"{n_cells} cells cannot be trained on {n_rows} rows; need 1..{n_rows}")
    center = _mean(rows)
    if n_cells == 1:
        return center[np.newaxis]
    kmeans = faiss.Kmeans(
        width,
        n_cells,
        niter=_N_ITERATIONS,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=n_rows,
    )
    kmeans.train(rows - center)
    return np.asarray(kmeans.centroids, dtype=np.float32) + center


def assign_cells(rows: Floats, centroids: Floats, overlap: int) -> NDArray[np.int32]:
    """Return the nearest cells of each row, (n, overlap) int32, nearest first.

    rows is (n, d) float32, centroids (n_cells, d) float32.
    """
    n_cells = len(centroids)
    if not 1 <= overlap <= n_cells:
        raise ValueError(f"overlap {overlap} with {n_cells} cells; need 1..{n_cells}")
    if len(rows) == 0:
        return np.empty((0, overlap), dtype=np.int32)
    # Far from the origin |x|^2 - 2xy + |y|^2 loses every digit that tells the cells apart.
    center = _mean(centroids)
    _, cells = faiss.knn(rows - center, centroids - center, overlap)
    if (cells < 0).any():
        bad = int(np.flatnonzero((cells < 0).any(axis=1))[0])
        raise ValueError(f"row {bad} has no nearest cell; its distances are not finite in float32")
    return np.asarray(cells, dtype=np.int32)


def _mean(rows: Floats) -> Floats:
    """Return the mean row, (d,) float32, summed in float64."""
    mean: Floats = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
    return mean

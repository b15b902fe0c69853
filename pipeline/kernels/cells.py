"""Cells of the vector space: their centroids, the cells nearest to each row, groups of cells."""

from typing import NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray

from pipeline.kernels.neighbors import nearest

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

_N_ITERATIONS = 6
# Up to so many cells one k-means is quick enough; more are trained region by region.
_FLAT_CELLS = 64
# A cell this many times the average is split; one this small a share of it goes to its neighbors.
_LARGE, _SMALL = 8, 1 / 8
_ROUNDS, _HUB_OVERLAP, _COUNTED_PER_CELL = 3, 4, 8


class Assigned(NamedTuple):
    """The cells nearest to each row, nearest first, and their squared distances."""

    cells: Ints  # (n, overlap)
    distances: Floats  # (n, overlap)


def train_centroids(rows: Floats, n_cells: int, seed: int) -> Floats:
    """Return centroids, about (n_cells, d) float32, of rows (n, d) float32, by k-means.

    Every row is used: the caller has drawn the sample. Cells much larger than the average are
    split and small ones given up, so the number of centroids is not quite n_cells.
    """
    n_rows = len(rows)
    if not 1 <= n_cells <= n_rows:
        raise ValueError(f"{n_cells} cells cannot be trained on {n_rows} rows; need 1..{n_rows}")
    center = _mean(rows)
    if n_cells == 1:
        return center[np.newaxis]
    centered = rows - center
    if n_cells <= _FLAT_CELLS:
        centroids = _kmeans(centered, n_cells, seed)
    else:
        regions = _kmeans(centered[:: max(1, n_cells // 512)], int(n_cells**0.5), seed)
        centroids = _refine(centered, regions, n_rows / n_cells, seed)
    return _even_out(centered, centroids, n_rows / n_cells, seed) + center


def _kmeans(rows: Floats, n_cells: int, seed: int) -> Floats:
    kmeans = faiss.Kmeans(
        rows.shape[1],
        n_cells,
        niter=_N_ITERATIONS,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(rows),
    )
    kmeans.train(np.ascontiguousarray(rows))
    return np.asarray(kmeans.centroids, dtype=np.float32)


def _refine(rows: Floats, centroids: Floats, cell_rows: float, seed: int) -> Floats:
    """Return centroids, each replaced by as many as its rows fill cells of cell_rows rows."""
    cells = nearest(rows, centroids, 1)[1][:, 0]
    order = np.argsort(cells, kind="stable")
    starts = np.searchsorted(cells[order], np.arange(len(centroids) + 1))
    finer = []
    for number, centroid in enumerate(centroids):
        inside = rows[order[starts[number] : starts[number + 1]]]
        n_cells = min(round(len(inside) / cell_rows), len(inside))
        finer.append(_kmeans(inside, n_cells, seed) if n_cells > 1 else centroid[np.newaxis])
    return np.concatenate(finer)


def _even_out(rows: Floats, centroids: Floats, cell_rows: float, seed: int) -> Floats:
    """Return centroids of cells of more equal size, for cells that overlap.

    Large cells are split, small ones given up, and so are hubs: a centroid in the middle between
    groups is among the nearest of rows of all groups, which it brings together in vain.
    """
    rows = rows[:: max(1, int(cell_rows / _COUNTED_PER_CELL))]
    cell_rows = len(rows) / len(centroids)
    for _ in range(_ROUNDS):
        overlap = min(_HUB_OVERLAP, len(centroids))
        cells = assign_cells(rows, centroids, overlap).cells
        own = np.bincount(cells[:, 0], minlength=len(centroids))
        copies = np.bincount(cells.ravel(), minlength=len(centroids))
        large = own > cell_rows * _LARGE
        hubs = copies > cell_rows * overlap * _LARGE
        kept = centroids[(own >= cell_rows * _SMALL) & ~hubs & ~large]
        inside = rows[large[cells[:, 0]]]
        if large.any():
            split = _refine(inside, centroids[large], cell_rows * _LARGE / 2, seed)
            kept = np.concatenate([kept, split])
        if len(kept) < 2:
            break
        centroids = kept
        if not (large | hubs).any():
            break
    return centroids


def assign_cells(rows: Floats, centroids: Floats, overlap: int) -> Assigned:
    """Return the nearest cells of each row, (n, overlap), nearest first, and how far they are.

    rows is (n, d) float32, centroids (n_cells, d) float32.
    """
    n_cells = len(centroids)
    if not 1 <= overlap <= n_cells:
        raise ValueError(f"overlap {overlap} with {n_cells} cells; need 1..{n_cells}")
    # Far from the origin |x|^2 - 2xy + |y|^2 loses every digit that tells the cells apart.
    center = _mean(centroids)
    centered = rows - center
    if not np.isfinite(np.einsum("ij,ij->i", centered, centered)).all():
        raise ValueError("rows have distances to the cells that are not finite in float32")
    distances, cells = nearest(centered, centroids - center, overlap)
    return Assigned(cells.astype(np.int32), distances)


def trim_cells(assigned: Assigned, reach: float) -> Ints:
    """Return the cells, the last of a row being -1 if it is over reach times as far as the first.

    So half of the rows, those between cells, can be put into one cell more than the others.
    """
    cells = assigned.cells.copy()
    cells[assigned.distances[:, -1] > reach * assigned.distances[:, 0], -1] = -1
    return cells


def coverage(cells: Ints, neighbor_cells: Ints) -> NDArray[np.float64]:
    """Return the share of each query's neighbors that share a cell with it, (q, o) float64.

    cells, (q, o), are the queries' cells, neighbor_cells, (q, j, o), those of their j neighbors,
    nearest first, -1 for none; column m is for the first m + 1 cells of all.
    """
    overlap = cells.shape[1]
    ranks = np.maximum.outer(np.arange(overlap), np.arange(overlap))
    mine = cells[:, np.newaxis, :, np.newaxis]
    same = (mine == neighbor_cells[:, :, np.newaxis, :]) & (mine >= 0)
    first = np.where(same, ranks, overlap).min(axis=(2, 3))
    shares: NDArray[np.float64] = (first[:, :, np.newaxis] <= np.arange(overlap)).mean(axis=1)
    return shares


def group_cells(centroids: Floats, costs: NDArray[np.float64], n_groups: int) -> Ints:
    """Return the group, 0..n_groups, of each cell, (n_cells,) int32: near cells, equal costs.

    Groups are halved along the direction in which their centroids, (n_cells, d), spread most, so
    that a row's cells lie in few of them. With fewer cells than groups some stay empty.
    """
    groups = np.zeros(len(centroids), dtype=np.int32)
    _halve(centroids, costs, np.arange(len(centroids)), (0, n_groups), groups)
    return groups


def _halve(
    centroids: Floats,
    costs: NDArray[np.float64],
    inside: NDArray[np.int64],
    span: tuple[int, int],
    groups: Ints,
) -> None:
    """Write the groups, those of the span, of the cells inside."""
    first, stop = span
    groups[inside] = first
    if stop - first < 2 or len(inside) < 2:
        return
    middle = (first + stop) // 2
    order = inside[np.argsort(_spread(centroids[inside]), kind="stable")]
    reached = np.cumsum(costs[order])
    share = reached[-1] * (middle - first) / (stop - first)
    cut = int(np.clip(np.searchsorted(reached, share) + 1, 1, len(order) - 1))
    _halve(centroids, costs, order[:cut], (first, middle), groups)
    _halve(centroids, costs, order[cut:], (middle, stop), groups)


def _spread(centroids: Floats) -> NDArray[np.float64]:
    """Return each centroid's place, (n,), along the direction in which they spread most."""
    X = centroids.astype(np.float64)
    X -= X.mean(axis=0)
    direction = X[np.einsum("ij,ij->i", X, X).argmax()]
    for _ in range(8):  # power iteration; a rough direction will do
        direction = (X @ direction) @ X
        direction /= max(float(np.linalg.norm(direction)), 1e-300)
    return np.asarray(X @ direction)


def _mean(rows: Floats) -> Floats:
    """Return the mean row, (d,) float32, summed in float64."""
    mean: Floats = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
    return mean

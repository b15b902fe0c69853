"""Nearest neighbors: exact, or inside cells; and merging of lists that were found apart."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray

from pipeline.kernels.joins import join_tile, merge_lists

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Members = NDArray[np.int32]

# Candidates beyond k + 1 make up for the rounding of the distances that rank them.
_MARGIN = 16
# One block of gathered differences: 1 MB stays in the cache (measured: 4 MB is twice as slow).
_BLOCK_VALUES = 1 << 18
_QUERY_BLOCK = 1 << 14
_DOUBLE_BLOCK = 1 << 11
# A tile of products of 1 MB stays in the cache; 4 MB are 40% slower at 100 columns.
_TILE = 512
_LARGEST_CELL = 1 << 16


class Neighbors(NamedTuple):
    """The nearest neighbors of n rows, by (distance, id); -1 and +inf where there are fewer."""

    ids: NDArray[Any]  # (n, k) int64, int32 where they are positions in one task's rows
    distances: Floats  # (n, k) float32, squared Euclidean


class Cells(NamedTuple):
    """Which rows lie in each cell: members[starts[c]:starts[c + 1]]."""

    starts: Ids  # (n_cells + 1,) int64
    members: Members  # (m,) int32, ascending in each cell


def widen(rows: NDArray[Any], metric: str) -> Floats:
    """Return the rows, (n, d), as contiguous float32, of unit length if metric is "cosine".

    With unit rows squared Euclidean distance orders neighbors as cosine distance does.
    """
    if metric == "euclidean":
        return np.ascontiguousarray(rows, dtype=np.float32)
    if metric != "cosine":
        raise ValueError(f'metric "{metric}" is not known; use "euclidean" or "cosine"')
    widened = np.array(rows, dtype=np.float32, order="C")
    for part in _blocks(len(widened), widened.shape[1], _BLOCK_VALUES):
        _normalize(widened[part], part.start)
    return widened


def search_exact(queries: Floats, query_ids: Ids, rows: Floats, row_ids: Ids, k: int) -> Neighbors:
    """Return the k nearest rows of each query, never the row with the query's own id.

    queries is (q, d) float32, rows (r, d) float32; query_ids (q,) and row_ids (r,) are int64, each
    row id once. The distance of a pair is the same to the bit in every call, from either side.
    """
    if k < 1:
        raise ValueError(f"k is {k}; a search needs k >= 1")
    found = empty_neighbors(len(queries), k)
    if len(rows) == 0:
        return found
    # Far from the origin |x|^2 - 2xy + |y|^2 loses the digits that rank the candidates.
    center = _find_center(rows)
    centered = rows - center
    n_candidates = min(k + 1 + _MARGIN, len(rows))
    for part in _blocks(len(queries), 1, _QUERY_BLOCK):
        block, ids = queries[part], query_ids[part]
        reach, positions = nearest(block - center, centered, n_candidates)
        _check_found(positions, part.start)
        best = _rank(block, ids, rows, row_ids, positions, k)
        if n_candidates < len(rows):
            unsure = _find_unsure(block - center, best.distances[:, -1], reach[:, -1])
            positions = _find_in_double(block[unsure], rows, center, n_candidates)
            again = _rank(block[unsure], ids[unsure], rows, row_ids, positions, k)
            best.ids[unsure], best.distances[unsure] = again
        found.ids[part], found.distances[part] = best
    return found


def group_members(cells: Members, inside: NDArray[np.bool_]) -> Cells:
    """Return the rows of each cell; cells, (n, overlap), count where inside is true."""
    rows, places = np.nonzero(inside)
    numbers = cells[rows, places]
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    return Cells(np.append(starts, len(order)), rows[order].astype(np.int32))


def search_cells(rows: Floats, cells: Cells, k: int) -> Neighbors:
    """Return the k nearest rows of each row among those that share a cell with it.

    rows is (n, d) float32; ids are positions in it, (n, k) int32, never the row's own. Within a
    cell the search is exact, but for cells of more than 65,536 rows, which are searched in parts:
    only equal rows cannot be split into smaller ones.
    """
    ids = np.full((len(rows), k), -1, dtype=np.int32)
    distances = np.full((len(rows), k), np.inf, dtype=np.float32)
    for number in range(len(cells.starts) - 1):
        members = cells.members[cells.starts[number] : cells.starts[number + 1]]
        for part in _blocks(len(members), 1, _LARGEST_CELL):
            _join_cell(rows, members[part], ids, distances)
    distances *= 2
    return Neighbors(ids, distances)


def _join_cell(rows: Floats, members: Members, ids: Members, distances: Floats) -> None:
    """Offer all pairs of a cell's members, (m,), to the lists ids and distances, (n, k)."""
    if len(members) < 2:
        return
    X = rows[members]
    X -= X.mean(axis=0)  # near its middle a cell's products round least
    halves = np.einsum("ij,ij->i", X, X) / 2
    if not np.isfinite(halves).all():
        raise ValueError("a cell has distances that are not finite in float32; scale the rows")
    if has_gpu():
        _join_on_gpu(X, members, ids, distances)
        return
    parts = list(_blocks(len(members), 1, _TILE))
    for number, a in enumerate(parts):
        for b in parts[number:]:
            # With itself a tile's product is symmetric, of which numpy computes one half.
            both = members[a], members[b]
            join_tile(X[a] @ X[b].T, rows, (halves[a], halves[b]), both, ids, distances)


def _join_on_gpu(X: Floats, members: Members, ids: Members, distances: Floats) -> None:
    """Do the same by a search of the cell, X (m, d), in itself."""
    k = min(ids.shape[1] + 1, len(X))
    found, positions = nearest(X, X, k)
    own = positions == np.arange(len(X))[:, np.newaxis]
    order = np.argsort(np.where(own, np.inf, found), axis=1, kind="stable")
    more = np.where(own, -1, members[positions])
    merge_lists(
        ids,
        distances,
        members.astype(np.int64),
        np.take_along_axis(more, order, axis=1),
        np.take_along_axis(np.where(own, np.inf, found / 2).astype(np.float32), order, axis=1),
    )


def has_gpu() -> bool:
    """Whether faiss can search on a GPU here."""
    return bool(faiss.get_num_gpus())


def nearest(queries: Floats, rows: Floats, k: int) -> tuple[Floats, Ids]:
    """Return squared distances and positions, (q, k), of the rows nearest to the queries.

    On a GPU where there is one and this build of faiss can use it.
    """
    if has_gpu():
        found = faiss.knn_gpu(_gpu_resources(), queries, rows, k)
    else:
        found = faiss.knn(queries, rows, k)
    return found[0], found[1]


@lru_cache(maxsize=1)
def _gpu_resources() -> Any:
    return faiss.StandardGpuResources()


def merge_found(found: Neighbors, rows: Ids, more: Neighbors) -> None:
    """Take the lists `more`, (m, j) of rows (m,), into those of the same rows in found, (n, k).

    Ids that come twice count once; distances of the same pair may differ in their last bits.
    """
    merge_lists(found.ids, found.distances, rows, more.ids, more.distances)


def empty_neighbors(n_rows: int, k: int) -> Neighbors:
    """Return n_rows lists of no neighbors: ids (n_rows, k) of -1, distances of +inf."""
    ids = np.full((n_rows, k), -1, dtype=np.int64)
    return Neighbors(ids, np.full((n_rows, k), np.inf, dtype=np.float32))


def recall_per_query(found: Neighbors, exact: Neighbors) -> NDArray[np.float64]:
    """Return the share of each query's k neighbors that were found, (q,) float64.

    A neighbor counts if it is no farther than the exact k-th one, so that ties do not matter. A
    query with fewer than k exact neighbors is judged by those it has, one with none counts as 1.
    """
    if found.ids.shape != exact.ids.shape:
        raise ValueError(f"found is {found.ids.shape}, exact is {exact.ids.shape}; need equal")
    exists = exact.ids >= 0
    n_exact = exists.sum(axis=1)
    farthest = np.where(exists, exact.distances, 0).max(axis=1, initial=0).astype(np.float64)
    near = found.distances <= farthest[:, np.newaxis] * (1 + 1e-5)
    n_found = (near & (found.ids >= 0)).sum(axis=1)
    return np.where(n_exact > 0, np.minimum(n_found / np.maximum(n_exact, 1), 1.0), 1.0)


def mean_interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the mean of shares in 0..1 and its 95% normal interval, clipped to 0..1.

    One value says nothing of its spread: its interval is 0..1.
    """
    if values.size == 0:
        raise ValueError("the mean of 0 values is not defined; need at least 1")
    mean = float(values.mean())
    if values.size == 1:
        return mean, 0.0, 1.0
    half = 1.96 * float(values.std(ddof=1)) / float(np.sqrt(values.size))
    return mean, max(mean - half, 0.0), min(mean + half, 1.0)


def _normalize(rows: Floats, start: int) -> None:
    """Scale the rows, (b, d) float32, in place to unit length; start is the first row's number."""
    largest = np.abs(rows).max(axis=1, initial=0)
    if not largest.all():
        zero = start + int(np.flatnonzero(largest == 0)[0])
        raise ValueError(f"row {zero} is all zeros; cosine distance needs rows with a direction")
    rows /= largest[:, np.newaxis]  # squares of 1e20 would overflow
    rows /= np.sqrt(_row_sums(rows * rows))[:, np.newaxis]


def _row_sums(values: Floats) -> Floats:
    """Return the sum of each row, (n,) float32, of contiguous values (n, d) float32.

    Along a contiguous last axis the order of addition depends on d alone, unlike in a product of
    matrices or einsum: equal rows have equal sums wherever they stand.
    """
    return np.asarray(np.add.reduce(values, axis=1), dtype=np.float32)


def _pair_distances(queries: Floats, rows: Floats, positions: Ids) -> Floats:
    """Return the squared distances, (q, m) float32, of each query to the rows at positions (q, m).

    They are sums of squared differences, so equal rows are at exactly 0.
    """
    n_queries, width = positions.shape
    dimension = rows.shape[1]
    distances = np.empty((n_queries, width), dtype=np.float32)
    for part in _blocks(n_queries, width * dimension, _BLOCK_VALUES):
        gaps = rows[positions[part]]
        gaps -= queries[part, np.newaxis]
        np.multiply(gaps, gaps, out=gaps)
        distances[part] = _row_sums(gaps.reshape(-1, dimension)).reshape(-1, width)
    return distances


def _find_center(rows: Floats) -> Floats:
    """Return the median, (d,) float32, of about 1,000 rows: one far row would move the mean."""
    some = rows[:: max(1, len(rows) // 1000)]
    return np.asarray(np.median(some, axis=0), dtype=np.float32)


def _rank(
    queries: Floats, query_ids: Ids, rows: Floats, row_ids: Ids, positions: Ids, k: int
) -> Neighbors:
    """Return the k nearest, (q, k), of the rows at positions, (q, m), without the query's own."""
    ids, distances = row_ids[positions], _pair_distances(queries, rows, positions)
    own = ids == query_ids[:, np.newaxis]
    ids[own], distances[own] = -1, np.inf
    order = np.lexsort((ids, distances), axis=1)[:, :k]
    ranked = empty_neighbors(len(queries), k)
    ranked.ids[:, : order.shape[1]] = np.take_along_axis(ids, order, axis=1)
    ranked.distances[:, : order.shape[1]] = np.take_along_axis(distances, order, axis=1)
    return ranked


def _find_unsure(centered: Floats, farthest: Floats, reach: Floats) -> Ids:
    """Return which queries, (u,), may have a neighbor that rounding kept out of the candidates.

    centered is (q, d); farthest, (q,), is the distance of the k-th neighbor, reach, (q,), that of
    the last candidate as it was rounded. A row missed within farthest has a norm of at most
    |x| + sqrt(farthest), which bounds the rounding. One nearer by 1e-5 only counts as a tie.
    """
    norms = np.sqrt(np.einsum("ij,ij->i", centered, centered))
    rounding = 4 * np.finfo(np.float32).eps * (2 * norms + np.sqrt(farthest)) ** 2
    return np.flatnonzero(farthest * (1 - 1e-5) > np.maximum(reach - rounding, 0))


def _find_in_double(queries: Floats, rows: Floats, center: Floats, n_candidates: int) -> Ids:
    """Return the positions, (q, n_candidates), of the nearest rows of each query, in any order.

    It is for groups of rows far from each other, whose own spread float32 products lose.
    """
    nearest = np.full((len(queries), n_candidates), np.inf)
    positions = np.full((len(queries), n_candidates), -1, dtype=np.int64)
    for part in _blocks(len(rows) if len(queries) else 0, 1, _DOUBLE_BLOCK):
        Y = rows[part].astype(np.float64) - center
        norms = np.einsum("ij,ij->i", Y, Y)
        for some in _blocks(len(queries), 1, _DOUBLE_BLOCK):
            X = queries[some].astype(np.float64) - center
            both = np.concatenate([nearest[some], norms - 2 * (X @ Y.T)], axis=1)
            new = np.broadcast_to(np.arange(part.start, part.stop), (len(X), len(Y)))
            all_positions = np.concatenate([positions[some], new], axis=1)
            least = np.argpartition(both, n_candidates - 1, axis=1)[:, :n_candidates]
            nearest[some] = np.take_along_axis(both, least, axis=1)
            positions[some] = np.take_along_axis(all_positions, least, axis=1)
    return positions


def _check_found(positions: Ids, start: int) -> None:
    """Refuse queries for which the search gave up, which it says by a position of -1."""
    missing = (positions < 0).any(axis=1)
    if missing.any():
        bad = start + int(np.flatnonzero(missing)[0])
        raise ValueError(f"query {bad} has distances that are not finite in float32; scale rows")


def _blocks(n_rows: int, width: int, n_values: int) -> Iterator[slice]:
    """Return slices that cover n_rows rows of `width` values, about n_values at a time."""
    step = max(1, n_values // max(1, width))
    return (slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step))

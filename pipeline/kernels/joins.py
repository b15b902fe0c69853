"""Compiled loops that offer pairs of rows to the lists of their nearest neighbors.

A list holds ids and distances by (distance, id), -1 and +inf at its end where there are fewer.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from encoders.compiling import compiled

# Pairs are tested by the chunk: one maximum, which the compiler turns into vector instructions.
_CHUNK = 32
# Rounding of |x|²/2 + |y|²/2 - xy, relative to the two squares; several times what was seen.
_ROUNDING = np.float32(1e-6)
# Below this share of the squares too few digits are left: the pair is computed from its rows.
_CANCELLED = np.float32(0.05)


# What the compiler may assume: no NaN, sums in any order. Not that nothing is infinite.
_LOOSE = {"nnan", "nsz", "reassoc", "contract"}


@compiled(_LOOSE)
def _offer(ids: Any, distances: Any, j: int, distance: float) -> None:
    """Put j into a list, (k,), unless it is too far or there already."""
    last = len(ids) - 1
    if distances[last] == distance and 0 <= ids[last] < j:
        return  # first, because among equal rows every pair comes here
    # No branches and no early end: these loops become vector instructions.
    place = n_same = np.int32(0)
    for other in range(len(ids)):
        n_same += np.int32(1) if ids[other] == j else np.int32(0)
    for other in range(len(ids)):
        place += np.int32(1) if distances[other] < distance else np.int32(0)
    if n_same > 0:
        return
    while place < last and distances[place] == distance and ids[place] < j:
        place += 1
    for other in range(last, place, -1):
        distances[other] = distances[other - 1]
        ids[other] = ids[other - 1]
    distances[place] = distance
    ids[place] = j


@compiled(_LOOSE)
def _half_distance(x: Any, y: Any) -> Any:
    """Half the squared distance of two rows, in float32 from differences: equal rows are at 0."""
    total = np.float32(0)
    for place in range(x.shape[0]):
        gap = x[place] - y[place]
        total += gap * gap
    return total * np.float32(0.5)


@compiled(_LOOSE)
def _find_gaps(products: Any, half: Any, halves: Any, limit: Any, limits: Any, gaps: Any) -> Any:
    """How many pairs of a chunk may be nearer than one of their limits; gaps gets by how much."""
    kept = np.float32(1) - _ROUNDING
    n_near = np.int32(0)
    for t in range(len(products)):
        farther = limits[t] if limits[t] > limit else limit
        gap = farther + products[t] - (half + halves[t]) * kept
        gaps[t] = gap
        n_near += np.int32(1) if gap >= 0 else np.int32(0)
    return n_near


@compiled(_LOOSE)
def join_tile(
    products: NDArray[np.float32],
    rows: NDArray[np.float32],
    halves: tuple[NDArray[np.float32], NDArray[np.float32]],
    members: tuple[NDArray[np.int32], NDArray[np.int32]],
    ids: NDArray[np.int32],
    distances: NDArray[np.float32],
) -> None:
    """Offer every pair of two tiles of a cell to the lists of both of its rows.

    members, (a,) and (b,), are the tiles' rows among all, (n, d) float32, and their lists, ids and
    distances (n, k). products is (a, b) float32, their inner products from the cell's middle, and
    halves are their |x|²/2. A tile with itself is told by equal members. Distances are halved.
    """
    diagonal = members[0][0] == members[1][0]
    last = ids.shape[1] - 1
    n_others = len(members[1])
    gaps = np.empty(_CHUNK, np.float32)
    limits = np.empty(n_others, np.float32)
    for t in range(n_others):
        limits[t] = distances[members[1][t], last]
    for s in range(len(members[0])):
        i, half = members[0][s], halves[0][s]
        limit = distances[i, last]
        for start in range(s + 1 if diagonal else 0, n_others, _CHUNK):
            chunk = slice(start, min(start + _CHUNK, n_others))
            others = halves[1][chunk]
            if not _find_gaps(products[s, chunk], half, others, limit, limits[chunk], gaps):
                continue
            for place in range(len(others)):
                if gaps[place] < 0:
                    continue
                t = start + place
                j, squares = members[1][t], half + halves[1][t]
                distance = squares - products[s, t]
                if distance < squares * _CANCELLED:
                    distance = _half_distance(rows[i], rows[j])
                if distance <= limit:
                    _offer(ids[i], distances[i], j, distance)
                    limit = distances[i, last]
                if distance <= limits[t]:
                    _offer(ids[j], distances[j], i, distance)
                    limits[t] = distances[j, last]


@compiled(_LOOSE)
def merge_lists(
    ids: NDArray[Any],
    distances: NDArray[np.float32],
    rows: NDArray[np.int64],
    more_ids: NDArray[Any],
    more_distances: NDArray[np.float32],
) -> None:
    """Offer lists, (m, j) of rows, (m,), to the lists of the same rows in ids, distances (n, k)."""
    last = ids.shape[1] - 1
    for m in range(len(rows)):
        row = rows[m]
        for place in range(more_ids.shape[1]):
            distance = more_distances[m, place]
            if more_ids[m, place] < 0 or distance > distances[row, last]:
                break
            _offer(ids[row], distances[row], more_ids[m, place], distance)

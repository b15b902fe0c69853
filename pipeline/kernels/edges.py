"""Random edges to train on: positives drawn by probability, negatives drawn uniformly."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.kernels.symmetrize import SparseRows

Ids = NDArray[np.int64]


class Draws(NamedTuple):
    """Drawn entries of a block: row in the block and column of each, both (n,) int64."""

    rows: Ids
    columns: Ids


def draw_positives(graph: SparseRows, slices: Ids, rng: np.random.Generator) -> Draws:
    """Return entries drawn independently, each with probability proportional to its value.

    slices, (s + 1,) int64, begins with 0 and ends with the number of draws. Draws of each slice
    slices[i]..slices[i+1] are in order of row; those of different slices are independent.
    """
    n_draws = int(slices[-1])
    cumulative = np.cumsum(graph.values, dtype=np.float64)
    if n_draws == 0:
        return Draws(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    if cumulative.size == 0 or not cumulative[-1] > 0:
        raise ValueError(f"cannot draw {n_draws} edges: the block's probabilities sum to 0")
    heights = rng.random(n_draws) * cumulative[-1]
    # Sorted needles walk the cumulative sum in memory order: 2-3x faster than random ones.
    for start, stop in pairwise(slices.tolist()):
        heights[start:stop].sort()
    entries = np.searchsorted(cumulative, heights, side="right")
    # A height can round up to the total: that is the last entry with a value above 0.
    np.minimum(entries, np.searchsorted(cumulative, cumulative[-1]), out=entries)
    rows = np.searchsorted(graph.offsets, entries, side="right") - 1
    return Draws(rows.astype(np.int64, copy=False), graph.columns[entries])


def draw_negatives(heads: Ids, n_rows: int, n_negatives: int, rng: np.random.Generator) -> Ids:
    """Return n_negatives rows for each head, (n, n_negatives) int64, uniform, never the head.

    heads is (n,) int64, of 0..n_rows.
    """
    if n_rows < 2:
        raise ValueError(f"negatives need at least 2 rows to draw from, found {n_rows}")
    drawn = rng.integers(n_rows - 1, size=(heads.size, n_negatives), dtype=np.int64)
    drawn += drawn >= heads[:, np.newaxis]
    return drawn


def apportion(masses: NDArray[np.float64], n_draws: int, rng: np.random.Generator) -> Ids:
    """Return how many of n_draws draws fall to each block, (b,) int64, multinomial by mass.

    masses is (b,) float64, not negative; the counts sum to n_draws.
    """
    total = masses.sum()
    if masses.size == 0 or not (total > 0 and np.isfinite(total) and (masses >= 0).all()):
        raise ValueError(f"masses sum to {total}; need finite masses >= 0 with a sum above 0")
    return rng.multinomial(n_draws, masses / total).astype(np.int64)

"""Uniform samples of row positions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def draw_positions(population: int, n: int, seed: Sequence[int]) -> NDArray[np.int64]:
    """Return n distinct positions of 0..population, (n,) int64, in random order.

    Every prefix is itself a uniform sample. With n >= population all positions are returned.
    Memory is O(n), whatever the population.
    """
    if population < 0 or n < 0:
        raise ValueError(f"cannot draw {n} positions of {population}; both must be >= 0")
    rng = np.random.default_rng(seed)
    if n >= population // 4:
        return rng.permutation(np.arange(population, dtype=np.int64))[:n].copy()
    positions = np.empty(0, dtype=np.int64)
    # Drawing only what is missing never overshoots, so no position has to be dropped with a bias.
    while positions.size < n:
        drawn = rng.integers(population, size=n - positions.size, dtype=np.int64)
        positions = np.unique(np.concatenate([positions, drawn]))
    return rng.permutation(positions)

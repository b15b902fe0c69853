"""UMAP's memberships: how strongly each row's neighbors belong to its neighborhood."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.kernels.affinity import check_distances

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# A block of 512 KB in float32 stays in the cache; a smaller one pays more for calls than it saves.
_BLOCK_VALUES = 1 << 17
# In float32 three steps from the guess do for ordinary rows; the rest are solved in float64.
_FAST_STEPS = 3
_FAST_ERROR = 1e-6
_ERROR = 1e-9
_MAX_STEPS = 200
_SOLVED_ERROR = 1e-4
# UMAP's floor: a width is at least this share of the row's mean distance.
_LEAST_WIDTH = 1e-3


class Memberships(NamedTuple):
    """Memberships of the k neighbors of n rows, and how near each row came to its sum."""

    values: Floats  # (n, k) float32, in 0..1, 1 up to the nearest neighbor that is no duplicate
    sums: Doubles  # (n,) float64
    solved: NDArray[np.bool_]  # (n,) bool, False where the sum is larger


def find_memberships(distances: Floats) -> Memberships:
    """Return memberships exp(-(d_ij - rho_i) / sigma_i), at most 1, that sum to log2(k + 1).

    distances is (n, k) float32, squared, ascending in each row, without the row itself; d is their
    root and rho the least d above 0. sigma is at least a thousandth of the row's mean d, in which
    the row itself counts as 0. So a row has a larger sum where log2(k + 1) or more neighbors are
    duplicates of it or about as near as the nearest other, and 1 everywhere where all are.

    UMAP has another floor, a thousandth of the mean over all rows, for rows with rho = 0. With one
    neighbor of local connectivity these are the rows whose distances are all 0. Their memberships
    are 1 whatever sigma is, so nothing here depends on other rows.
    """
    distances = np.asarray(distances, dtype=np.float32)
    n_rows, k = distances.shape
    target = math.log2(k + 1)
    values, sums = np.empty((n_rows, k), np.float32), np.empty(n_rows)
    step = max(1, _BLOCK_VALUES // k)
    for start in range(0, n_rows, step):
        part = slice(start, start + step)
        check_distances(distances[part], start)
        sums[part] = _fill_block(np.sqrt(distances[part]), target, values[part])
    return Memberships(values, sums, np.abs(sums / target - 1) < _SOLVED_ERROR)


def _fill_block(distances: Floats, target: float, values: Floats) -> Doubles:
    """Return the sums, (b,), of a block of plain distances, and write its memberships, (b, k)."""
    excess = np.maximum(distances - _nearest(distances), 0)
    log_widths = _start(excess, target)
    # Rows without a start, or that overflow float32, come out as NaN and are solved in float64.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for _ in range(_FAST_STEPS):
            log_widths += _newton(excess, log_widths, target)
        sums = _weigh(excess, np.exp(log_widths), values)
        missed = ~(np.abs(sums / target - 1) < _FAST_ERROR)
    n_ones = np.count_nonzero(excess == 0, axis=1)
    limit = n_ones >= target
    log_widths[limit] = -np.inf
    hard = np.flatnonzero(missed & ~limit)
    if hard.size:
        log_widths[hard] = _solve(excess[hard].astype(np.float64), target)
    floors = _LEAST_WIDTH * distances.sum(axis=1, dtype=np.float64) / (distances.shape[1] + 1)
    widths = np.maximum(np.exp(log_widths), floors)
    again = np.flatnonzero(missed | limit | (widths == floors))
    if again.size:
        doubles = np.empty((again.size, distances.shape[1]), np.float32)
        sums[again] = _weigh(excess[again].astype(np.float64), widths[again], doubles)
        values[again] = doubles
    return sums


def _nearest(distances: Floats) -> Floats:
    """Return rho, (b, 1): the least distance above 0, or 0 where there is none."""
    nearest: Floats = distances[:, :1].copy()
    zero = np.flatnonzero(nearest == 0)
    if zero.size:
        first = np.argmax(distances[zero] > 0, axis=1)  # 0, a distance of 0, where none is above
        nearest[zero, 0] = distances[zero, first]
    return nearest


def _weigh(excess: NDArray[np.floating], widths: Doubles, values: Floats) -> Doubles:
    """Return the sums, (b,), at widths, (b,), and write the memberships, (b, k)."""
    tiny = np.finfo(excess.dtype).tiny  # a width of 0 has no excess above 0
    scale = -1 / np.maximum(widths, tiny).astype(excess.dtype)
    weights = np.exp(excess * scale[:, np.newaxis])
    values[...] = weights
    return np.asarray(weights.sum(axis=1, dtype=np.float64))


def _newton(excess: NDArray[np.floating], log_widths: Doubles, target: float) -> Doubles:
    """Return the step in log width, (b,), by which the log of the sum would reach the target's.

    Where distances grow as a power of the rank, log of the sum over log of the width is nearly a
    straight line.
    """
    t = excess * np.exp(-log_widths).astype(excess.dtype)[:, np.newaxis]
    weights = np.exp(-t)
    sums = weights.sum(axis=1).astype(np.float64)
    slopes = np.einsum("ij,ij->i", weights, t) / sums
    return np.asarray(np.clip(np.log(target / sums) / slopes, -2, 2))


def _start(excess: Floats, target: float) -> Doubles:
    """Return log widths, (b,), near the solution: of the excess at the rank of the target."""
    column = min(math.ceil(target), excess.shape[1] - 1)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(excess[:, column].astype(np.float64)))


def _solve(excess: Doubles, target: float) -> Doubles:
    """Return log widths, (b,), with the target as sum, by Newton steps in a shrinking bracket.

    Each row of excess, (b, k) float64, has fewer zeros than the target, which is below k.
    """
    least = np.where(excess > 0, excess, np.inf).min(axis=1)
    low = np.log(least / 800)  # all but the zeros vanish
    high = np.log(excess.sum(axis=1) / (excess.shape[1] - target))  # exp(-t) >= 1 - t
    log_widths = (low + high) / 2
    active = np.arange(len(excess))
    for _ in range(_MAX_STEPS):
        x = log_widths[active]
        weights = np.exp(-excess[active] * np.exp(-x)[:, np.newaxis])
        sums = weights.sum(axis=1)
        wide = sums > target
        high[active[wide]], low[active[~wide]] = x[wide], x[~wide]
        unsolved = np.abs(sums - target) > _ERROR
        active, x = active[unsolved], x[unsolved]
        if not active.size:
            break
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            stepped = x + _newton(excess[active], x, target)
        inside = (stepped > low[active]) & (stepped < high[active])
        log_widths[active] = np.where(inside, stepped, (low[active] + high[active]) / 2)
    return np.asarray(log_widths)

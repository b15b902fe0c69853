"""Conditional affinities p(j|i): a Gaussian per row with the requested perplexity."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# A block of 512 KB in float32 stays in the cache; a smaller one pays more for calls than it saves.
_BLOCK_VALUES = 1 << 17
# In float32 two steps from the guess reach 1e-7 on ordinary rows; the rest are solved in float64.
_FAST_STEPS = 2
_FAST_ERROR = 1e-6
_ERROR = 1e-9
_MAX_STEPS = 200
_SOLVED_ERROR = 1e-4


class Calibration(NamedTuple):
    """Affinities of n rows to their k neighbors, and how near each came to the perplexity."""

    affinities: Floats  # (n, k) float32, rows sum to 1
    perplexity: Doubles  # (n,) float64, achieved
    solved: NDArray[np.bool_]  # (n,) bool, False where no width has the perplexity


class _Moments(NamedTuple):
    """The entropy of rows at some log beta, and its first two derivatives by log beta; all (n,)."""

    entropy: Doubles
    slope: Doubles
    curvature: Doubles


class _Guess(NamedTuple):
    """Solutions for rows whose distances grow as a power of the rank, to start others from."""

    column: int
    powers: Doubles
    log_betas: Doubles


def calibrate(distances: Floats, perplexity: float) -> Calibration:
    """Return affinities p_ij ∝ exp(-beta_i d_ij) with the requested perplexity in every row.

    distances is (n, k) float32, squared, ascending in each row. Rows in which `perplexity` or more
    neighbors share the least distance have no such beta; they get the limit, uniform over these.
    """
    distances = np.asarray(distances, dtype=np.float32)
    n_rows, k = distances.shape
    if not 1 < perplexity < k:
        raise ValueError(f"perplexity {perplexity} with {k} neighbors per row; need 1 < it < {k}")
    guess = _tabulate(k, perplexity)
    affinities = np.empty((n_rows, k), dtype=np.float32)
    achieved = np.empty(n_rows)
    step = max(1, _BLOCK_VALUES // k)
    for start in range(0, n_rows, step):
        part = slice(start, start + step)
        check_distances(distances[part], start)
        achieved[part] = _calibrate_block(distances[part], perplexity, guess, affinities[part])
    solved = np.abs(achieved / perplexity - 1) < _SOLVED_ERROR
    return Calibration(affinities, achieved, solved)


def check_distances(distances: Floats, start: int) -> None:
    """Refuse rows, the first of them number `start`, that are not finite, >= 0 and ascending."""
    ascending = (distances[:, 1:] >= distances[:, :-1]).all(axis=1)
    good = ascending & (distances[:, 0] >= 0) & np.isfinite(distances[:, -1])
    if not good.all():
        bad = start + int(np.flatnonzero(~good)[0])
        raise ValueError(f"distances of row {bad} are not finite, >= 0 and in ascending order")


def _calibrate_block(
    distances: Floats, perplexity: float, guess: _Guess, affinities: Floats
) -> Doubles:
    """Return the achieved perplexity, (b,), of a block, and write its affinities, (b, k)."""
    entropy = math.log(perplexity)
    excess = distances - distances[:, :1]
    log_betas = _start(excess, guess)
    # Rows that overflow float32 come out as NaN and are solved again in float64.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for _ in range(_FAST_STEPS):
            log_betas += _halley(_moments(excess, log_betas), entropy)
        found = _weigh(excess, log_betas, affinities)
        missed = ~(np.abs(found - entropy) < _FAST_ERROR)
    n_least = np.count_nonzero(excess == 0, axis=1)
    limit = n_least >= perplexity
    hard = np.flatnonzero(missed & ~limit)
    if hard.size:
        doubles = excess[hard].astype(np.float64)
        doubles_affinities = np.empty((hard.size, distances.shape[1]), dtype=np.float32)
        found[hard] = _weigh(doubles, _solve(doubles, entropy), doubles_affinities)
        affinities[hard] = doubles_affinities
    affinities[limit] = (excess[limit] == 0) / n_least[limit, np.newaxis]
    found[limit] = np.log(n_least[limit])
    return np.exp(found)


def _weigh(excess: NDArray[np.floating], log_betas: Doubles, affinities: Floats) -> Doubles:
    """Return the entropy, (b,), at log_betas, (b,), and write the affinities, (b, k)."""
    exponents = excess * -np.exp(log_betas).astype(excess.dtype)[:, np.newaxis]
    weights = np.exp(exponents)
    totals = weights.sum(axis=1)
    np.divide(weights, totals[:, np.newaxis], out=affinities, casting="same_kind")
    mean: Doubles = np.einsum("ij,ij->i", weights, exponents) / totals.astype(np.float64)
    return np.asarray(np.log(totals, dtype=np.float64) - mean)


def _moments(excess: NDArray[np.floating], log_betas: Doubles) -> _Moments:
    """Return entropy, slope and curvature of rows of excess, (b, k), at log_betas, (b,).

    With t = -beta d the entropy is log Z - E[t]; its derivatives by log beta follow from the
    cumulants of t.
    """
    t = excess * -np.exp(log_betas).astype(excess.dtype)[:, np.newaxis]
    weights = np.exp(t)
    totals = weights.sum(axis=1).astype(np.float64)
    first = np.einsum("ij,ij->i", weights, t) / totals
    weights *= t
    second = np.einsum("ij,ij->i", weights, t) / totals
    weights *= t
    third = np.einsum("ij,ij->i", weights, t) / totals
    variance = second - first**2
    skew = third - 3 * first * second + 2 * first**3
    return _Moments(np.log(totals) - first, -variance, -2 * variance - skew)


def _halley(moments: _Moments, entropy: float) -> Doubles:
    """Return the step in log beta, (b,), towards the entropy: Newton's, bent by the curvature."""
    gap = moments.entropy - entropy
    bend = 1 - gap * moments.curvature / (2 * moments.slope**2)
    return np.clip(-gap / (moments.slope * np.clip(bend, 0.5, 2)), -2, 2)


def _solve(excess: Doubles, entropy: float) -> Doubles:
    """Return log betas, (b,), with the entropy, by Halley steps inside a shrinking bracket.

    Each row of excess, (b, k) float64, has fewer zeros than exp(entropy) and not all are zero.
    """
    least = np.where(excess > 0, excess, np.inf).min(axis=1)
    low, high = np.log(1e-8 / excess[:, -1]), np.log(800 / least)  # all equal; all but the least 0
    log_betas = (low + high) / 2
    active = np.arange(len(excess))
    for _ in range(_MAX_STEPS):
        x = log_betas[active]
        moments = _moments(excess[active], x)
        wide = moments.entropy > entropy
        low[active[wide]], high[active[~wide]] = x[wide], x[~wide]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            stepped = x + _halley(moments, entropy)
        inside = (stepped > low[active]) & (stepped < high[active])
        middle = (low[active] + high[active]) / 2
        unsolved = np.abs(moments.entropy - entropy) > _ERROR
        active = active[unsolved]
        log_betas[active] = np.where(inside, stepped, middle)[unsolved]
        if not active.size:
            break
    return np.asarray(log_betas)


def _tabulate(k: int, perplexity: float) -> _Guess:
    """Return log betas of rows whose excess is (rank / (k - 1)) ** power, for a range of powers."""
    powers = np.geomspace(0.02, 12, 64)
    ranks = np.arange(k) / (k - 1)
    log_betas = _solve(ranks ** powers[:, np.newaxis], math.log(perplexity))
    return _Guess(max(1, min(math.ceil(perplexity), k - 2)), powers, log_betas)


def _start(excess: Floats, guess: _Guess) -> Doubles:
    """Return log betas, (b,), near the solution, from the power with which a row's excess grows.

    It leaves 0.1 of the entropy to solve where 1 / (distance at rank perplexity) leaves 1.
    """
    k = excess.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        last = np.log(excess[:, -1].astype(np.float64))
        inner = np.log(excess[:, guess.column].astype(np.float64))
        power = (last - inner) / np.log((k - 1) / guess.column)
        return np.asarray(np.interp(power, guess.powers, guess.log_betas) - last)

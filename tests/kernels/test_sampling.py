import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.kernels.sampling import draw_positions


@given(st.integers(0, 300), st.integers(0, 400), st.integers(0, 2**31))
def test_positions_are_distinct_and_in_range(population: int, n: int, seed: int) -> None:
    positions = draw_positions(population, n, [seed])
    assert positions.dtype == np.int64
    assert positions.size == np.unique(positions).size == min(population, n)
    assert ((positions >= 0) & (positions < population)).all()


def test_same_seed_same_positions() -> None:
    first, again = draw_positions(1000, 50, [7, 3]), draw_positions(1000, 50, [7, 3])
    np.testing.assert_array_equal(first, again)
    assert (first != draw_positions(1000, 50, [7, 4])).any()


@pytest.mark.parametrize("population", [10**6, 10**12, 2**62])
def test_large_population_needs_memory_for_the_sample_only(population: int) -> None:
    positions = draw_positions(population, 1000, [1])
    assert np.unique(positions).size == 1000
    # 1,000 uniform draws: the mean is within 6 standard errors of the middle
    assert abs(positions.mean() / population - 0.5) < 6 * np.sqrt(1 / 12 / 1000)


@pytest.mark.parametrize(("population", "n"), [(40, 10), (40, 9), (40, 4), (12, 12)])
def test_every_prefix_is_uniform(population: int, n: int) -> None:
    n_trials = 4000
    draws = np.stack([draw_positions(population, n, [trial]) for trial in range(n_trials)])
    for width in (1, n // 2, n):
        share = np.bincount(draws[:, :width].ravel(), minlength=population) / n_trials
        expected = width / population
        allowed = 5 * np.sqrt(expected * (1 - expected) / n_trials)
        assert np.abs(share - expected).max() <= allowed


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot draw -1 positions of 5"):
        draw_positions(5, -1, [0])

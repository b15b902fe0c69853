import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.kernels.edges import apportion, draw_negatives, draw_positives
from pipeline.kernels.symmetrize import SparseRows


def _graph() -> SparseRows:
    """Return 5 rows, two of them empty, with entries of value 0 first, inside and last."""
    return SparseRows(
        np.array([0, 3, 3, 5, 9, 9]),
        np.array([4, 7, 10**12, 1, 2, 0, 3, 8, 9]),
        np.array([0, 0.1, 0.2, 0, 1e-3, 0.3, 0, 0.399, 0], dtype=np.float32),
    )


def _all(n_draws: int) -> NDArray[np.int64]:
    """Return one slice of that many draws."""
    return np.array([0, n_draws])


def test_positives_are_drawn_by_value() -> None:
    graph, n_draws = _graph(), 200_000
    rows, columns = draw_positives(graph, _all(n_draws), np.random.default_rng(0))
    assert rows.dtype == columns.dtype == np.int64
    owners = np.repeat(np.arange(5), np.diff(graph.offsets))
    for row, column, value in zip(owners, graph.columns, graph.values, strict=True):
        share = ((rows == row) & (columns == column)).mean()
        expected = value / graph.values.sum()
        assert abs(share - expected) <= 5 * np.sqrt(expected / n_draws)


def test_every_slice_is_a_draw_of_its_own() -> None:
    """Rows ascend inside a slice, and each slice has its share of every row."""
    graph, slices = _graph(), np.array([0, 5000, 5000, 20_000, 26_000])
    rows, _ = draw_positives(graph, slices, np.random.default_rng(1))
    assert len(rows) == 26_000
    wanted = np.add.reduceat(graph.values[[1, 2, 4, 5, 7]], [0, 2, 3]) / graph.values.sum()
    for start, stop in ((0, 5000), (5000, 20_000), (20_000, 26_000)):
        part = rows[start:stop]
        assert (np.diff(part) >= 0).all()
        share = np.bincount(part, minlength=5)[[0, 2, 3]] / len(part)
        assert (np.abs(share - wanted) <= 5 * np.sqrt(wanted / len(part))).all()
    assert (rows[:5000] != rows[20_000:25_000]).any()


@pytest.mark.parametrize(("height", "row", "column"), [(0.0, 0, 7), (1.0, 3, 8)])
def test_extreme_heights_draw_entries_above_zero(height: float, row: int, column: int) -> None:
    class Fixed(np.random.Generator):
        def random(self, size: int) -> NDArray[np.float64]:  # type: ignore[override]
            return np.full(size, height)

    rows, columns = draw_positives(_graph(), _all(3), Fixed(np.random.PCG64(0)))
    assert rows.tolist() == [row] * 3
    assert columns.tolist() == [column] * 3


def test_edges_are_the_same_for_the_same_seed() -> None:
    first, again, other = (
        draw_positives(_graph(), _all(99), np.random.default_rng([1, seed])) for seed in (2, 2, 3)
    )
    np.testing.assert_array_equal(first, again)
    assert (first.columns != other.columns).any()


def test_no_mass_is_refused_unless_nothing_is_drawn() -> None:
    empty = SparseRows(np.zeros(3, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
    rng = np.random.default_rng(0)
    assert draw_positives(empty, _all(0), rng).rows.size == 0
    with pytest.raises(ValueError, match="cannot draw 5 edges"):
        draw_positives(empty, _all(5), rng)
    with pytest.raises(ValueError, match="cannot draw 5 edges"):
        draw_positives(_graph()._replace(values=np.zeros(9, np.float32)), _all(5), rng)


@given(st.integers(2, 50), st.integers(0, 9), st.integers(0, 10**6))
def test_negatives_are_rows_but_never_the_head(n_rows: int, n_negatives: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = rng.integers(n_rows, size=30)
    negatives = draw_negatives(heads, n_rows, n_negatives, rng)
    assert negatives.shape == (30, n_negatives)
    assert ((negatives >= 0) & (negatives < n_rows)).all()
    assert (negatives != heads[:, None]).all()


@pytest.mark.parametrize("head", [0, 3, 6])
def test_negatives_are_uniform_over_the_others(head: int) -> None:
    negatives = draw_negatives(np.full(20_000, head), 7, 5, np.random.default_rng(2))
    share = np.bincount(negatives.ravel(), minlength=7) / negatives.size
    expected = np.where(np.arange(7) == head, 0, 1 / 6)
    np.testing.assert_allclose(share, expected, atol=0.006)


def test_negatives_reach_beyond_32_bits() -> None:
    negatives = draw_negatives(np.array([5]), 10**12, 1000, np.random.default_rng(0))
    assert negatives.max() > 2**38


def test_negatives_need_another_row() -> None:
    with pytest.raises(ValueError, match="at least 2 rows to draw from, found 1"):
        draw_negatives(np.array([0]), 1, 5, np.random.default_rng(0))


def test_counts_sum_to_the_draws_and_follow_the_masses() -> None:
    masses = np.array([0.1, 0.0, 3.0, 0.9])
    counts = apportion(masses, 100_000, np.random.default_rng(0))
    assert counts.sum() == 100_000
    np.testing.assert_allclose(counts / 100_000, masses / 4, atol=0.008)


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=200), st.integers(0, 10**12))
def test_counts_always_sum(masses: list[float], n_draws: int) -> None:
    counts = apportion(np.array(masses), n_draws, np.random.default_rng(0))
    assert counts.dtype == np.int64
    assert counts.sum() == n_draws
    assert (counts >= 0).all()


@pytest.mark.parametrize("masses", [[], [0.0, 0.0], [-1.0, 2.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_impossible_masses_are_refused(masses: list[float]) -> None:
    with pytest.raises(ValueError, match="masses sum to"):
        apportion(np.array(masses), 5, np.random.default_rng(0))

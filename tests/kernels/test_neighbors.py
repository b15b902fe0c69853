from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.kernels import neighbors
from pipeline.kernels.neighbors import (
    Neighbors,
    mean_interval,
    recall_per_query,
    search_exact,
    widen,
)

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def _rows(n_rows: int, dimension: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(n_rows, dimension)).astype(np.float32)


def _brute_force(queries: Floats, query_ids: Ids, rows: Floats, row_ids: Ids) -> NDArray[Any]:
    """Return all squared distances, (q, r) float64, with +inf for a query's own id."""
    gaps = queries[:, None].astype(np.float64) - rows[None].astype(np.float64)
    return np.where(query_ids[:, None] == row_ids[None], np.inf, (gaps**2).sum(axis=2))


def _check_sorted(found: Neighbors) -> None:
    step = np.diff(np.where(np.isinf(found.distances), 3.4e38, found.distances), axis=1)
    assert (step >= 0).all()
    both = (step == 0) & (found.ids[:, 1:] >= 0)
    assert (np.diff(found.ids, axis=1)[both] > 0).all()
    assert found.ids.dtype == np.int64
    assert found.distances.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32])
def test_widen_makes_float32(dtype: type) -> None:
    rows: NDArray[Any] = (_rows(30, 9) * 40 + 60).clip(0, 120).astype(dtype)
    widened = widen(rows[:, ::2], "euclidean")
    assert widened.dtype == np.float32
    assert widened.flags.c_contiguous
    np.testing.assert_array_equal(widened, rows[:, ::2].astype(np.float64))
    unit = widen(rows, "cosine")
    wide = rows.astype(np.float64)
    expected = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    np.testing.assert_allclose(unit, expected, atol=3e-7)


def test_widen_leaves_its_input_alone() -> None:
    rows = _rows(10, 4)
    before = rows.copy()
    widen(rows, "cosine")
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_widen_normalizes_extreme_rows(scale: float) -> None:
    unit = widen(_rows(10, 50) * np.float32(scale), "cosine")
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)


def test_unit_rows_do_not_depend_on_the_batch() -> None:
    rows = _rows(5000, 67)
    whole = widen(rows, "cosine")
    for start in (0, 1, 3911, 4999):
        np.testing.assert_array_equal(widen(rows[start : start + 1], "cosine")[0], whole[start])


def test_widen_refuses_zero_rows_and_unknown_metrics() -> None:
    rows = _rows(9000, 40)
    rows[8123] = 0
    with pytest.raises(ValueError, match="row 8123 is all zeros"):
        widen(rows, "cosine")
    with pytest.raises(ValueError, match='metric "manhattan" is not known'):
        widen(rows, "manhattan")


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize(("n_queries", "n_rows", "dimension"), [(1, 300, 5), (90, 700, 33)])
def test_search_equals_brute_force(
    offset: float, n_queries: int, n_rows: int, dimension: int
) -> None:
    rows = _rows(n_rows, dimension) + np.float32(offset)
    row_ids = np.random.default_rng(1).permutation(10**12 + np.arange(n_rows))
    queries, query_ids = rows[:n_queries], row_ids[:n_queries]
    found = search_exact(queries, query_ids, rows, row_ids, 20)
    distances = _brute_force(queries, query_ids, rows, row_ids)
    order = np.argsort(distances, axis=1)[:, :20]
    exact = np.take_along_axis(distances, order, axis=1)
    np.testing.assert_allclose(found.distances, exact, rtol=1e-5)
    _check_sorted(found)
    if not offset:  # rows that far out are on a coarse grid, with many ties
        np.testing.assert_array_equal(found.ids, row_ids[order])


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_search_resolves_clusters_far_from_each_other(
    offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbors, "_DOUBLE_BLOCK", 300)
    rows, ids = _rows(2000, 64), np.arange(2000)
    rows[:1200] += np.float32(offset)
    found = search_exact(rows, ids, rows, ids, 10)
    some = np.arange(1100, 1300)
    exact = np.sort(_brute_force(rows[some], some, rows, ids), axis=1)[:, :10]
    np.testing.assert_allclose(found.distances[some], exact, rtol=1e-5)


def test_search_far_from_the_origin() -> None:
    rows, ids = _rows(2000, 64) + np.float32(1e4), np.arange(2000)
    found = search_exact(rows, ids, rows, ids, 10)
    some = np.arange(200)
    exact = np.sort(_brute_force(rows[some], some, rows, ids), axis=1)[:, :10]
    np.testing.assert_allclose(found.distances[some], exact, rtol=1e-5)


@pytest.mark.parametrize("kind", ["far", "outlier", "equal"])
def test_ordinary_rows_need_no_second_search(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, ids = _rows(2000, 64), np.arange(2000)
    if kind == "far":
        rows += 1e4
    elif kind == "outlier":
        rows[77] = 1e7
    else:
        rows[:] = rows[ids // 100]
    needed: list[int] = []
    real = neighbors._find_unsure

    def note(centered: Floats, farthest: Floats, reach: Floats) -> Ids:
        unsure = real(centered, farthest, reach)
        needed.extend(unsure.tolist())
        return unsure

    monkeypatch.setattr(neighbors, "_find_unsure", note)
    search_exact(rows, ids, rows, ids, 10)
    assert set(needed) <= {77}


def test_thousands_of_equal_rows() -> None:
    rows = np.concatenate([np.full((3000, 6), 0.3, np.float32), _rows(50, 6)])
    ids = np.random.default_rng(0).permutation(3050)
    found = search_exact(rows, ids, rows, ids, 5)
    assert (found.ids != ids[:, None]).all()
    assert (found.ids >= 0).all()
    assert all(np.unique(row).size == 5 for row in found.ids)
    assert (found.distances[:3000] == 0).all()
    _check_sorted(found)


@pytest.mark.parametrize("n_rows", [0, 1, 3])
def test_missing_neighbors_are_marked(n_rows: int) -> None:
    rows, ids = _rows(3, 4), np.arange(3) + 10
    found = search_exact(rows, ids, rows[:n_rows], ids[:n_rows], 4)
    for row in range(3):
        expected = np.delete(ids[:n_rows], row) if row < n_rows else ids[:n_rows]
        assert set(found.ids[row]) - {-1} == set(expected.tolist())
    assert (np.isinf(found.distances) == (found.ids < 0)).all()
    assert (found.ids >= 0).sum() == (n_rows * 3 - min(n_rows, 3))


@pytest.mark.parametrize("dimension", [1, 2, 7, 8, 100, 129, 784, 9001])
def test_distance_of_a_pair_never_varies(dimension: int) -> None:
    rows, ids = _rows(25, dimension) + np.float32(3), np.arange(25)
    whole = search_exact(rows, ids, rows, ids, 24)
    distances = {
        (i, int(j)): whole.distances[i, rank]
        for i in range(25)
        for rank, j in enumerate(whole.ids[i])
    }
    assert all(distances[i, j] == distances[j, i] for i, j in distances)
    for i, j in [(0, 1), (24, 3), (7, 20)]:
        pair = rows[[i]], ids[[i]], rows[[j]], ids[[j]]
        assert search_exact(*pair, 1).distances[0, 0] == distances[i, j]
    odd = search_exact(rows[1:8], ids[1:8], rows[::-1][:17], ids[::-1][:17], 3)
    for i, row in enumerate(odd.ids):
        assert [distances[i + 1, int(j)] for j in row] == odd.distances[i].tolist()


def test_blocks_of_queries_equal_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, ids = _rows(200, 12), np.arange(200)
    whole = search_exact(rows, ids, rows, ids, 9)
    monkeypatch.setattr(neighbors, "_QUERY_BLOCK", 33)
    monkeypatch.setattr(neighbors, "_BLOCK_VALUES", 1000)
    parts = search_exact(rows, ids, rows, ids, 9)
    np.testing.assert_array_equal(whole.ids, parts.ids)
    np.testing.assert_array_equal(whole.distances, parts.distances)


def test_search_refuses_what_float32_cannot_hold() -> None:
    rows, ids = _rows(30, 4), np.arange(30)
    with pytest.raises(ValueError, match="k is 0"):
        search_exact(rows, ids, rows, ids, 0)
    rows[17] = 1e30
    with (
        np.errstate(over="ignore"),
        pytest.raises(ValueError, match="distances that are not finite"),
    ):
        search_exact(rows, ids, rows, ids, 29)


def _neighbors(ids: list[list[int]], distances: list[list[float]]) -> Neighbors:
    return Neighbors(np.array(ids), np.array(distances, dtype=np.float32))


def test_recall_allows_ties_and_never_counts_missing() -> None:
    exact = _neighbors([[1, 2, 3]] * 4, [[0.1, 0.5, 0.5]] * 4)
    found = _neighbors(
        [[1, 2, 3], [1, 8, 9], [1, 2, 7], [1, -1, -1]],
        [[0.1, 0.5, 0.5], [0.1, 0.5, 0.500004], [0.1, 0.5, 0.6], [0.1, 0, np.inf]],
    )
    np.testing.assert_allclose(recall_per_query(found, exact), [1, 1, 2 / 3, 1 / 3])


def test_recall_with_fewer_than_k_exact_neighbors() -> None:
    inf = np.inf
    exact = _neighbors([[1, 2, -1], [1, 2, -1], [-1] * 3], [[0, 1, inf], [0, 1, inf], [inf] * 3])
    found = _neighbors([[1, 2, -1], [1, -1, -1], [-1] * 3], [[0, 1, inf], [0, inf, inf], [inf] * 3])
    np.testing.assert_allclose(recall_per_query(found, exact), [1, 0.5, 1])


def test_recall_needs_equal_shapes() -> None:
    with pytest.raises(ValueError, match=r"found is \(2, 4\), exact is \(2, 5\)"):
        recall_per_query(neighbors.empty_neighbors(2, 4), neighbors.empty_neighbors(2, 5))


def test_interval_of_a_mean() -> None:
    values = np.array([0.5, 0.7, 0.6, 0.8])
    mean, low, high = mean_interval(values)
    half = 1.96 * values.std(ddof=1) / 2
    assert (mean, low, high) == pytest.approx((0.65, 0.65 - half, 0.65 + half))
    assert mean_interval(np.ones(9)) == (1.0, 1.0, 1.0)
    assert mean_interval(np.array([0.0, 1.0])) == (0.5, 0.0, 1.0)
    assert mean_interval(np.array([0.4])) == (0.4, 0.0, 1.0)
    with pytest.raises(ValueError, match="mean of 0 values"):
        mean_interval(np.empty(0))


def test_interval_covers_the_truth_about_19_times_in_20() -> None:
    rng = np.random.default_rng(3)
    intervals = [mean_interval(rng.binomial(15, 0.8, size=200) / 15) for _ in range(1000)]
    share = np.mean([low <= 0.8 <= high for _, low, high in intervals])
    assert 0.92 < share < 0.975

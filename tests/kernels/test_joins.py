from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.kernels import neighbors
from pipeline.kernels.neighbors import (
    Cells,
    Neighbors,
    empty_neighbors,
    merge_found,
    search_cells,
    search_exact,
)

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def _rows(n_rows: int, dimension: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=(n_rows, dimension)).astype(np.float32)


def _cells(members: Sequence[Any]) -> Cells:
    starts = np.cumsum([0, *(len(cell) for cell in members)])
    return Cells(starts, np.concatenate(members).astype(np.int32))


def _exact(rows: Floats, members: Sequence[Any]) -> NDArray[np.float64]:
    """All squared distances, (n, n), +inf for pairs without a common cell."""
    shared = np.zeros((len(rows), len(rows)), dtype=bool)
    for cell in members:
        shared[np.ix_(cell, cell)] = True
    np.fill_diagonal(shared, False)
    gaps = rows[:, None].astype(np.float64) - rows[None]
    return np.where(shared, (gaps**2).sum(axis=2), np.inf)


def _check(found: Neighbors, exact: NDArray[np.float64], k: int) -> None:
    """Lists are sorted, hold no id twice, true distances, and the nearest there are."""
    n_rows = len(exact)
    assert found.ids.shape == found.distances.shape == (n_rows, k)
    real = found.ids >= 0
    assert (real == np.isfinite(found.distances)).all()
    assert (real[:, :-1] | ~real[:, 1:]).all()  # short lists end in -1
    ordered = np.where(real, found.distances, 3.4e38)
    assert (np.diff(ordered, axis=1) >= 0).all()
    for row in range(n_rows):
        ids = found.ids[row][real[row]]
        assert len(set(ids.tolist())) == len(ids)
        assert row not in ids
        np.testing.assert_allclose(
            found.distances[row][real[row]], exact[row, ids], rtol=3e-5, atol=1e-30
        )
    nearest = np.sort(exact, axis=1)[:, :k]
    np.testing.assert_allclose(found.distances, nearest, rtol=3e-5, atol=1e-30)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize(("n_rows", "dimension", "k"), [(2, 3, 1), (40, 5, 7), (513, 33, 15)])
def test_one_cell_is_searched_exactly(n_rows: int, dimension: int, k: int, offset: float) -> None:
    rows = _rows(n_rows, dimension) + np.float32(offset)
    cells = [np.arange(n_rows)]
    _check(search_cells(rows, _cells(cells), k), _exact(rows, cells), k)


def test_tiles_equal_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, cells = _rows(300, 9), _cells([np.arange(300)])
    whole = search_cells(rows, cells, 11)
    monkeypatch.setattr(neighbors, "_TILE", 64)
    parts = search_cells(rows, cells, 11)
    np.testing.assert_array_equal(parts.ids, whole.ids)
    np.testing.assert_allclose(parts.distances, whole.distances, rtol=1e-5)


def test_overlapping_cells_find_each_pair_once() -> None:
    rng = np.random.default_rng(3)
    rows = _rows(250, 6)
    members = [np.sort(rng.choice(250, size, replace=False)) for size in (100, 120, 90, 60, 3, 1)]
    _check(search_cells(rows, _cells(members), 12), _exact(rows, members), 12)


def test_groups_far_from_each_other_keep_their_digits() -> None:
    """Products of rows 1e4 apart leave no digit of distances of 1e-2."""
    rows = _rows(120, 4) * np.float32(1e-2)
    rows[60:] += np.float32(1e4)
    cells = [np.arange(120)]
    _check(search_cells(rows, _cells(cells), 9), _exact(rows, cells), 9)


def test_a_thousand_equal_rows() -> None:
    rows = np.repeat(_rows(2, 7), [1000, 30], axis=0)
    found = search_cells(rows, _cells([np.arange(1030), np.arange(500, 1030)]), 20)
    assert (found.distances == 0).all()
    assert (found.ids[:1000] < 1000).all()
    assert (found.ids[1000:] >= 1000).all()
    assert (np.diff(np.sort(found.ids, axis=1), axis=1) > 0).all()
    assert (found.ids != np.arange(1030)[:, None]).all()


def test_huge_cells_are_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "_LARGEST_CELL", 50)
    rows = _rows(120, 5)
    found = search_cells(rows, _cells([np.arange(120)]), 6)
    parts = [np.arange(0, 50), np.arange(50, 100), np.arange(100, 120)]
    _check(found, _exact(rows, parts), 6)


def test_cells_refuse_what_float32_cannot_hold() -> None:
    rows = _rows(30, 4)
    rows[3] = 1e30
    with (
        np.errstate(over="ignore"),
        pytest.raises(ValueError, match="not finite in float32; scale the rows"),
    ):
        search_cells(rows, _cells([np.arange(30)]), 5)


def test_a_gpu_searches_cells_as_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only faiss itself is replaced: what a GPU gives for a cell is handled by our own code."""
    rng = np.random.default_rng(4)
    rows = _rows(200, 6)
    members = [np.sort(rng.choice(200, size, replace=False)) for size in (90, 150, 5, 1)]
    expected = search_cells(rows, _cells(members), 8)
    monkeypatch.setattr(neighbors, "has_gpu", lambda: True)
    monkeypatch.setattr(neighbors, "_gpu_resources", lambda: None)
    monkeypatch.setattr(faiss, "knn_gpu", lambda _, *arguments: faiss.knn(*arguments))
    found = search_cells(rows, _cells(members), 8)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.distances, expected.distances, rtol=1e-4, atol=1e-5)


def _merge_slowly(n_rows: int, rows: Ids, lists: Neighbors, k: int) -> Neighbors:
    merged = empty_neighbors(n_rows, k)
    best: list[set[tuple[float, int]]] = [set() for _ in range(n_rows)]
    for row, ids, distances in zip(rows, *lists, strict=True):
        pairs = zip(distances.tolist(), ids.tolist(), strict=True)
        best[row] |= {(distance, neighbor) for distance, neighbor in pairs if neighbor >= 0}
    for row, found in enumerate(best):
        for rank, (distance, neighbor) in enumerate(sorted(found)[:k]):
            merged.ids[row, rank], merged.distances[row, rank] = neighbor, distance
    return merged


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5), st.integers(0, 12), st.integers(1, 6), st.integers(0, 10**6))
def test_merge_equals_a_slow_merge(n_rows: int, n_lists: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(n_rows, size=n_lists)
    lists = empty_neighbors(n_lists, 4)
    far = rng.choice([0, 2**62])  # ids need all 64 bits
    for place, row in enumerate(rows):
        ids = rng.choice(9, size=rng.integers(5), replace=False)
        distances = np.array([0, 0.5, 1, 3e38])[(ids * 7 + row) % 4]  # one distance for a pair
        order = np.lexsort((ids, distances))
        lists.ids[place, : len(ids)] = ids[order] + far
        lists.distances[place, : len(ids)] = distances[order]
    merged = empty_neighbors(n_rows, k)
    merge_found(merged, rows, lists)
    slow = _merge_slowly(n_rows, rows, lists, k)
    np.testing.assert_array_equal(merged.ids, slow.ids)
    np.testing.assert_array_equal(merged.distances, slow.distances)


def test_parts_of_the_rows_merge_to_the_whole_search() -> None:
    rows, ids = _rows(100, 6), np.arange(100)
    whole = search_exact(rows, ids, rows, ids, 7)
    best = empty_neighbors(100, 7)
    for start in (0, 3, 50):
        part = slice(start, start + 50)  # they overlap: an id must not come twice
        merge_found(best, ids, search_exact(rows, ids, rows[part], ids[part], 7))
    np.testing.assert_array_equal(best.ids, whole.ids)
    np.testing.assert_array_equal(best.distances, whole.distances)

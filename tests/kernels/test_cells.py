import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.kernels.cells import (
    Assigned,
    assign_cells,
    coverage,
    group_cells,
    train_centroids,
    trim_cells,
)

Floats = NDArray[np.float32]


def _blobs(n_rows: int, n_blobs: int, offset: float = 0.0) -> tuple[Floats, NDArray[np.int64]]:
    rng = np.random.default_rng(5)
    centers = rng.normal(size=(n_blobs, 64)) * 20 + offset
    blob = rng.integers(n_blobs, size=n_rows)
    return (centers[blob] + rng.normal(size=(n_rows, 64))).astype(np.float32), blob


def test_cells_leave_a_small_part_of_the_variance() -> None:
    rows, _ = _blobs(2000, 8)
    centroids = train_centroids(rows, 64, seed=0)
    cells = assign_cells(rows, centroids, 1).cells[:, 0]
    assert 48 <= np.unique(cells).size == len(centroids) <= 72
    assert ((rows - centroids[cells]) ** 2).sum() < 0.02 * ((rows - rows.mean(0)) ** 2).sum()


def test_centroids_are_the_same_for_the_same_seed() -> None:
    rows, _ = _blobs(3000, 7)
    first = train_centroids(rows, 16, seed=3)
    np.testing.assert_array_equal(first, train_centroids(rows.copy(), 16, seed=3))
    assert (first != train_centroids(rows, 16, seed=4)).any()
    assert first.shape == (16, 64)
    assert first.dtype == np.float32


def test_centroids_are_means_of_their_cells() -> None:
    rows, _ = _blobs(3000, 5)
    centroids = train_centroids(rows, 5, seed=1)
    cells = assign_cells(rows, centroids, 1).cells[:, 0]
    means = np.stack([rows[cells == cell].mean(axis=0) for cell in range(5)])
    np.testing.assert_allclose(centroids, means, atol=0.2)  # few iterations


def test_one_cell_is_the_mean() -> None:
    rows, _ = _blobs(500, 3, offset=1e4)
    centroids = train_centroids(rows, 1, seed=0)
    np.testing.assert_array_equal(
        centroids, rows.astype(np.float64).mean(axis=0, keepdims=True).astype(np.float32)
    )


def test_few_rows_train_silently(capfd: pytest.CaptureFixture[str]) -> None:
    rows, _ = _blobs(20, 3)
    centroids = train_centroids(rows, 20, seed=0)
    assert np.isfinite(centroids).all()
    equal = train_centroids(np.ones((50, 3), dtype=np.float32), 4, seed=0)
    assert (equal == 1).all()
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("n_rows", [1, 3000])  # few rows are not searched by products
def test_cells_are_the_nearest_in_order(offset: float, n_rows: int) -> None:
    rows, _ = _blobs(n_rows, 9, offset)
    centroids, _ = _blobs(40, 9, offset)
    gaps = rows[:, None].astype(np.float64) - centroids[None].astype(np.float64)
    distances = (gaps**2).sum(axis=2)
    cells = assign_cells(rows, centroids, 5).cells
    assert cells.dtype == np.int32
    found = np.take_along_axis(distances, cells.astype(np.int64), axis=1)
    np.testing.assert_allclose(found, np.sort(distances, axis=1)[:, :5], rtol=1e-4)


def test_cells_do_not_depend_on_the_batch() -> None:
    rows, _ = _blobs(500, 9)
    centroids = train_centroids(rows, 12, seed=0)
    whole = assign_cells(rows, centroids, 3).cells
    parts = [
        assign_cells(rows[start : start + 7], centroids, 3).cells for start in range(0, 500, 7)
    ]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_no_rows_have_no_cells() -> None:
    none = np.empty((0, 64), dtype=np.float32)
    assert assign_cells(none, _blobs(4, 2)[0], 2).cells.shape == (0, 2)


def test_impossible_numbers_are_refused() -> None:
    rows, _ = _blobs(10, 2)
    with pytest.raises(ValueError, match="11 cells cannot be trained on 10 rows"):
        train_centroids(rows, 11, seed=0)
    with pytest.raises(ValueError, match="overlap 4 with 3 cells"):
        assign_cells(rows, rows[:3], 4)
    rows[6] = 1e30
    with pytest.raises(ValueError, match="that are not finite in float32"):
        assign_cells(rows, rows[:3], 2)


def test_a_centroid_between_all_groups_is_given_up() -> None:
    """Groups as far from each other as random directions are: the middle is near to all."""
    rng = np.random.default_rng(0)
    groups = rng.normal(size=(60, 128))
    grouped = np.repeat(groups, 80, axis=0) + 0.1 * rng.normal(size=(4800, 128))
    rows = np.concatenate([grouped, 0.3 * rng.normal(size=(40, 128))]).astype(np.float32)
    centroids = train_centroids(rows, 120, seed=0)
    cells = assign_cells(rows, centroids, 4).cells
    assert np.bincount(cells.ravel()).max() <= 8 * 4 * 4840 / 120


def test_large_cells_are_split_and_small_ones_given_up() -> None:
    rng = np.random.default_rng(1)
    crowd = rng.normal(size=(5000, 4)) * 0.01
    far = rng.normal(size=(20, 4)) * 100  # rows of their own, which k-means likes to single out
    rows = np.concatenate([crowd, far]).astype(np.float32)
    centroids = train_centroids(rows, 50, seed=0)
    cells = assign_cells(rows, centroids, 1).cells[:, 0]
    counts = np.bincount(cells, minlength=len(centroids))
    assert counts.max() < 8 * 5020 / 50
    assert counts.min() >= 5020 / 50 / 8


def test_only_rows_between_cells_keep_the_last_one() -> None:
    cells = np.array([[0, 1], [1, 0], [1, 2]], dtype=np.int32)
    distances = np.array([[1, 4], [1, 2], [0, 3]], dtype=np.float32)
    assigned = Assigned(cells, distances)
    assert trim_cells(assigned, 2).tolist() == [[0, -1], [1, 0], [1, -1]]
    assert trim_cells(assigned, 1e30)[:2].tolist() == cells[:2].tolist()
    assert cells[0, 1] == 1  # left alone


def test_no_cell_is_no_common_cell() -> None:
    cells = np.array([[3, -1]], dtype=np.int32)
    assert coverage(cells, np.array([[[4, -1]]], dtype=np.int32)).tolist() == [[0, 0]]


def test_coverage_counts_neighbors_that_share_a_cell() -> None:
    rng = np.random.default_rng(2)
    cells = rng.permuted(np.tile(np.arange(9), (20, 1)), axis=1)[:, :4].astype(np.int32)
    near = rng.permuted(np.tile(np.arange(9), (20, 5, 1)), axis=2)[:, :, :4].astype(np.int32)
    slow = [
        [np.mean([bool(set(mine[:o]) & set(other[:o])) for other in others]) for o in range(1, 5)]
        for mine, others in zip(cells, near, strict=True)
    ]
    np.testing.assert_allclose(coverage(cells, near), slow)


def test_groups_are_near_cells_of_equal_cost() -> None:
    rng = np.random.default_rng(3)
    centroids = rng.uniform(size=(400, 2)).astype(np.float32)
    costs = rng.uniform(1, 3, size=400)
    groups = group_cells(centroids, costs, 8)
    assert groups.dtype == np.int32
    totals = np.bincount(groups, weights=costs)
    assert len(totals) == 8
    assert totals.max() < 1.1 * totals.mean()
    spread = [centroids[groups == group].std(axis=0).prod() for group in range(8)]
    assert np.mean(spread) < centroids.std(axis=0).prod() / 4


def test_groups_of_few_or_equal_cells() -> None:
    one = np.zeros((1, 3), dtype=np.float32)
    assert group_cells(one, np.ones(1), 8).tolist() == [0]
    equal = np.ones((5, 3), dtype=np.float32)
    assert sorted(group_cells(equal, np.ones(5), 5).tolist()) == [0, 1, 2, 3, 4]
    giant = group_cells(np.eye(4, dtype=np.float32), np.array([1e9, 1, 1, 1]), 4)
    assert np.bincount(giant, minlength=4).max() <= 3

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.kernels.cells import assign_cells, train_centroids

Floats = NDArray[np.float32]


def _blobs(n_rows: int, n_blobs: int, offset: float = 0.0) -> tuple[Floats, NDArray[np.int64]]:
    rng = np.random.default_rng(5)
    centers = rng.normal(size=(n_blobs, 64)) * 20 + offset
    blob = rng.integers(n_blobs, size=n_rows)
    return (centers[blob] + rng.normal(size=(n_rows, 64))).astype(np.float32), blob


def test_cells_leave_a_small_part_of_the_variance() -> None:
    rows, _ = _blobs(2000, 8)
    centroids = train_centroids(rows, 64, seed=0)
    cells = assign_cells(rows, centroids, 1)[:, 0]
    assert np.unique(cells).size == 64
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
    cells = assign_cells(rows, centroids, 1)[:, 0]
    means = np.stack([rows[cells == cell].mean(axis=0) for cell in range(5)])
    np.testing.assert_allclose(centroids, means, atol=0.05)


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
    assert train_centroids(np.ones((50, 3), dtype=np.float32), 4, seed=0).shape == (4, 3)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("n_rows", [1, 3000])  # few rows are not searched by products
def test_cells_are_the_nearest_in_order(offset: float, n_rows: int) -> None:
    rows, _ = _blobs(n_rows, 9, offset)
    centroids, _ = _blobs(40, 9, offset)
    gaps = rows[:, None].astype(np.float64) - centroids[None].astype(np.float64)
    distances = (gaps**2).sum(axis=2)
    cells = assign_cells(rows, centroids, 5)
    assert cells.dtype == np.int32
    found = np.take_along_axis(distances, cells.astype(np.int64), axis=1)
    np.testing.assert_allclose(found, np.sort(distances, axis=1)[:, :5], rtol=1e-4)


def test_cells_do_not_depend_on_the_batch() -> None:
    rows, _ = _blobs(500, 9)
    centroids = train_centroids(rows, 12, seed=0)
    whole = assign_cells(rows, centroids, 3)
    parts = [assign_cells(rows[start : start + 7], centroids, 3) for start in range(0, 500, 7)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_no_rows_have_no_cells() -> None:
    none = np.empty((0, 64), dtype=np.float32)
    assert assign_cells(none, _blobs(4, 2)[0], 2).shape == (0, 2)


def test_impossible_numbers_are_refused() -> None:
    rows, _ = _blobs(10, 2)
    with pytest.raises(ValueError, match="11 cells cannot be trained on 10 rows"):
        train_centroids(rows, 11, seed=0)
    with pytest.raises(ValueError, match="overlap 4 with 3 cells"):
        assign_cells(rows, rows[:3], 4)
    rows[6] = 1e30
    with pytest.raises(ValueError, match="row 6 has no nearest cell"):
        assign_cells(rows, rows[:3], 2)

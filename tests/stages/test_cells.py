"""cells: how many, and each row's copies in its nearest ones."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.stages.cells import CellSettings, count_cells
from tests.data import Finished, make_blobs, make_job, read_array, run_until, write_parquet


@pytest.mark.parametrize(
    ("cells", "n_rows", "expected"),
    [
        (None, 100, 1),
        (None, 2000, 1),  # twice the rows of a cell: still exact
        (None, 2001, 7),  # 3 copies of each row, 1,000 to a cell
        (None, 100_000, 300),
        (5, 100_000, 5),
        (5, 3, 3),
    ],
)
def test_cells_are_as_few_as_fit(cells: int | None, n_rows: int, expected: int) -> None:
    config = CellSettings("euclidean", cells, cell_rows=1000, overlap=3, seed=0)
    assert count_cells(config, n_rows) == expected


def test_a_row_is_copied_to_its_nearest_cells(done: Finished) -> None:
    sample, assign = done.store("sample"), done.store("assign")
    rows = read_array(sample, "vectors").astype(np.float64)
    centroids = read_array(done.store("centroids"), "centroids").astype(np.float64)
    assert centroids.shape == (5, rows.shape[1])
    distances = ((rows[:, None] - centroids) ** 2).sum(axis=2)
    nearest = np.argsort(distances, axis=1)[:, :2]

    found: set[tuple[int, int]] = set()
    for record in assign.records:
        block = assign.arrays(record)
        numbers, starts = block.read("rows"), block.read("starts")
        assert (block.read("vectors") == rows[numbers]).all()
        assert (starts[0], starts[-1]) == (0, len(numbers))
        for cell in range(5):
            members = numbers[starts[cell] : starts[cell + 1]]
            assert (np.diff(members) > 0).all()
            found |= {(int(row), cell) for row in members}
    assert found == {(row, int(cell)) for row in range(len(rows)) for cell in nearest[row]}
    assert assign.n_rows == 2 * len(rows)


def test_one_cell_is_the_mean_of_all_rows(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(200).vectors)
    stores = run_until(make_job(lake.path, tmp_path / "maps"), "assign")
    rows = read_array(stores["sample"], "vectors")
    centroids = read_array(stores["centroids"], "centroids")
    np.testing.assert_allclose(centroids, rows.mean(axis=0, keepdims=True), rtol=1e-5, atol=1e-5)
    assert read_array(stores["assign"], "rows").tolist() == list(range(200))

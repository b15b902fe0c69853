"""cells: how many and how much overlap, and each row on its way to its nearest ones."""

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import ConfigError
from pipeline.kernels.cells import assign_cells, trim_cells
from pipeline.stages import cells
from pipeline.stages.cells import (
    CellSettings,
    Option,
    assign_rows,
    bucket_row_bytes,
    choose,
    count_drawn,
    count_options,
    make_probe,
    rows_by_bucket,
)
from tests.data import Finished, make_blobs, make_job, read_array, run_until, write_parquet

Floats = NDArray[np.float32]


def config(
    recall: float = 0.95,
    cells: int | None = None,
    overlap: int | None = None,
    memory: int = 512 << 20,
) -> CellSettings:
    return CellSettings(15, "euclidean", recall, cells, overlap, memory, seed=0)


def hard_rows(n_rows: int, width: int = 16) -> Floats:
    """Rows without any structure: cells lose many neighbours."""
    return np.random.default_rng(0).normal(size=(n_rows, width)).astype(np.float32)


def decide(rows: Floats, settings: CellSettings) -> Option:
    row_bytes = bucket_row_bytes(rows.shape[1], 4, settings.k)
    return choose(make_probe(rows, len(rows), settings.k), settings, row_bytes)


def true_coverage(rows: Floats, option: Option, k: int = 15) -> float:
    """Share of the true k nearest of all rows that share a cell."""
    found = trim_cells(assign_cells(rows, option.centroids, option.overlap), option.reach)
    queries = np.arange(0, len(rows), 10)
    gaps = (rows[queries, None].astype(np.float64) - rows[None]) ** 2
    near = np.argsort(gaps.sum(axis=2), axis=1)[:, 1 : k + 1]
    same = found[queries][:, None, :, None] == found[near][:, :, None, :]
    same &= found[near][:, :, None, :] >= 0
    return float(same.any(axis=(2, 3)).mean())


@pytest.mark.parametrize("recall", [0.8, 0.95, 0.99])
def test_the_recall_asked_for_is_the_recall_that_is_had(recall: float) -> None:
    rows = hard_rows(6000)
    option = decide(rows, config(recall))
    assert option.coverage - option.error >= recall
    assert true_coverage(rows, option) > recall - 0.01


def test_a_higher_recall_costs_more() -> None:
    rows = make_blobs(8000, width=8, n_blobs=300).vectors
    costs = [decide(rows, config(recall)).cost for recall in (0.6, 0.8, 0.95, 0.999)]
    assert costs == sorted(costs)
    assert len(set(costs)) > 1


def test_where_cells_cost_more_than_they_save_there_is_one() -> None:
    assert len(decide(hard_rows(6000), config(0.99)).centroids) == 1


def test_a_few_rows_are_one_cell() -> None:
    option = decide(hard_rows(500), config())
    assert len(option.centroids) == option.overlap == option.coverage == 1


@pytest.mark.parametrize("n_rows", [2, 3, 4, 5, 17])
def test_so_few_rows_are_one_cell_too(n_rows: int) -> None:
    settings = CellSettings(n_rows - 1, "euclidean", 0.95, None, None, 512 << 20, seed=0)
    assert len(decide(hard_rows(n_rows), settings).centroids) == 1


def test_what_the_job_fixes_is_kept() -> None:
    rows = hard_rows(6000)
    both = decide(rows, config(cells=40, overlap=2))
    assert (len(both.centroids), both.overlap) == (40, 2)
    assert both.coverage < 0.95  # as asked for, and said
    only_cells = decide(rows, config(cells=40))
    assert len(only_cells.centroids) == 40
    assert only_cells.coverage - only_cells.error >= 0.95
    assert decide(rows, config(overlap=3)).overlap == 3


def test_options_run_from_fine_cells_to_one() -> None:
    assert count_options(config(), 4096, 4096) == [1]
    assert count_options(config(), 100_000, 12_500) == [781, 195, 48, 12, 3, 1]
    assert count_options(config(), 100_000, 800)[0] == 100  # eight rows a centroid at the least
    assert count_options(config(), 10**8, 10**8)[0] == cells.MOST_CELLS
    assert count_options(config(cells=7), 100_000, 12_500) == [7]


def test_a_recall_out_of_reach_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine cells miss it, coarse ones do not fit."""
    monkeypatch.setattr(cells, "MOST_OVERLAP", 3)
    with pytest.raises(
        ConfigError,
        match=r"^neighbors: recall 0.99 is not reached: overlap 3 of \d+ cells finds 0\.\d+ ± "
        r"0\.\d+, 0\.\d+ too little; overlap \d of \d+ cells needs \d+ MiB a task, "
        r"neighbors.memory is 4 MiB; raise neighbors.memory or lower neighbors.recall$",
    ) as caught:
        decide(hard_rows(6000, width=64), config(0.99, memory=4 << 20))
    finds, error, short = re.findall(r"0\.\d{3}", str(caught.value))
    assert float(short) == pytest.approx(0.99 - float(finds) + 2 * float(error), abs=3e-3)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (
            config(0.999, memory=4 << 20),
            r"overlap \d+ of \d+ cells \(finds \d\.\d+\) needs \d+ MiB",
        ),
        (config(cells=1, memory=2 << 20), r"overlap 1 of 1 cells \(finds 1.000\) needs 9 MiB"),
    ],
)
def test_cells_that_do_not_fit_say_what_would(settings: CellSettings, match: str) -> None:
    has = settings.memory >> 20
    with pytest.raises(
        ConfigError, match=rf"^neighbors: {match} a task, neighbors.memory is {has} MiB; raise it"
    ):
        decide(hard_rows(6000, 64), settings)


def test_buckets_hold_what_the_memory_holds() -> None:
    rows = make_blobs(6000, width=32).vectors
    row_bytes = bucket_row_bytes(32, 4, 15)
    small = decide(rows, config(0.8, cells=100, overlap=2, memory=1500 * row_bytes))
    large = decide(rows, config(0.8, cells=100, overlap=2))
    assert large.groups.max() + 1 == cells.LEAST_BUCKETS
    assert small.groups.max() >= large.groups.max()
    found = small.groups[assign_cells(rows, small.centroids, 2).cells]
    _, buckets = rows_by_bucket(found)
    assert np.bincount(buckets).max() <= 1500 * 1.1  # estimated on half of the rows


def test_sizes_follow_the_memory() -> None:
    assert count_drawn(config(), 10**9, 128) == 2 * 16 * 8192
    assert count_drawn(config(), 10**9, 1024) == (256 << 20) // 4096
    assert count_drawn(config(), 3000, 128) == 3000
    assert assign_rows(config(), 60_000, 784) == 7500
    assert assign_rows(config(), 10**9, 512) * 2 * 16 * (512 + 72) <= 512 << 20


def test_rows_are_sent_once_to_each_bucket() -> None:
    buckets = np.array([[2, 0, 2], [1, 1, 1], [0, 1, 2]], dtype=np.int32)
    rows, found = rows_by_bucket(buckets)
    assert list(zip(found.tolist(), rows.tolist(), strict=True)) == [
        (0, 0),
        (0, 2),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 2),
    ]


def test_a_row_goes_to_the_buckets_of_its_nearest_cells(done: Finished) -> None:
    sample, assign = done.store("sample"), done.store("assign")
    rows = read_array(sample, "vectors").astype(np.float64)
    centroids, groups = (read_array(done.store("centroids"), n) for n in ("centroids", "groups"))
    assert centroids.shape == (5, rows.shape[1])
    distances = ((rows[:, None] - centroids.astype(np.float64)) ** 2).sum(axis=2)
    nearest = np.argsort(distances, axis=1)[:, :2]

    found: set[tuple[int, int]] = set()
    for record in assign.records:
        for bucket in range(int(groups.max()) + 1):
            part = assign.bucket(record, bucket)
            numbers = part["rows"]
            assert (np.diff(numbers) > 0).all()
            assert (part["vectors"] == rows[numbers]).all()
            assert (part["cells"] == nearest[numbers]).all()
            found |= {(int(row), bucket) for row in numbers}
    assert found == {(row, int(groups[cell])) for row in range(len(rows)) for cell in nearest[row]}
    assert assign.n_rows == len(found)


def test_one_cell_is_the_mean_of_drawn_rows(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(200).vectors)
    stores = run_until(make_job(lake.path, tmp_path / "maps"), "assign")
    rows = read_array(stores["sample"], "vectors")
    centroids = read_array(stores["centroids"], "centroids")
    np.testing.assert_allclose(centroids, rows[::2].mean(axis=0, keepdims=True), atol=1e-4)
    assign = stores["assign"]
    sent = [assign.bucket(record, 0)["rows"] for record in assign.records]
    assert np.concatenate(sent).tolist() == list(range(200))

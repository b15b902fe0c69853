"""The map's files: further columns, the spatial key, folders by value; the rows stay the same."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from jobs import flow
from pipeline.errors import ConfigError, InputError
from pipeline.kernels.morton import BITS, morton_keys
from pipeline.stages import embed
from tests.data import (
    LABELLED,
    Finished,
    make_blobs,
    make_job,
    run_job,
    write_parquet,
    write_zarr,
)

SETTINGS: list[dict[str, Any]] = [
    {"columns": ["test"]},
    {"spatial_key": True},
    {"partition_by": "label"},
    {"spatial_key": True, "columns": ["test"], "partition_by": "test"},
]


def run_with(done: Finished, folder: Path, settings: dict[str, Any]) -> flow.Published:
    """The finished run again, with other files; all before embed is copied from it."""
    shutil.copytree(done.root / "stores", folder / "maps/stores")
    return run_job(
        make_job(
            done.lake.path,
            folder / "maps",
            input=LABELLED,
            neighbors={"cells": 5, "overlap": 2},
            embed=settings,
        )
    )


def read_run(published: flow.Published) -> pa.Table:
    folder = Path(published.run.url) / "map"
    table = ds.dataset(folder, partitioning="hive").to_table()
    return table.sort_by("id")


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_rows_are_the_same_however_they_are_arranged(
    settings: dict[str, Any], done: Finished, tmp_path: Path
) -> None:
    plain = pq.read_table(done.run / "map").sort_by("id")
    found = run_with(done, tmp_path, settings)
    table = read_run(found)
    for name in ("id", "x", "y"):
        assert table[name].equals(plain[name]), name
    assert pc.cast(table["label"], pa.int64()).equals(plain["label"])
    for name, value in done.published.metrics.items():
        if name == "trained_in":  # the run's own name, which the files' form is part of
            continue
        assert found.metrics[name] == value, name  # accuracy among them: survey finds its rows
    if settings.get("columns"):
        passed = pc.cast(table["test"], pa.string()).to_pylist()
        held_out = done.lake.held_out[done.lake.good]
        assert passed == [str(value).lower() for value in held_out.tolist()]


def test_a_viewport_is_a_range_of_the_spatial_key(done: Finished, tmp_path: Path) -> None:
    found = run_with(done, tmp_path, {"spatial_key": True})
    extent = done.store("train").manifest.metrics["extent"]
    for path in (Path(found.run.url) / "map").iterdir():
        table = pq.read_table(path)
        keys = table["morton"].to_numpy()
        assert (np.diff(keys.astype(np.int64)) >= 0).all()
        xy = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
        assert (morton_keys(xy, extent) == keys).all()
        x0, x1, y0, y1 = extent
        column = np.clip((xy[:, 0] - x0) / (x1 - x0) * 4, 0, 3).astype(int)
        row = np.clip((xy[:, 1] - y0) / (y1 - y0) * 4, 0, 3).astype(int)
        for tile in range(16):  # zoom level 2
            m = (tile & 1) | (tile & 2) << 1 | (tile & 4) >> 1 | (tile & 8)
            inside = (keys >> (2 * (BITS - 2))) == m
            assert (inside == ((column == (tile & 3)) & (row == (tile >> 2)))).all()


def test_values_of_every_kind_make_folders(tmp_path: Path) -> None:
    vectors, _ = make_blobs(300)
    names = np.array(["a/b", "50%", "é ü", "x=y", None], object)[np.arange(300) % 5]
    lake = write_parquet(tmp_path / "lake", vectors, names)
    job = make_job(
        lake.path,
        tmp_path / "maps",
        input={"label": "blob"},
        embed={"partition_by": "label"},
    )
    published = run_job(job)
    folder = Path(published.run.url) / "map"
    assert len(list(folder.iterdir())) == 5
    table = read_run(published)
    assert table["id"].to_pylist() == lake.ids.tolist()
    assert table["label"].to_pylist() == names.tolist()


def test_zarr_arrays_are_handed_on(tmp_path: Path) -> None:
    lake = write_zarr(tmp_path / "lake", make_blobs(300), 3)
    job = make_job(lake.path, tmp_path / "maps", embed={"columns": ["blob"]})
    table = read_run(run_job(job))
    assert table["blob"].to_pylist() == lake.labels.tolist()


def test_a_column_that_is_not_there_is_named_before_anything_runs(done: Finished) -> None:
    job = make_job(done.lake.path, done.root, embed={"columns": ["tset"]})
    with pytest.raises(InputError, match=r"column 'tset' does not exist; the nearest are test"):
        flow.preflight(job)


def test_too_many_folders_are_refused(
    done: Finished, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(embed, "MOST_FOLDERS", 3)
    with pytest.raises(InputError, match=r"column 'label' has 5 values .* at most 3 make folders"):
        run_with(done, tmp_path, {"partition_by": "label", "columns": ["item"]})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": ["x"]}, r"embed.columns has 'x', which the map uses"),
        ({"partition_by": "brand"}, r"embed.partition_by is 'brand'; it must be one of"),
        ({"partition_by": "label"}, r"embed.partition_by is 'label'; it must be one of"),
    ],
)
def test_columns_that_are_not_clear_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_job(tmp_path / "lake", tmp_path / "maps", embed=settings)

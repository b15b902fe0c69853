"""What changed in a lake: every row of today's files is either kept or planned, exactly once."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.lake import Source, plan_lake, take_snapshot
from pipeline.lake.delta import Delta, KnownLake, find_delta, lake_mark, uncovered

WIDTH = 4


def write(path: Path, n_rows: int, group_rows: int = 50, width: int = WIDTH) -> None:
    values = np.random.default_rng(n_rows).random((n_rows, width), np.float32)
    table = pa.table({"v": pa.array(values.tolist(), pa.list_(pa.float32()))})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group_rows)


def source_of(lake: Path, rows_per_part: int) -> Source:
    return Source(str(lake), "v", partition_bytes=rows_per_part * WIDTH * 4)


def know(source: Source) -> KnownLake:
    """The lake as it is, mapped."""
    snapshot = take_snapshot(source)
    plan = plan_lake(source, snapshot)
    files = {file.path: file for file in snapshot.files}
    pieces = [part.pieces for part in plan.partitions]
    return KnownLake(files, pieces, plan.width, plan.dtype, lake_mark(source, snapshot))


def covered(known: KnownLake, delta: Delta) -> Counter[tuple[str, int, int]]:
    """How often every row comes, by file, row group and number."""
    packs = [known.parts[position] for position in delta.kept]
    packs += [part.pieces for part in delta.plan.partitions]
    return Counter(
        (piece.path, piece.group, row)
        for pack in packs
        for piece in pack
        for row in range(piece.start, piece.stop)
    )


def rows_of(source: Source) -> Counter[tuple[str, int, int]]:
    plan = plan_lake(source, take_snapshot(source))
    return Counter(
        (piece.path, piece.group, row)
        for part in plan.partitions
        for piece in part.pieces
        for row in range(piece.start, piece.stop)
    )


CHANGES: list[dict[str, int | None]] = [
    {"b.parquet": 35},  # written anew
    {"b.parquet": None},  # gone
    {"aa.parquet": 130},  # new, in between
    {"a.parquet": None, "c.parquet": 10, "d.parquet": 77},
    {"a.parquet": 1, "b.parquet": 1, "c.parquet": 1},
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rows_per_part", [20, 60, 100, 1000])
def test_every_row_comes_once(
    change: dict[str, int | None], rows_per_part: int, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    for name, n_rows in (("a", 120), ("b", 30), ("c", 260)):
        write(lake / f"{name}.parquet", n_rows)
    source = source_of(lake, rows_per_part)
    known = know(source)
    assert find_delta(source, take_snapshot(source), known) is None
    for name, count in change.items():
        if count is None:
            (lake / name).unlink()
        else:
            write(lake / name, count)
    delta = find_delta(source, take_snapshot(source), known)
    assert delta is not None
    assert covered(known, delta) == rows_of(source)
    named = {piece.path for part in delta.plan.partitions for piece in part.pieces}
    assert named == {file.path for file in delta.files}
    for position, pieces in enumerate(known.parts):
        clean = not {piece.path for piece in pieces} & change.keys()
        assert (position in delta.kept) == clean
    found, n_rows = delta.changes, sum(rows_of(source).values())
    assert found.rows_new + found.rows_changed + found.rows_kept == n_rows
    whole = find_delta(source, take_snapshot(source), known, reuse=False)
    assert whole is not None
    assert (whole.kept, whole.plan.n_rows) == ([], n_rows)
    assert whole.digest != delta.digest or not delta.kept


def test_footers_of_unchanged_files_are_not_read(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    for index in range(5):
        write(lake / f"{index}.parquet", 40)
    source = source_of(lake, 40)
    known = know(source)
    path = lake / "3.parquet"
    stat = path.stat()
    with path.open("r+b") as file:  # same size, inode and time: nobody can tell
        file.write(b"XXXX")
        file.seek(-4, os.SEEK_END)
        file.write(b"XXXX")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    write(lake / "9.parquet", 10)
    delta = find_delta(source, take_snapshot(source), known)
    assert delta is not None
    assert [file.path for file in delta.files] == ["9.parquet"]


def test_zarr_metadata_that_matter(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    group: Any = zarr.open_group(lake, mode="w", zarr_format=3)
    array = group.create_array("v", data=np.ones((300, WIDTH), np.float32), chunks=(50, WIDTH))
    source = source_of(lake, 100)
    known = know(source)
    assert len(known.parts) == 3
    array.attrs["note"] = "nobody cares"
    assert find_delta(source, take_snapshot(source), known) is None
    metadata = json.loads((lake / "v/zarr.json").read_text())
    metadata["fill_value"] = 7.0
    (lake / "v/zarr.json").write_text(json.dumps(metadata))
    delta = find_delta(source, take_snapshot(source), known)
    assert delta is not None
    assert (delta.kept, delta.plan.n_rows) == ([], 300)


def test_a_zarr_array_of_another_width_is_refused(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    zarr.open_group(lake, mode="w").create_array("v", data=np.ones((30, WIDTH), np.float32))
    source = source_of(lake, 100)
    known = know(source)
    zarr.open_group(lake, mode="w").create_array("v", data=np.ones((30, 5), np.float32))
    with pytest.raises(
        InputError, match="the array has 5 columns, the published map was made of 4"
    ):
        find_delta(source, take_snapshot(source), known)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.sets(st.integers(0, 100), max_size=10),
)
def test_uncovered_ranges(sizes: list[int], marks: set[int]) -> None:
    bounds = np.cumsum([0, *sizes]).tolist()
    edges = sorted(mark for mark in marks if mark <= bounds[-1])
    taken = list(zip(edges[::2], edges[1::2], strict=False))
    found = uncovered(bounds, taken)
    rows = [row for start, stop in [*found, *taken] for row in range(start, stop)]
    assert sorted(rows) == list(range(bounds[-1]))
    inner = set(bounds)
    assert all(start < stop and not inner & set(range(start + 1, stop)) for start, stop in found)

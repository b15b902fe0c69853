"""Parquet lakes: every kind of column against numpy, partitions, bad rows, Hive folders, errors."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import InputError, StoreError
from pipeline.lake import LakePlan, Rows, Source, plan_lake, read_partition, take_snapshot
from pipeline.lake import parquet as lake_parquet
from pipeline.lake.files import Root
from pipeline.lake.parquet import MAX_PIECES, RangeFile, group_pieces
from pipeline.lake.schema import hive_values
from pipeline.partitions import Piece

RNG = np.random.default_rng(7)


def vectors(n_rows: int, width: int = 8, dtype: str = "float32") -> NDArray[Any]:
    return (RNG.normal(size=(n_rows, width)) * 50).astype(dtype)


def fixed(rows: NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])


def ragged(rows: NDArray[Any], large: bool = False) -> pa.Array:
    offsets = np.arange(len(rows) + 1) * rows.shape[1]
    kind = pa.LargeListArray if large else pa.ListArray
    return kind.from_arrays(pa.array(offsets, pa.int64() if large else pa.int32()), rows.ravel())


def write(path: Path, **columns: Any) -> None:
    pq.write_table(pa.table(columns), path)


def read_all(source: Source) -> tuple[LakePlan, list[Rows]]:
    snapshot = take_snapshot(source)
    plan = plan_lake(source, snapshot)
    assert [p.index for p in plan.partitions] == list(range(len(plan.partitions)))
    assert plan.partitions[0].start == 0
    assert [p.stop for p in plan.partitions][:-1] == [p.start for p in plan.partitions][1:]
    assert plan.partitions[-1].stop == plan.n_rows
    files = {file.path: file for file in snapshot.files}
    parts = [read_partition(source, p, plan.width, plan.dtype, files) for p in plan.partitions]
    for partition, rows in zip(plan.partitions, parts, strict=True):
        assert sum(piece.n_rows for piece in partition.pieces) == partition.n_rows
        assert len(rows.vectors) + rows.bad.num_rows == partition.n_rows
        assert len(rows.vectors) == len(rows.ids) == len(rows.holdout)
        assert rows.vectors.shape[1] == plan.width
        assert rows.vectors.dtype == plan.dtype
    return plan, parts


def plan(source: Source) -> LakePlan:
    return plan_lake(source, take_snapshot(source))


def joined(parts: list[Rows]) -> NDArray[Any]:
    return np.concatenate([rows.vectors for rows in parts])


def all_ids(parts: list[Rows]) -> list[Any]:
    return [value for rows in parts for value in rows.ids.to_pylist()]


def bad_rows(parts: list[Rows]) -> list[dict[str, Any]]:
    return [row for rows in parts for row in rows.bad.to_pylist()]


@pytest.mark.parametrize("layout", ["fixed", "list", "large", "columns"])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("uint8", "uint8"),
        ("int8", "int8"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("float64", "float32"),
        ("int16", "float32"),
        ("int64", "float32"),
        ("uint32", "float32"),
    ],
)
def test_every_type_and_layout_equals_numpy(
    tmp_path: Path, layout: str, dtype: str, stored: str
) -> None:
    rows = np.abs(vectors(1000, 5)).astype(dtype)
    arrays = {
        "fixed": {"v": fixed(rows)},
        "list": {"v": ragged(rows)},
        "large": {"v": ragged(rows, large=True)},
        "columns": {f"c{i}": rows[:, i] for i in range(5)},
    }[layout]
    table = pa.table(arrays | {"key": np.arange(1000, dtype="int32"), "kind": ["a", "b"] * 500})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    vector = tuple(f"c{i}" for i in range(5)) if layout == "columns" else "v"
    plan, parts = read_all(
        Source(str(tmp_path), vector, id="key", label="kind", partition_bytes=2000)
    )
    assert (plan.n_rows, plan.width, plan.dtype, plan.n_files) == (1000, 5, stored, 1)
    np.testing.assert_array_equal(joined(parts), rows.astype(stored))
    assert all_ids(parts) == list(range(1000))
    assert parts[0].ids.type == pa.int32()
    assert [v for p in parts if p.labels is not None for v in p.labels.to_pylist()] == (
        ["a", "b"] * 500
    )
    assert not any(p.holdout.any() for p in parts)
    assert len(parts) > 2


def test_a_single_file_names_its_rows(tmp_path: Path) -> None:
    rows = vectors(7)
    pq.write_table(pa.table({"v": fixed(rows)}), tmp_path / "one.parquet", row_group_size=3)
    for path in (str(tmp_path / "one.parquet"), (tmp_path / "one.parquet").as_uri()):
        _, parts = read_all(Source(path, "v", partition_bytes=128))
        assert all_ids(parts) == [f"one.parquet:{row}" for row in range(7)]
        np.testing.assert_array_equal(joined(parts), rows)


def test_mixed_number_types_become_float32(tmp_path: Path) -> None:
    small, double = vectors(4, dtype="uint8"), vectors(4, dtype="float64")
    write(tmp_path / "a.parquet", v=fixed(small), id=[0, 1, 2, 3])
    write(tmp_path / "b.parquet", v=ragged(double), id=pa.array([4, 5, 6, 7], pa.int32()))
    plan, parts = read_all(Source(str(tmp_path), "v", id="id"))
    assert plan.dtype == "float32"
    np.testing.assert_array_equal(joined(parts), np.concatenate([small, double]).astype("float32"))
    assert all_ids(parts) == list(range(8))


def test_dictionaries_extensions_and_string_views_are_read_as_their_values(tmp_path: Path) -> None:
    rows = vectors(4)
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), (8,)), fixed(rows))
    table = pa.table(
        {
            "v": tensors,
            "id": pa.array(["w", "x", "y", "z"]).cast(pa.string_view()),
            "label": pa.array(["a", None, "a", "b"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    _, [part] = read_all(Source(str(tmp_path), "v", id="id", label="label"))
    np.testing.assert_array_equal(part.vectors, rows)
    assert part.ids.to_pylist() == ["w", "x", "y", "z"]
    assert part.labels == pa.array(["a", None, "a", "b"])


def test_bytes_are_vectors_of_uint8(tmp_path: Path) -> None:
    rows = vectors(1000, 8, "uint8")
    column: list[bytes | None] = [row.tobytes() for row in rows]
    column[7] = column[999] = None
    write(tmp_path / "a.parquet", v=pa.array(column, pa.binary(8)))
    write(tmp_path / "b.parquet", v=fixed(rows))  # the same, as lists
    found, parts = read_all(Source(str(tmp_path), "v", partition_bytes=3000))
    assert (found.dtype, found.width, found.n_rows) == ("uint8", 8, 2000)
    np.testing.assert_array_equal(
        joined(parts), np.concatenate([np.delete(rows, [7, 999], 0), rows])
    )
    bad = pa.concat_tables([part.bad for part in parts])
    assert bad["row"].to_pylist() == [7, 999]
    assert set(bad["reason"].to_pylist()) == {"null vector"}


def test_names_with_dots_are_exact(tmp_path: Path) -> None:
    rows, other = vectors(20), vectors(20)
    table = pa.table(
        {
            "emb": [{"v": row} for row in other.tolist()],
            "emb.v": fixed(rows),
            "id": [str(i) for i in range(20)],
            "id.x": np.arange(20) * 3,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    for name, numbers in (("id", [str(i) for i in range(20)]), ("id.x", list(range(0, 60, 3)))):
        _, parts = read_all(Source(str(tmp_path), "emb.v", id=name))
        np.testing.assert_array_equal(joined(parts), rows)
        assert all_ids(parts) == numbers


def test_hive_folders_are_columns(tmp_path: Path) -> None:
    rows = vectors(6)
    names = ["lang=de/test=true", "lang=fr%20ca/test=0", "lang=__HIVE_DEFAULT_PARTITION__/test=0"]
    for index, name in enumerate(names):
        (tmp_path / name).mkdir(parents=True)
        table = pa.table({"v": fixed(rows[2 * index : 2 * index + 2])})
        pq.write_table(table, tmp_path / name / "part.parquet")
    plan, [part] = read_all(Source(str(tmp_path), "v", label="lang", holdout="test"))
    assert part.labels is not None
    order = [piece.path for piece in plan.partitions[0].pieces]
    expected = [value for path in order for value in [hive_values(path)["lang"]] * 2]
    assert part.labels.to_pylist() == expected
    assert set(expected) == {"de", "fr ca", None}
    assert part.holdout.tolist() == [value == "de" for value in expected]


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.parquet", "_tmp/b.parquet", ".old/c.parquet", "_d.parquet", "_k=1/e.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"v": fixed(vectors(2))}), tmp_path / name)
    (tmp_path / "_SUCCESS").touch()
    files = take_snapshot(Source(str(tmp_path), "v")).files
    assert [file.path for file in files] == ["_k=1/e.parquet", "a.parquet"]


def test_a_column_of_nulls_agrees_with_any(tmp_path: Path) -> None:
    for name, labels in (("a", ["x", "y"]), ("b", [None, None])):
        table = pa.table({"v": fixed(vectors(2)), "l": pa.array(labels)})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    _, [part] = read_all(Source(str(tmp_path), "v", label="l"))
    assert part.labels == pa.array(["x", "y", None, None])


def test_width_is_the_most_common_one(tmp_path: Path) -> None:
    rows = [[1.0], None, [], [1.0, 2.0], [3.0, 4.0]]
    pq.write_table(pa.table({"v": rows}), tmp_path / "a.parquet", row_group_size=1)
    plan, parts = read_all(Source(str(tmp_path), "v"))
    assert plan.width == 2
    assert joined(parts).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert [row["row"] for row in bad_rows(parts)] == [0, 1, 2]


def test_many_tiny_files_make_one_partition(tmp_path: Path) -> None:
    rows = vectors(600)
    for index in range(200):
        table = pa.table({"v": fixed(rows[3 * index : 3 * index + 3])})
        pq.write_table(table, tmp_path / f"{index:03}.parquet")
    plan, parts = read_all(Source(str(tmp_path), "v"))
    assert (len(plan.partitions), plan.n_files, len(plan.partitions[0].pieces)) == (1, 200, 200)
    np.testing.assert_array_equal(joined(parts), rows)
    assert all_ids(parts)[-1] == "199.parquet:2"


def test_one_large_row_group_is_split_evenly(tmp_path: Path) -> None:
    rows = vectors(1001)
    pq.write_table(pa.table({"v": fixed(rows)}), tmp_path / "a.parquet", data_page_size=500)
    plan, parts = read_all(Source(str(tmp_path), "v", partition_bytes=100 * 32))
    assert {p.n_rows for p in plan.partitions} == {91}
    np.testing.assert_array_equal(joined(parts), rows)
    assert "row group 0 is read in 11 pieces" in plan.warnings[0]


@given(
    st.lists(st.lists(st.integers(0, 50), max_size=6), min_size=1, max_size=8),
    st.integers(1, 60),
)
def test_pieces_cover_each_row_once(files: list[list[int]], rows_per_part: int) -> None:
    sizes = {(str(f), g): n for f, counts in enumerate(files) for g, n in enumerate(counts) if n}
    partitions = group_pieces([Piece(*key, 0, n) for key, n in sizes.items()], rows_per_part)
    pieces = [piece for partition in partitions for piece in partition.pieces]
    covered = [(p.path, p.group, row) for p in pieces for row in range(p.start, p.stop)]
    assert covered == [(*key, row) for key, n in sizes.items() for row in range(n)]
    assert all(0 < partition.n_rows <= rows_per_part for partition in partitions)
    assert [p.stop for p in partitions][:-1] == [p.start for p in partitions][1:]
    for left, right in pairwise(partitions):
        near = (left.pieces[-1], right.pieces[0])
        if all(sizes[piece.path, piece.group] <= rows_per_part for piece in near):
            assert left.n_rows + right.pieces[0].n_rows > rows_per_part


def test_a_partition_has_a_bounded_number_of_pieces() -> None:
    groups = [Piece(str(index), 0, 0, 1) for index in range(MAX_PIECES + 1)]
    assert [len(p.pieces) for p in group_pieces(groups, 1 << 20)] == [MAX_PIECES, 1]


MEMORY = """
import resource, sys
import pyarrow as pa
from pipeline.lake import Source, plan_lake, read_partition, take_snapshot
source = Source(sys.argv[1], "v", partition_bytes=16 << 20)
plan = plan_lake(source, take_snapshot(source))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = read_partition(source, plan.partitions[-1], plan.width, plan.dtype)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(plan.partitions), after - before, pa.default_memory_pool().max_memory())
"""


def test_a_piece_does_not_hold_its_row_group(tmp_path: Path) -> None:
    rows = np.tile(vectors(1000, 256), (200, 1))
    table = pa.table({"v": fixed(rows)})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=len(rows), use_dictionary=False, compression="none")
    assert path.stat().st_size > 200e6
    command = [sys.executable, "-c", MEMORY, str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    n_partitions, kilobytes, arrow_bytes = map(int, output.split())
    assert n_partitions == 13
    assert arrow_bytes < 48 << 20
    assert kilobytes < 150_000


def test_objects_are_read_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = vectors(900)
    table = pa.table({"v": fixed(rows), "id": [f"{i}" for i in range(900)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=400)
    store = obstore.store.MemoryStore()
    obstore.put(store, "a.parquet", (tmp_path / "a.parquet").read_bytes())
    root = Root("memory://lake", store, None)
    for module in ("pipeline.lake", "pipeline.lake.files", "pipeline.lake.parquet"):
        monkeypatch.setattr(f"{module}.open_root", lambda _: root)
    monkeypatch.setattr(lake_parquet, "READ_AHEAD_BYTES", 1000)
    _, parts = read_all(Source("memory://lake", "v", id="id", partition_bytes=100 * 32))
    np.testing.assert_array_equal(joined(parts), rows)
    assert all_ids(parts) == [f"{i}" for i in range(900)]


def test_range_file_reads_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_parquet, "READ_AHEAD_BYTES", 10)
    data = bytes(range(100))
    store = obstore.store.MemoryStore()
    obstore.put(store, "k", data)
    file = RangeFile(store, "k", 100)
    for at, n in ((0, 4), (4, 6), (2, 5), (98, 9), (50, 20), (69, 1), (100, 3), (30, -1)):
        file.seek(at)
        assert bytes(file.read(n)) == data[at:][: n if n >= 0 else None]
        assert file.tell() == min(100, at + n) if n >= 0 else 100
    assert file.seek(-1, 2) == 99
    assert file.seek(-9, 1) == 90
    file.close()
    assert file.closed


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_a_file_that_is_not_parquet_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "a.parquet", v=fixed(vectors(50)))
    data = (tmp_path / "a.parquet").read_bytes()
    damaged = {"cut": data[:-20], "text": b"id,x,y\n1,2,3\n", "empty": b""}[damage]
    (tmp_path / "b.parquet").write_bytes(damaged)
    with pytest.raises(InputError, match=r"b.parquet: not a Parquet file, or one cut short \(Parq"):
        plan(Source(str(tmp_path), "v"))


def test_a_row_group_that_does_not_decode_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"v": fixed(vectors(1000))})
    pq.write_table(table, path, row_group_size=500, write_page_checksum=True, use_dictionary=False)
    source = Source(str(tmp_path), "v", partition_bytes=500 * 32)
    data = bytearray(path.read_bytes())
    middle = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset + 5000
    data[middle : middle + 100] = os.urandom(100)
    path.write_bytes(data)
    found = plan(source)
    assert len(read_partition(source, found.partitions[0], 8, "float32").vectors) == 500
    with pytest.raises(InputError, match=r"a.parquet: row group 1 does not decode \(.*write it"):
        read_partition(source, found.partitions[1], 8, "float32")


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", v=fixed(vectors(5)))
    source = Source(str(tmp_path), "v")
    snapshot = take_snapshot(source)
    found = plan_lake(source, snapshot)
    files = {file.path: file for file in snapshot.files}
    write(tmp_path / "a.parquet", v=fixed(vectors(4)))
    with pytest.raises(InputError, match=r"a.parquet: file changed since the run began; start"):
        read_partition(source, found.partitions[0], 8, "float32", files)
    with pytest.raises(InputError, match=r"a.parquet: row group 0 has 4 rows, needs 5"):
        read_partition(source, found.partitions[0], 8, "float32")
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(InputError, match=r"a.parquet: file vanished since the run began"):
        read_partition(source, found.partitions[0], 8, "float32", files)
    with pytest.raises(InputError, match=r"a.parquet: file vanished while the lake was read"):
        read_partition(source, found.partitions[0], 8, "float32")


def test_errors_of_the_store_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", v=fixed(vectors(5)))
    source = Source(str(tmp_path), "v")
    snapshot = take_snapshot(source)

    def refuse(*_: Any) -> None:
        raise obstore.exceptions.PermissionDeniedError("denied\n\nDebug source: much more")

    monkeypatch.setattr(RangeFile, "read", refuse)
    root = Root("s3://lake", obstore.store.LocalStore(tmp_path), None)
    monkeypatch.setattr(lake_parquet, "open_root", lambda _: root)
    with pytest.raises(StoreError, match=r"^input s3://lake/a.parquet: permission denied[^\n]*\Z"):
        plan_lake(source, snapshot)

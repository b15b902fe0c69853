"""Zarr lakes: formats, types, chunks and shards against numpy, absent chunks, errors."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import obstore
import pyarrow as pa
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, GzipCodec

from pipeline.errors import InputError, StoreError
from pipeline.lake import (
    LakePlan,
    Rows,
    Source,
    plan_lake,
    read_partition,
    take_snapshot,
)
from pipeline.lake.zarr import cut_rows

# Zarr 3 has no final specification of fixed-length strings yet, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:The data type")

RNG = np.random.default_rng(3)


def matrix(n_rows: int = 100, width: int = 6, dtype: str = "float32") -> NDArray[Any]:
    return (np.abs(RNG.normal(size=(n_rows, width))) * 50 + 1).astype(dtype)


def write_array(path: Path, rows: NDArray[Any], chunks: tuple[int, ...], **options: Any) -> None:
    array = zarr.create_array(path, shape=rows.shape, dtype=rows.dtype, chunks=chunks, **options)
    array[...] = rows


def write_group(path: Path, version: Literal[2, 3] = 3, **arrays: Any) -> None:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, values in arrays.items():
        dtype = str if values.dtype == object else values.dtype
        array = group.create_array(
            name, shape=values.shape, dtype=dtype, chunks=(30, *values.shape[1:])
        )
        array[...] = values


def read_all(source: Source) -> tuple[LakePlan, list[Rows]]:
    snapshot = take_snapshot(source)
    plan = plan_lake(source, snapshot)
    files = {file.path: file for file in snapshot.files}
    parts = [read_partition(source, p, plan.width, plan.dtype, files) for p in plan.partitions]
    assert [p.start for p in plan.partitions] == [0, *(p.stop for p in plan.partitions[:-1])]
    assert plan.partitions[-1].stop == plan.n_rows
    return plan, parts


def joined(parts: list[Rows]) -> NDArray[Any]:
    return np.concatenate([rows.vectors for rows in parts])


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("uint8", "uint8"),
        ("int8", "int8"),
        ("float16", "float16"),
        ("float32", "float32"),
        (">f4", "float32"),
        ("float64", "float32"),
        ("int32", "float32"),
    ],
)
def test_every_type_equals_numpy(
    tmp_path: Path, version: Literal[2, 3], dtype: str, stored: str
) -> None:
    rows = matrix(dtype=dtype)
    write_array(tmp_path / "a.zarr", rows, (7, 4), zarr_format=version)
    plan, parts = read_all(Source(str(tmp_path / "a.zarr"), None, partition_bytes=400))
    assert (plan.n_rows, plan.width, plan.dtype, plan.warnings) == (100, 6, stored, ())
    assert joined(parts).dtype == stored
    np.testing.assert_array_equal(joined(parts), rows.astype(stored))
    assert all(partition.start % 7 == 0 for partition in plan.partitions)
    assert [v for p in parts for v in p.ids.to_pylist()] == [f"a.zarr:{row}" for row in range(100)]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    "ids",
    [
        np.arange(100),
        np.arange(100, dtype="uint64") + 2**63,
        np.array([f"ü{i}" for i in range(100)]),
        np.array([f"b{i}" for i in range(100)], dtype="S5"),
        np.array([f"v{i}" * (i % 4) for i in range(100)], dtype=object),
    ],
    ids=["int64", "uint64", "fixed", "bytes", "variable"],
)
def test_a_group_with_ids_labels_and_holdout(
    tmp_path: Path, version: Literal[2, 3], ids: NDArray[Any]
) -> None:
    rows, labels, flags = matrix(), np.arange(100) % 5, np.arange(100) % 10 == 0
    write_group(tmp_path / "g", version, vec=rows, key=ids, kind=labels, test=flags)
    source = Source(str(tmp_path / "g"), "vec", "key", "kind", "test", partition_bytes=720)
    plan, parts = read_all(source)
    assert [p.pieces[0].path for p in plan.partitions] == ["vec"] * 4
    np.testing.assert_array_equal(joined(parts), rows)
    texts = [v.decode() if isinstance(v, bytes) else v for v in ids.tolist()]
    assert [v for p in parts for v in p.ids.to_pylist()] == texts
    assert [v for p in parts if p.labels for v in p.labels.to_pylist()] == labels.tolist()
    assert np.concatenate([p.holdout for p in parts]).tolist() == flags.tolist()
    assert parts[0].ids.type == (pa.string() if ids.dtype.kind in "USO" else pa.array(ids).type)


def test_nested_and_consolidated_groups(tmp_path: Path) -> None:
    rows = matrix()
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=2)
    group.create_group("emb").create_array("v", data=rows, chunks=(30, 6))
    zarr.consolidate_metadata(tmp_path / "g", zarr_format=2)
    _, parts = read_all(Source(str(tmp_path / "g"), "emb/v"))
    np.testing.assert_array_equal(joined(parts), rows)


def test_partitions_end_at_shards_then_chunks_then_inside(tmp_path: Path) -> None:
    rows = matrix(200)
    write_array(tmp_path / "a", rows, (10, 6), shards=(50, 6))
    for n_rows, starts in (
        (120, [0, 100]),
        (30, [0, 20, 50, 70, 100, 120, 150, 170]),
        (7, [start for chunk in range(0, 200, 10) for start in (chunk, chunk + 5)]),
    ):
        plan, parts = read_all(Source(str(tmp_path / "a"), None, partition_bytes=n_rows * 24))
        assert [partition.start for partition in plan.partitions] == starts
        assert max(partition.n_rows for partition in plan.partitions) <= n_rows
        np.testing.assert_array_equal(joined(parts), rows)
    assert "exceeds input.partition_bytes, so several tasks decode it" in plan.warnings[0]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 8), st.integers(1, 90))
def test_ranges_cover_each_row_once(n_rows: int, step: int, steps: int, rows_per_part: int) -> None:
    outer = step * steps
    if step > rows_per_part:
        outer, step = step, 1
    ranges = cut_rows(n_rows, outer, step, rows_per_part)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(n_rows))
    assert all(0 < stop - start <= rows_per_part for start, stop in ranges)
    assert all(start % outer % step == 0 for start, _ in ranges)
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    assert all(start // outer == (stop - 1) // outer for start, stop in ranges)


def test_many_blocks_make_one_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = matrix()
    monkeypatch.setattr("pipeline.lake.zarr.BLOCK_BYTES", 20 * 24)
    write_group(tmp_path / "g", vec=rows, key=np.arange(100))
    _, [part] = read_all(Source(str(tmp_path / "g"), "vec", "key"))
    np.testing.assert_array_equal(part.vectors, rows)
    assert part.ids.to_pylist() == list(range(100))


def test_bad_rows_are_told_apart(tmp_path: Path) -> None:
    rows = matrix()
    rows[5, 3], rows[40] = np.nan, 0
    write_array(tmp_path / "a", rows, (30, 6))
    source = Source(str(tmp_path / "a"), None, reject_zero=True, partition_bytes=720)
    _, parts = read_all(source)
    assert [row for part in parts for row in part.bad.to_pylist()] == [
        {"file": "a", "row": 5, "id": None, "reason": "not finite: nan at position 3"},
        {"file": "a", "row": 40, "id": None, "reason": "zero vector"},
    ]
    np.testing.assert_array_equal(joined(parts), np.delete(rows, [5, 40], axis=0))


def test_absent_chunks_are_counted(tmp_path: Path) -> None:
    write_array(tmp_path / "a", matrix(), (30, 3), fill_value=0.5)
    for chunk in ("c/1/0", "c/1/1", "c/3/0"):
        (tmp_path / "a" / chunk).unlink()
    plan, parts = read_all(Source(str(tmp_path / "a"), None))
    assert plan.warnings == (
        f"input {tmp_path}/a: 3 of 8 chunks of array '' are absent from the store "
        "and read as the fill value 0.5",
    )
    assert (joined(parts)[30:60] == 0.5).all()


def test_only_the_named_arrays_count(tmp_path: Path) -> None:
    write_group(tmp_path / "g", vec=matrix(), other=matrix(), key=np.arange(100))
    source = Source(str(tmp_path / "g"), "vec", "key")
    snapshot = take_snapshot(source)
    assert {file.path.split("/")[0] for file in snapshot.files} == {"zarr.json", "vec", "key"}
    zarr.open_group(tmp_path / "g", mode="a")["other"][:] = 0  # type: ignore[index]
    assert take_snapshot(source) == snapshot


def test_a_chunk_that_changed_is_named(tmp_path: Path) -> None:
    rows = matrix()
    write_array(tmp_path / "a", rows, (30, 6))
    source = Source(str(tmp_path / "a"), None, partition_bytes=720)
    snapshot = take_snapshot(source)
    plan = plan_lake(source, snapshot)
    files = {file.path: file for file in snapshot.files}
    array = zarr.open_array(tmp_path / "a", mode="a")
    array[40] = 1
    (tmp_path / "a" / "c" / "2" / "0").unlink()
    np.testing.assert_array_equal(
        read_partition(source, plan.partitions[0], 6, "float32", files).vectors, rows[:30]
    )
    for index, what in ((1, "c/1/0: file changed"), (2, "c/2/0: file vanished")):
        with pytest.raises(InputError, match=f"{what} since the run began"):
            read_partition(source, plan.partitions[index], 6, "float32", files)
    later = {path: file for path, file in files.items() if path != "c/3/0"}
    with pytest.raises(InputError, match="c/3/0: file appeared since the run began"):
        read_partition(source, plan.partitions[3], 6, "float32", later)
    array.resize((50, 6))
    with pytest.raises(InputError, match=r"zarr.json: file changed since the run began"):
        read_partition(source, plan.partitions[0], 6, "float32", files)
    with pytest.raises(InputError, match="array '' has 50 rows, needs 90; the array changed"):
        read_partition(source, plan.partitions[2], 6, "float32")


@pytest.mark.parametrize("codec", [None, BloscCodec(), GzipCodec()])
def test_a_chunk_that_does_not_decode_is_named(tmp_path: Path, codec: Any) -> None:
    write_array(tmp_path / "a", matrix(), (30, 6), compressors=codec)
    source = Source(str(tmp_path / "a"), None, partition_bytes=720)
    chunk = tmp_path / "a" / "c" / "1" / "0"
    chunk.write_bytes(chunk.read_bytes()[:100])
    plan = plan_lake(source, take_snapshot(source))
    with pytest.raises(InputError, match=r"rows 30 to 60: a chunk does not decode \(.*write it"):
        read_partition(source, plan.partitions[1], 6, "float32")
    chunk.write_bytes(b"")
    with pytest.raises(InputError, match="a/c/1/0: chunk of 0 bytes; write it again"):
        plan_lake(source, take_snapshot(source))


def test_unusable_arrays_are_refused(tmp_path: Path) -> None:
    write_group(
        tmp_path / "g",
        vectors=matrix(),
        short=np.arange(99),
        number=np.arange(100) / 7,
        words=np.array([["a", "b"]] * 100),
        waves=matrix().astype("complex64"),
        cube=np.ones((10, 2, 2)),
        none=np.ones((0, 4)),
    )
    path = str(tmp_path / "g")
    for source, match in [
        (Source(path, "vector"), r"array 'vector' does not exist; the nearest are vectors"),
        (Source(path, "vectors", id="q"), r"'q' does not exist; the nearest are cube, none, num"),
        (Source(path, None), r"is a Zarr group \(cube, .*\); name one array in input.vector"),
        (Source(path, ("vectors",)), r"needs one array in input.vector, not a list"),
        (Source(path, "number"), r"array 'number' has shape \(100,\), needs rows and columns"),
        (Source(path, "cube"), r"'cube' has shape \(10, 2, 2\), needs rows and columns"),
        (Source(path, "words"), r"array 'words' is <U1; vectors must be integers or floats"),
        (Source(path, "waves"), r"array 'waves' is complex64; vectors must be integers or floats"),
        (Source(path, "none"), r"array 'none' has shape \(0, 4\); nothing to map"),
        (Source(path, "vectors", id="short"), r"'short' has shape \(99,\), needs \(100,\)"),
        (Source(path, "vectors", label="vectors"), r"'vectors' has shape \(100, 6\), needs \(100"),
        (Source(path, "vectors", holdout="number"), r"'number' is float64; it must be boolean"),
        (Source(f"{path}/vectors", "v", "id"), r"is one Zarr array, names .* nothing \(v, id\)"),
    ]:
        with pytest.raises(InputError, match=match):
            plan_lake(source, take_snapshot(source))


def test_unusable_id_types_are_refused(tmp_path: Path) -> None:
    write_group(tmp_path / "g", vec=matrix(), key=np.ones(100, "complex64"))
    source = Source(str(tmp_path / "g"), "vec", "key")
    with pytest.raises(InputError, match="array 'key' is complex64; id and label must be numbers"):
        plan_lake(source, take_snapshot(source))


@pytest.mark.parametrize("text", ["{", json.dumps({"zarr_format": 3, "node_type": "array"})])
def test_metadata_that_does_not_decode_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "zarr.json").write_text(text)
    source = Source(str(tmp_path), None)
    with pytest.raises(InputError, match="Zarr metadata does not decode"):
        plan_lake(source, take_snapshot(source))


def test_errors_of_the_store_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_array(tmp_path / "a", matrix(), (30, 6))
    source = Source(str(tmp_path / "a"), None)
    snapshot = take_snapshot(source)

    def refuse(*_: Any, **__: Any) -> None:
        raise obstore.exceptions.PermissionDeniedError("denied\n\nDebug source: much more")

    monkeypatch.setattr(zarr, "open", refuse)
    with pytest.raises(StoreError, match=r"a: permission denied[^\n]*\Z"):
        plan_lake(source, snapshot)

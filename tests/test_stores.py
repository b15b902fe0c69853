import multiprocessing
import os
import pickle
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nst
from numpy.typing import NDArray

from pipeline import stores
from pipeline.errors import StoreError
from pipeline.stores import (
    BlockArrays,
    Folder,
    checksum,
    decode_table,
    encode_arrays,
    encode_table,
    put_all,
    read_checked,
)
from tests.faults import DAMAGES

DTYPES = ["float16", "float32", "float64", "int64", "uint8", "uint32"]


def write_block(folder: Folder, arrays: Mapping[str, NDArray[Any]]) -> BlockArrays:
    """The arrays, read back from the folder they were just written to."""
    objects = {f"arrays/{name}": data for name, data in encode_arrays(arrays).items()}
    put_all(folder, objects)
    sizes = {name: len(data) for name, data in objects.items()}
    return BlockArrays(folder, sizes, {name: crc32(data) for name, data in objects.items()})


# The folder's contract, kept by every kind of store.


def test_an_object_comes_back_as_it_was_put(folder: Folder) -> None:
    data = bytes(range(256)) * 1000
    folder.put("deep/er/object", data)
    assert folder.get("deep/er/object") == folder.find("deep/er/object") == data
    assert folder.join("deep").get("er/object") == data
    folder.put("deep/er/object", b"")
    assert folder.get("deep/er/object") == b""


def test_an_object_that_is_not_there(folder: Folder) -> None:
    assert folder.find("none") is None
    with pytest.raises(FileNotFoundError, match="none"):
        folder.get("none")
    folder.delete("none")
    folder.put("some/thing", b"1")
    assert folder.find("some") is None


def test_create_never_replaces(folder: Folder) -> None:
    assert folder.create("deep/object", b"first")
    assert not folder.create("deep/object", b"second")
    assert folder.get("deep/object") == b"first"
    folder.delete("deep/object")
    assert folder.create("deep/object", b"third")


def test_when_an_object_was_written(folder: Folder) -> None:
    before = time.time()
    folder.put("object", b"1")
    assert before - 2 <= folder.changed("object") <= time.time() + 2  # some tell whole seconds
    with pytest.raises(FileNotFoundError, match="none"):
        folder.changed("none")


def test_the_list_holds_sizes_by_key(folder: Folder) -> None:
    assert folder.list() == {}
    for key, data in {"a/1": b"x", "a/b/2": b"yy", "ab/3": b"", "4": b"zzzz"}.items():
        folder.put(key, data)
    assert folder.list() == {"a/1": 1, "a/b/2": 2, "ab/3": 0, "4": 4}
    assert folder.list("a") == {"a/1": 1, "a/b/2": 2}
    assert folder.join("a").list() == {"1": 1, "b/2": 2}
    assert folder.list("none") == {}


def test_a_deleted_object_is_gone(folder: Folder) -> None:
    folder.put("a/1", b"x")
    folder.put("a/2", b"y")
    folder.delete("a/1")
    assert folder.list() == {"a/2": 1}


def test_a_copy_outlives_its_original(folder: Folder) -> None:
    target = folder.join("elsewhere")
    folder.put("a/1", b"first")
    folder.copy_to("a/1", target, "b/2")
    folder.put("a/1", b"second")
    folder.delete("a/1")
    assert target.get("b/2") == b"first"
    folder.put("a/1", b"third")
    folder.copy_to("a/1", target, "b/2")
    assert target.get("b/2") == b"third"


def test_one_of_eight_threads_creates(folder: Folder) -> None:
    start = Barrier(8)

    def race(writer: int) -> list[bool]:
        won = []
        for turn in range(20):
            start.wait()
            won.append(folder.create(f"turn/{turn}", bytes([writer]) * 5000))
        return won

    with ThreadPoolExecutor(8) as pool:
        won = np.array(list(pool.map(race, range(8))))
    assert won.sum(axis=0).tolist() == [1] * 20
    for turn, winner in enumerate(won.argmax(axis=0).tolist()):
        assert folder.get(f"turn/{turn}") == bytes([winner]) * 5000


def race_in_process(folder: Folder, writer: int, n_turns: int) -> list[bool]:
    """Which turns this process won; both processes take each turn at nearly the same time."""
    folder.put(f"ready/{writer}", b"")
    while len(folder.list("ready")) < 2:
        pass
    return [folder.create(f"turn/{turn}", bytes([writer])) for turn in range(n_turns)]


def test_one_of_two_processes_creates(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        races = [pool.submit(race_in_process, folder, writer, 300) for writer in range(2)]
        won = np.array([race.result() for race in races])
    assert won.sum(axis=0).tolist() == [1] * 300
    winners = won.argmax(axis=0).tolist()
    assert [folder.get(f"turn/{turn}")[0] for turn in range(300)] == winners


def test_folders_travel_and_compare_by_url(folder: Folder) -> None:
    folder.put("a", b"1")
    assert pickle.loads(pickle.dumps(folder)) == folder
    assert pickle.loads(pickle.dumps(folder)).get("a") == b"1"
    assert len({folder, Folder(folder.url)}) == 1
    assert Folder("s3://bucket/").join("a").url == "s3://bucket/a"


def test_a_path_and_its_url_are_the_same_place(tmp_path: Path) -> None:
    Folder(str(tmp_path)).put("a", b"1")
    assert Folder(f"file://{tmp_path}").get("a") == b"1"
    assert (tmp_path / "a").read_bytes() == b"1"


def test_a_relative_path_starts_where_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Folder("maps").put("a", b"1")
    assert (tmp_path / "maps" / "a").read_bytes() == b"1"


def do_put(folder: Folder) -> None:
    folder.put("object", b"1")


def do_create(folder: Folder) -> None:
    folder.create("object", b"1")


def do_copy(folder: Folder) -> None:
    place = Folder(folder.url.rsplit("/", 1)[0])
    place.put("source", b"1")
    place.copy_to("source", folder, "object")


@pytest.mark.parametrize("act", [do_put, do_create, do_copy])
def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, act: Callable[[Folder], None]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="check path, rights and space") as caught:
        act(Folder(str(tmp_path / "file")))
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}/file/object: ")
    assert len(line.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_rights_is_named(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(StoreError, match=r"ermission denied.*check path, rights and space"):
        Folder(str(tmp_path / "locked")).put("object", b"1")


def test_an_unknown_kind_of_store_is_named() -> None:
    with pytest.raises(
        StoreError, match=r"^nowhere://bucket/maps/object: .*; check address"
    ) as caught:
        Folder("nowhere://bucket/maps").find("object")
    assert len(str(caught.value).splitlines()) == 1


# Arrays and tables.


@given(
    array=st.sampled_from(DTYPES).flatmap(
        lambda dtype: nst.arrays(dtype, nst.array_shapes(max_dims=3, min_side=0, max_side=9))
    ),
    chunk_bytes=st.sampled_from([1, 24, 100, 4 << 20]),
    bounds=st.tuples(st.integers(0, 10), st.integers(0, 10)).map(sorted),
)
def test_arrays_come_back_by_any_range_of_rows(
    array: NDArray[Any], chunk_bytes: int, bounds: list[int]
) -> None:
    start, stop = bounds
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "CHUNK_BYTES", chunk_bytes)
        block = write_block(Folder(place), {"other": np.ones(3), "array": array})
        for wanted, found in [
            (array, block.read("array")),
            (array[start:stop], block.read("array", start, stop)),
            (array[start:], block.read("array", start)),
        ]:
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_array_equal(found, wanted)


def test_a_range_of_rows_reads_its_chunks_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "CHUNK_BYTES", 80)
    block = write_block(Folder(str(tmp_path)), {"a": np.arange(45)})
    assert len(list((tmp_path / "arrays/a/c").iterdir())) == 5  # of nine values each
    for chunk in (0, 1, 4):
        (tmp_path / f"arrays/a/c/{chunk}").unlink()
    assert block.read("a", 18, 36).tolist() == list(range(18, 36))
    with pytest.raises(StoreError, match=r"arrays/a/c/1 is damaged: it is missing"):
        block.read("a", 17, 36)
    with pytest.raises(StoreError, match=r"arrays/a/c/4 is damaged: it is missing"):
        block.read("a", 18, 37)


def test_arrays_whose_names_begin_alike(tmp_path: Path) -> None:
    arrays = {"id": np.arange(3), "ids": np.arange(5), "i": np.arange(7)}
    block = write_block(Folder(str(tmp_path)), arrays)
    assert {name: len(block.read(name)) for name in arrays} == {"id": 3, "ids": 5, "i": 7}


def test_any_zarr_reader_can_read_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "CHUNK_BYTES", 64)
    array = np.arange(60, dtype=np.float32).reshape(20, 3)
    write_block(Folder(str(tmp_path)), {"a": array, "b": np.arange(3)})
    group = zarr.open_group(tmp_path / "arrays", mode="r")
    np.testing.assert_array_equal(np.asarray(group["a"]), array)
    assert np.isnan(group["a"].fill_value)  # type: ignore[union-attr]
    assert group["b"].fill_value == -1  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["a/c/1/0", "a/zarr.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], name: str
) -> None:
    monkeypatch.setattr(stores, "CHUNK_BYTES", 48)
    folder = Folder(f"{tmp_path}/stores/toy/0a1b/data/000000-2c3d")
    block = write_block(folder, {"a": np.arange(12).reshape(6, 2)})
    damage(Path(folder.url) / "arrays" / name)
    remedy = f"; remove {tmp_path}/stores/toy/0a1b and run again"
    with pytest.raises(StoreError, match=re.escape(remedy)) as caught:
        block.read("a")
    line = str(caught.value)
    assert line.startswith(f"{folder.url}/arrays/{name} is damaged: ")
    assert len(line.splitlines()) == 1


@given(flip=st.integers(0, 10**9), byte=st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(flip: int, byte: int) -> None:
    with TemporaryDirectory() as place:
        block = write_block(Folder(place), {"a": np.arange(6)})
        path = [Path(place, "arrays/a/c/0"), Path(place, "arrays/a/zarr.json")][flip % 2]
        data = bytearray(path.read_bytes())
        data[flip // 2 % len(data)] ^= byte
        path.write_bytes(data)
        with pytest.raises(StoreError, match="is damaged: its checksum differs"):
            block.read("a")


def test_what_is_wrong_with_an_object_is_said(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.put("object", b"12345")
    assert read_checked(folder, "object", 5, crc32(b"12345")) == b"12345"
    with pytest.raises(StoreError, match="object is damaged: it has 5 bytes, its commit says 6;"):
        read_checked(folder, "object", 6, crc32(b"12345"))
    with pytest.raises(StoreError, match="object is damaged: its checksum differs from its"):
        read_checked(folder, "object", 5, 0)
    with pytest.raises(StoreError, match="none is damaged: it is missing;"):
        read_checked(folder, "none", 5, 0)


def encode_both() -> dict[str, bytes]:
    rng = np.random.default_rng(7)
    arrays = {"b": rng.random((300, 5)), "a": rng.integers(0, 9, 1000)}
    table = pa.table({"id": np.arange(1000), "text": [f"row {row}" for row in range(1000)]})
    return encode_arrays(arrays) | {"table": encode_table(table)}


def test_equal_data_give_equal_bytes() -> None:
    first = encode_both()
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        elsewhere = pool.submit(encode_both).result()
    assert first == encode_both() == elsewhere
    turned = np.asfortranarray(np.arange(12).reshape(3, 4))
    assert encode_arrays({"a": turned}) == encode_arrays({"a": np.ascontiguousarray(turned)})


def test_the_checksum_tells_names_and_bytes_apart() -> None:
    assert checksum({"a": b"1", "b": b"2"}) == checksum({"b": b"2", "a": b"1"})
    different: list[dict[str, bytes]] = [
        {},
        {"a": b""},
        {"a": b"1"},
        {"a": b"12"},
        {"a": b"1", "b": b"2"},
        {"a": b"2", "b": b"1"},
        {"ab": b"12"},
    ]
    assert len({checksum(objects) for objects in different}) == len(different)


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1) | st.none()),
    width=st.integers(0, 4),
)
def test_tables_come_back(ids: list[int | None], width: int) -> None:
    vector = pa.list_(pa.float32(), width) if width else pa.list_(pa.float32())
    table = pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "text": pa.array([None if row is None else f"é {row}" for row in ids], pa.string()),
            "vector": pa.array([[0.5] * width for _ in ids], vector),
        }
    )
    found = decode_table(encode_table(table))
    assert found.equals(table)
    assert found.schema == table.schema
    assert decode_table(encode_table(table), ["text"]).equals(table.select(["text"]))

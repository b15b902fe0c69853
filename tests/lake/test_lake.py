"""The lake's files: what a snapshot holds, how a change is noticed, and what is refused."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import InputError, StoreError
from pipeline.lake import InputFile, Snapshot, Source, plan_lake, take_snapshot
from pipeline.lake import files as lake_files
from pipeline.lake.files import open_root, store_errors
from pipeline.stores import Folder


def write(path: Path, n_rows: int = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = pa.array(np.ones(2 * n_rows, "float32"))
    pq.write_table(pa.table({"v": pa.FixedSizeListArray.from_arrays(values, 2)}), path)


def test_a_snapshot_lists_files_by_path(tmp_path: Path) -> None:
    for name in ("b/x.parquet", "a.parquet", "b/c d/é%20.parquet"):
        write(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not of the lake")
    snapshot = take_snapshot(Source(str(tmp_path), "v"))
    assert [f.path for f in snapshot.files] == ["a.parquet", "b/c d/é%20.parquet", "b/x.parquet"]
    assert snapshot.n_bytes == sum(p.stat().st_size for p in tmp_path.rglob("*.parquet"))
    assert snapshot == take_snapshot(Source(f"{tmp_path}/", "v"))
    assert snapshot == take_snapshot(Source(tmp_path.as_uri(), "v"))
    assert plan_lake(Source(str(tmp_path), "v"), snapshot).n_rows == 9


def test_the_digest_covers_path_size_and_etag() -> None:
    files = [("a", 1, "x"), ("b", 1, "x"), ("a", 2, "x"), ("a", 1, "y")]
    digests = {Snapshot((InputFile(*file),)).digest for file in files}
    assert len(digests) == 4
    assert Snapshot((InputFile("a", 1, "x"),)).digest in digests
    assert all(len(digest) == 64 for digest in digests)


def test_a_path_without_a_lake_is_refused(tmp_path: Path) -> None:
    for path in (f"{tmp_path}/none", f"file://{tmp_path}/none", f"{tmp_path}/a.txt/none"):
        (tmp_path / "a.txt").write_text("no folder")
        with pytest.raises(InputError, match=r"none: no such file or folder; check input.path"):
            take_snapshot(Source(path, "v"))
    with pytest.raises(InputError, match=r"1 files, none of them .parquet and no Zarr .*a.txt"):
        take_snapshot(Source(str(tmp_path), "v"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: no files there \(an empty folder"):
        take_snapshot(Source(f"{tmp_path}/empty", "v"))


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may read anything, so it becomes nobody for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_one_may_not_read_is_a_store_error(tmp_path: Path) -> None:
    write(tmp_path / "lake" / "sub" / "a.parquet")
    (tmp_path / "lake" / "sub").chmod(0)
    with (
        pytest.raises(StoreError, match=r"[Pp]ermission denied.*; check address, cred.*\Z"),
        without_rights(),
    ):
        take_snapshot(Source(str(tmp_path / "lake"), "v"))
    (tmp_path / "lake" / "sub").chmod(0o700)


def test_an_address_no_store_has_is_a_store_error() -> None:
    with pytest.raises(StoreError, match=r'^input zz://a/b: .* recognise URL "zz://a/b"; .*\Z'):
        take_snapshot(Source("zz://a/b", "v"))


def test_errors_of_the_store_keep_their_first_line() -> None:
    with (
        pytest.raises(StoreError, match=r"^here: one; check address[^\n]*\Z"),
        store_errors("here"),
    ):
        raise obstore.exceptions.GenericError("one: <?xml?>\n\nDebug source: two")
    with pytest.raises(InputError, match="here: file vanished"), store_errors("here"):
        raise FileNotFoundError("gone")


def test_a_remote_name_in_parquet_is_a_file_or_a_folder(bucket: Folder, tmp_path: Path) -> None:
    write(tmp_path / "lake.parquet")
    data = (tmp_path / "lake.parquet").read_bytes()
    bucket.put("one.parquet", data)
    bucket.put("spark.parquet/part.parquet", data)
    file = Source(f"{bucket.url}/one.parquet", "v")
    folder = Source(f"{bucket.url}/spark.parquet", "v")
    assert open_root(file.path).only == "one.parquet"
    assert [f.path for f in take_snapshot(file).files] == ["one.parquet"]
    assert [f.path for f in take_snapshot(folder).files] == ["part.parquet"]
    assert plan_lake(file, take_snapshot(file)).n_rows == 3
    assert plan_lake(folder, take_snapshot(folder)).n_rows == 3
    with pytest.raises(InputError, match=r"s3://.*/none: no files there"):
        take_snapshot(Source(f"{bucket.url}/none", "v"))


def test_a_store_without_etags_is_watched_by_time() -> None:
    store = obstore.store.MemoryStore()
    obstore.put(store, "a", b"1")
    meta = obstore.head(store, "a")
    found = lake_files._input_file({**meta, "e_tag": None})
    assert found == InputFile("a", 1, str(int(meta["last_modified"].timestamp())))

"""Bucket files: what comes back, what is read, what is noticed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import DamagedError
from pipeline.stores import (
    BUCKET_FILE,
    BUCKET_INDEX,
    BucketIndex,
    Buckets,
    Folder,
    decode_index,
    encode_buckets,
    put_all,
    read_bucket,
)


def make_buckets() -> Buckets:
    """Four buckets of 3, 0, 5 and 2 rows, in arrays of several types and shapes."""
    rng = np.random.default_rng(3)
    arrays: dict[str, NDArray[Any]] = {
        "rows": np.arange(10) + 2**40,
        "vectors": rng.integers(0, 255, (10, 7)).astype(np.uint8),
        "values": rng.random((10, 2, 3)).astype(np.float16),
    }
    return Buckets(np.array([0, 3, 3, 8, 10]), arrays)


def put_buckets(folder: Folder) -> BucketIndex:
    objects = encode_buckets(make_buckets())
    put_all(folder, objects)
    return decode_index(objects[BUCKET_INDEX])


def test_buckets_come_back(folder: Folder) -> None:
    index, buckets = put_buckets(folder), make_buckets()
    assert index.n_rows == [3, 0, 5, 2]
    for bucket, (start, stop) in enumerate(pairwise(buckets.starts)):
        found = read_bucket(folder, index, bucket)
        assert list(found) == list(buckets.arrays)
        for name, array in buckets.arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array[start:stop])


def test_a_bucket_is_one_range_of_bytes(tmp_path: Path) -> None:
    """What lies in the other buckets is neither read nor checked."""
    folder = Folder(str(tmp_path))
    index = put_buckets(folder)
    path = tmp_path / BUCKET_FILE
    data = bytearray(path.read_bytes())
    data[index.offsets[2]] ^= 1
    path.write_bytes(data)
    for bucket in (0, 1, 3):
        read_bucket(folder, index, bucket)
    with pytest.raises(DamagedError, match=r"buckets.bin is damaged: bucket 2 differs"):
        read_bucket(folder, index, 2)


@pytest.mark.parametrize("size", [0, 10, 100])
def test_a_cut_bucket_file_is_named(folder: Folder, size: int) -> None:
    index = put_buckets(folder)
    folder.put(BUCKET_FILE, folder.get(BUCKET_FILE)[:size])
    with pytest.raises(DamagedError, match=r"buckets.bin is damaged: bucket 3 differs") as caught:
        read_bucket(folder, index, 3)
    assert caught.value.partition_url == folder.url
    folder.delete(BUCKET_FILE)
    with pytest.raises(DamagedError, match=r"buckets.bin is damaged: it is missing"):
        read_bucket(folder, index, 3)


def test_a_range_of_bytes(folder: Folder) -> None:
    folder.put("object", b"0123456789")
    assert folder.get_range("object", 2, 5) == b"234"
    assert folder.get_range("object", 8, 20) == b"89"
    assert folder.get_range("object", 15, 20) == b""
    with pytest.raises(FileNotFoundError, match="none"):
        folder.get_range("none", 0, 3)

"""Folders in object stores (a local disk is one), and blocks of arrays and tables inside them.

Everything goes through obstore, so a local path, s3://, gs:// and az:// behave alike: puts are
atomic, `create` is a conditional put, nothing is ever renamed.
"""

import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import zarr
from numpy.typing import NDArray
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.core.buffer import Buffer, cpu
from zarr.storage import MemoryStore

from pipeline.errors import DamagedError, StoreError
from pipeline.remote import connect, explain, is_remote

# Arrays are cut into chunks of about this size: small enough to read a slice of a bucket
# without the whole block, large enough to keep the number of objects low.
CHUNK_BYTES = 4 << 20

Arrays = Mapping[str, NDArray[Any]]


class Entry(NamedTuple):
    """An object: its key, its size, the time of its last change in seconds since 1970."""

    key: str
    n_bytes: int
    changed: float


@dataclass(frozen=True)
class Folder:
    """A place under which objects have keys; picklable, opened once per process."""

    url: str

    def join(self, name: str) -> "Folder":
        """The folder of that name inside this one."""
        return Folder(f"{self.url.rstrip('/')}/{name}")

    def put(self, key: str, data: bytes) -> None:
        """Write the whole object in one request, replacing an older one.

        Not in parts: parts of an upload that failed would stay, unseen and paid for.
        """
        store, path = self._locate(key)
        with _explained(self, key), _bucket_expected(self):
            obstore.put(store, path, data, use_multipart=False)

    def create(self, key: str, data: bytes) -> bool:
        """True if the object did not exist and is now there; False if it was there already."""
        store, path = self._locate(key)
        with _explained(self, key), _bucket_expected(self):
            try:
                obstore.put(store, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def get(self, key: str) -> bytes:
        """The object's bytes; FileNotFoundError when there is none."""
        store, path = self._locate(key)
        with _explained(self, key):
            return bytes(obstore.get(store, path).bytes())

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes start..stop of the object, fewer where it ends; FileNotFoundError if none."""
        store, path = self._locate(key)
        with _explained(self, key):
            try:
                return bytes(obstore.get_range(store, path, start=start, end=stop))
            except BaseError:
                if obstore.head(store, path)["size"] > start:
                    raise
                return b""

    def find(self, key: str) -> bytes | None:
        """The object's bytes, or None when there is none."""
        try:
            return self.get(key)
        except FileNotFoundError:
            return None

    def changed(self, key: str) -> float:
        """When the object was last written, in seconds since 1970; FileNotFoundError if none."""
        store, path = self._locate(key)
        with _explained(self, key):
            return float(obstore.head(store, path)["last_modified"].timestamp())

    def list(self, prefix: str = "") -> dict[str, int]:
        """Size of every object below the prefix, by key relative to this folder."""
        return {entry.key: entry.n_bytes for entry in self.entries(prefix)}

    def entries(self, prefix: str = "") -> Iterator["Entry"]:
        """Every object below the prefix, as the store tells of them."""
        store, path = self._locate(prefix)
        root = len(self._locate("")[1])
        with _explained(self, prefix):
            for page in obstore.list(store, path):
                for meta in page:
                    key = meta["path"][root:].lstrip("/")
                    yield Entry(key, meta["size"], meta["last_modified"].timestamp())

    def folders(self, prefix: str = "") -> tuple[str, ...]:
        """Names of the folders right below the prefix."""
        store, path = self._locate(prefix)
        with _explained(self, prefix):
            found = obstore.list_with_delimiter(store, path)["common_prefixes"]
        return tuple(sorted(place.rstrip("/").rpartition("/")[2] for place in found))

    def copy_to(self, key: str, target: "Folder", target_key: str) -> None:
        """Copy an object inside the same store: a hard link on disk, server-side elsewhere."""
        store, path = self._locate(key)
        with _explained(target, target_key):
            obstore.copy(store, path, target._locate(target_key)[1])

    def delete(self, key: str) -> None:
        """Remove one object; one that is not there is no error."""
        store, path = self._locate(key)
        with _explained(self, key):
            try:
                obstore.delete(store, path)
            except FileNotFoundError:
                return

    def _locate(self, key: str) -> tuple[Any, str]:
        root, prefix = _split_url(self.url)
        path = f"{prefix}/{key}" if key else prefix
        with _explained(self, key):
            return _local_store() if root == "/" else connect(root), path.strip("/")


def _split_url(url: str) -> tuple[str, str]:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        return "/", str(Path(rest if separator else url).absolute())
    bucket, _, prefix = rest.partition("/")
    return f"{scheme}://{bucket}", prefix


@lru_cache(maxsize=1)
def _local_store() -> LocalStore:
    return LocalStore("/")


@contextmanager
def _explained(folder: Folder, key: str) -> Iterator[None]:
    """Turn the store's own errors into one line that names the object."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        hint = "address and credentials" if is_remote(folder.url) else "path, rights and space"
        raise StoreError(f"{folder.url}/{key}: {explain(error)}; check {hint}") from error


@contextmanager
def _bucket_expected(folder: Folder) -> Iterator[None]:
    """What cannot be found when something is written is the bucket."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(f"{folder.url}: no such bucket; make it or correct the name") from error


def encode_arrays(arrays: Arrays) -> dict[str, bytes]:
    """Objects of a Zarr 3 group that holds the arrays, by name; every chunk ends in a CRC32C."""
    objects: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(objects), zarr_format=3)
    for name, array in arrays.items():
        # Chunks of equal size: the last one is stored whole, its empty part included.
        n_chunks = max(1, -(-array.nbytes // CHUNK_BYTES))
        rows = max(1, -(-len(array) // n_chunks))
        group.create_array(
            name,
            data=np.ascontiguousarray(array),
            chunks=(rows, *array.shape[1:]),
            # Thrice as fast as zstd, and smaller where bytes are shuffled by their place.
            compressors=[BloscCodec(cname="lz4", clevel=1, shuffle="shuffle"), Crc32cCodec()],
            fill_value=_fill_value(array.dtype),
            config={"write_empty_chunks": True},
        )
    return {key: bytes(value.to_bytes()) for key, value in sorted(objects.items())}


def _fill_value(dtype: np.dtype[Any]) -> Any:
    """A value no stage writes, so that a lost chunk cannot pass for data (uint8 has none)."""
    if dtype.kind == "f":
        return np.nan
    return -1 if dtype.kind == "i" else 0


def encode_table(table: pa.Table) -> bytes:
    """The table as one Parquet file, zstd-compressed."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=1 << 20)
    return sink.getvalue()


def decode_table(data: bytes, columns: list[str] | None = None) -> pa.Table:
    """The table of a Parquet file; single-threaded, as every task is."""
    return pq.read_table(io.BytesIO(data), columns=columns, use_threads=False)


def checksum(objects: Mapping[str, bytes]) -> str:
    """SHA-256 over names and bytes of the objects, in order of name."""
    digest = hashlib.sha256()
    for name in sorted(objects):
        digest.update(f"{name}\0{len(objects[name])}\0".encode())
        digest.update(objects[name])
    return digest.hexdigest()


class BlockArrays:
    """The arrays of one committed block, each readable by a range of rows.

    `sizes` and `crcs` are what the commit says of every object of the block.
    """

    def __init__(self, folder: Folder, sizes: Mapping[str, int], crcs: Mapping[str, int]) -> None:
        self._folder = folder
        self._sizes = sizes
        self._crcs = crcs

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Rows start..stop of the array; a damaged or missing object is named."""
        chunk_rows, n_rows = self._shape(name)
        stop = n_rows if stop is None else min(stop, n_rows)
        wanted = [
            key
            for key in self._sizes
            if key.startswith(f"arrays/{name}/c/")
            and _overlaps(_chunk_index(key, name) * chunk_rows, chunk_rows, start, stop)
        ]
        held = {key: self._load(key) for key in [*wanted, f"arrays/{name}/zarr.json"]}
        return np.asarray(_open_array(name, held)[start:stop])

    def _shape(self, name: str) -> tuple[int, int]:
        key = f"arrays/{name}/zarr.json"
        array = _open_array(name, {key: self._load(key)})
        return array.chunks[0], array.shape[0]

    def _load(self, key: str) -> bytes:
        return read_checked(self._folder, key, self._sizes[key], self._crcs[key])


def _open_array(name: str, held: Mapping[str, bytes]) -> Any:
    buffers: dict[str, Buffer] = {key: cpu.Buffer.from_bytes(data) for key, data in held.items()}
    return zarr.open_array(MemoryStore(buffers), path=f"arrays/{name}", mode="r")


def _chunk_index(key: str, name: str) -> int:
    """Position of the chunk along the rows: arrays/<name>/c/<position>/..."""
    return int(key.removeprefix(f"arrays/{name}/c/").split("/")[0])


def _overlaps(chunk_start: int, chunk_rows: int, start: int, stop: int) -> bool:
    return chunk_start < stop and chunk_start + chunk_rows > start


def read_checked(folder: Folder, key: str, size: int, crc: int) -> bytes:
    """The object's bytes, which must be there and be those that were committed."""
    data = folder.find(key)
    if data is None:
        raise _damaged(folder, key, "it is missing")
    if len(data) != size:
        raise _damaged(folder, key, f"it has {len(data)} bytes, its commit says {size}")
    if zlib.crc32(data) != crc:
        raise _damaged(folder, key, "its checksum differs from its commit's")
    return data


def _damaged(folder: Folder, key: str, what: str) -> DamagedError:
    store = folder.url.split("/data/")[0]
    message = f"{folder.url}/{key} is damaged: {what}; remove {store} and run again"
    return DamagedError(message, folder.url)


class Buckets(NamedTuple):
    """Rows on their way to other partitions: arrays sorted by bucket, and where each one starts.

    A shuffle is one bucket file per task that writes; each task that reads takes its bucket, one
    range of bytes, out of every file. Files grow with the partitions, not with their square.
    """

    starts: NDArray[np.int64]  # (n_buckets + 1,)
    arrays: Arrays  # each with starts[-1] rows


class BucketIndex(NamedTuple):
    """Where the buckets of a file lie: rows, bytes and CRC32 of each, and the arrays' types."""

    types: list[tuple[str, str, list[int]]]  # name, dtype, shape of one row
    n_rows: list[int]
    offsets: list[int]  # n_buckets + 1
    crcs: list[int]


BUCKET_FILE, BUCKET_INDEX = "buckets.bin", "buckets.json"


def encode_buckets(buckets: Buckets) -> dict[str, bytes]:
    """The bucket file and its index; values are raw, so that a bucket is one range of bytes."""
    arrays = {name: np.ascontiguousarray(array) for name, array in buckets.arrays.items()}
    bounds = buckets.starts.tolist()
    parts = [
        b"".join(array[start:stop].tobytes() for array in arrays.values())
        for start, stop in pairwise(bounds)
    ]
    offsets = np.cumsum([0, *map(len, parts)]).tolist()
    types = [(name, array.dtype.str, list(array.shape[1:])) for name, array in arrays.items()]
    sizes = np.diff(buckets.starts).tolist()
    index = BucketIndex(types, sizes, offsets, [zlib.crc32(part) for part in parts])
    return {BUCKET_FILE: b"".join(parts), BUCKET_INDEX: json.dumps(index._asdict()).encode()}


def decode_index(data: bytes) -> BucketIndex:
    """The index of a bucket file."""
    return BucketIndex(**json.loads(data))


def read_bucket(folder: Folder, index: BucketIndex, bucket: int) -> dict[str, NDArray[Any]]:
    """The bucket's rows of every array; a file damaged there, cut or missing is named."""
    start, stop = index.offsets[bucket : bucket + 2]
    try:
        data = folder.get_range(BUCKET_FILE, start, stop) if stop > start else b""
    except FileNotFoundError:
        raise _damaged(folder, BUCKET_FILE, "it is missing") from None
    if len(data) != stop - start or zlib.crc32(data) != index.crcs[bucket]:
        what = f"bucket {bucket} differs from its checksum"
        raise _damaged(folder, BUCKET_FILE, what)
    arrays, at, n_rows = {}, 0, index.n_rows[bucket]
    for name, dtype, shape in index.types:
        count = n_rows * int(np.prod(shape))
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(n_rows, *shape)
        at += arrays[name].nbytes
    return arrays


def put_all(folder: Folder, objects: Mapping[str, bytes]) -> None:
    """Write the objects, several at a time."""
    if len(objects) == 1:
        folder.put(*next(iter(objects.items())))
        return
    with ThreadPoolExecutor(min(8, max(1, len(objects)))) as pool:
        list(pool.map(lambda item: folder.put(*item), objects.items()))

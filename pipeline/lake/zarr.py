"""A lake in a Zarr store: one 2-D array, alone or in a group with 1-D arrays beside it."""

import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import zarr
from zarr.storage import ObjectStore

from pipeline.errors import InputError
from pipeline.lake.files import (
    ZARR_MARKERS,
    InputFile,
    Root,
    Snapshot,
    Source,
    open_root,
    store_errors,
)
from pipeline.lake.rows import STORED_DTYPES, Block, LakePlan, Matrix
from pipeline.partitions import Partition, Piece, split_rows
from pipeline.remote import explain

BLOCK_BYTES = 16 << 20  # vectors decoded at once, unless one chunk is larger
METADATA = (*sorted(ZARR_MARKERS), ".zmetadata")

# What zarr and its codecs raise on metadata or chunks that they cannot decode.
DAMAGE = (ValueError, KeyError, TypeError, RuntimeError, EOFError, zlib.error)

Array = zarr.Array[Any]


class Arrays(NamedTuple):
    """The arrays of a source, all of the same length."""

    vector: Array
    id: Array | None
    label: Array | None
    holdout: Array | None
    passed: dict[str, Array]  # only handed on to the map

    @property
    def watched(self) -> list[Array]:
        """Those that the results depend on."""
        return [a for a in (self.vector, self.id, self.label, self.holdout) if a is not None]


@contextmanager
def decode_errors(what: str) -> Iterator[None]:
    """Nothing; what zarr cannot decode inside becomes an InputError that begins with `what`."""
    try:
        yield
    except (*DAMAGE, OSError) as error:
        # A codec may call damage an OSError too; one with a number comes from the system.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"{what} ({explain(error)}); write it again") from error


def open_arrays(root: Root, source: Source) -> Arrays:
    """The arrays the source names, opened and checked."""
    where = f"input {source.path}"
    if isinstance(source.vector, tuple):
        raise InputError(f"{where}: a Zarr store needs one array in input.vector, not a list")
    with store_errors(where), decode_errors(f"{where}: Zarr metadata does not decode"):
        node = zarr.open(ObjectStore(root.store, read_only=True), mode="r")
    if isinstance(node, zarr.Array):
        vector = _lone_array(where, source, node)
        arrays: list[Array | None] = [None, None, None]
        passed: dict[str, Array] = {}
    else:
        arrays = [_member(where, node, name) for name in (source.id, source.label, source.holdout)]
        vector = _vector_member(where, source, node)
        members = {name: _member(where, node, name) for name in source.passed}
        passed = {name: array for name, array in members.items() if array is not None}
    _check_vector(where, vector)
    for array in (*arrays, *passed.values()):
        if array is not None:
            _check_scalar(where, array, vector.shape[0])
    if arrays[2] is not None and arrays[2].dtype.kind not in "bui":
        raise InputError(
            f"{where}: holdout array {arrays[2].path!r} is {arrays[2].dtype}; "
            "it must be boolean, or integers 0 and 1"
        )
    return Arrays(vector, arrays[0], arrays[1], arrays[2], passed)


def _lone_array(where: str, source: Source, array: Array) -> Array:
    named = (source.vector, *source.beside)
    if any(name is not None for name in named):
        names = ", ".join(str(name) for name in named if name is not None)
        raise InputError(
            f"{where}: is one Zarr array, names inside it mean nothing ({names}); "
            "leave them out of input, or point input.path at the group"
        )
    return array


def _vector_member(where: str, source: Source, group: zarr.Group) -> Array:
    array = _member(where, group, _array_name(source) if source.vector else None)
    if array is None:
        names = ", ".join(sorted(group.array_keys())[:8])
        raise InputError(f"{where}: is a Zarr group ({names}); name one array in input.vector")
    return array


def _member(where: str, group: zarr.Group, name: str | None) -> Array | None:
    """The group's array of that name; None if no name is given."""
    if name is None:
        return None
    with store_errors(where), decode_errors(f"{where}: metadata of {name!r} does not decode"):
        node = group.get(name)
        names = [] if isinstance(node, zarr.Array) else sorted(group.array_keys())
    if isinstance(node, zarr.Array):
        return node
    near = get_close_matches(name, names, 3, 0.5) or names[:8]
    raise InputError(f"{where}: array {name!r} does not exist; the nearest are {', '.join(near)}")


def _check_vector(where: str, array: Array) -> None:
    if array.ndim != 2:
        raise InputError(
            f"{where}: array {array.path!r} has shape {array.shape}, needs rows and columns; "
            "name a 2-D array in input.vector"
        )
    if array.dtype.kind not in "uif":
        raise InputError(
            f"{where}: array {array.path!r} is {array.dtype}; vectors must be integers or floats"
        )
    if 0 in array.shape:
        raise InputError(f"{where}: array {array.path!r} has shape {array.shape}; nothing to map")


def _check_scalar(where: str, array: Array, n_rows: int) -> None:
    if array.shape != (n_rows,):
        raise InputError(
            f"{where}: array {array.path!r} has shape {array.shape}, needs ({n_rows},) "
            "to go with the vectors"
        )
    if array.dtype.kind not in "uifbUSTM":
        raise InputError(
            f"{where}: array {array.path!r} is {array.dtype}; "
            "id and label must be numbers, times or strings"
        )


def plan_zarr(source: Source, snapshot: Snapshot) -> LakePlan:
    """The partitions of a Zarr lake, cut at chunks or shards where one fits in a partition."""
    root = open_root(source.path)
    arrays = open_arrays(root, source)
    files = {file.path: file for file in snapshot.files}
    present = arrays.watched
    warnings = [text for array in present for text in _chunk_warnings(root, array, files)]
    n_rows, width = arrays.vector.shape
    name = np.dtype(arrays.vector.dtype).name
    dtype = name if name in STORED_DTYPES else "float32"
    vector_bytes = width * np.dtype(dtype).itemsize
    rows_per_part = max(1, source.partition_bytes // vector_bytes)
    outer, step = _row_steps(arrays.vector, rows_per_part)
    row_bytes = vector_bytes + sum(max(64, array.dtype.itemsize) for array in present[1:])
    if step == 1 and outer > 1:
        chunk_bytes = int(np.prod(arrays.vector.chunks)) * arrays.vector.dtype.itemsize
        row_bytes += -(-chunk_bytes // rows_per_part)
        warnings.append(
            f"input {source.path}: a chunk of {chunk_bytes >> 20} MiB exceeds "
            "input.partition_bytes, so several tasks decode it; smaller chunks are faster"
        )
    bounds = cut_rows(n_rows, outer, step, rows_per_part)
    partitions = [
        Partition(i, start, stop, (Piece(_array_name(source), -1, start, stop),))
        for i, (start, stop) in enumerate(bounds)
    ]
    return LakePlan(partitions, n_rows, width, dtype, len(files), row_bytes, tuple(warnings))


def _array_name(source: Source) -> str:
    """The array's path in its group, or the store's own name, for row names and messages."""
    return str(source.vector or source.path.rstrip("/").rpartition("/")[2])


def _row_steps(array: Array, rows_per_part: int) -> tuple[int, int]:
    """Rows no partition crosses the end of, and rows it is a multiple of.

    These are all rows and the shard if it fits; else the shard and the chunk; else the chunk and 1.
    """
    outer = array.shape[0]
    for unit in (array.shards, array.chunks):
        if unit is not None:
            rows = min(unit[0], array.shape[0])
            if rows <= rows_per_part:
                return outer, rows
            outer = rows
    return outer, 1


def cut_rows(n_rows: int, outer: int, step: int, rows_per_part: int) -> list[tuple[int, int]]:
    """Ranges that cover rows 0..n_rows in order: near-equal multiples of step inside each outer."""
    ranges = []
    for begin in range(0, n_rows, outer):
        end = min(begin + outer, n_rows)
        parts = split_rows(-(-(end - begin) // step), rows_per_part // step)
        ranges += [(begin + p.start * step, min(begin + p.stop * step, end)) for p in parts]
    return ranges


def chunk_keys(array: Array, start: int, stop: int) -> list[str]:
    """Keys of the objects (chunks, or shards) that hold the array's rows start..stop."""
    unit = array.shards or array.chunks
    grid = [range(-(-length // size)) for length, size in zip(array.shape, unit, strict=True)]
    grid[0] = range(start // unit[0], -(-stop // unit[0]))
    folder = f"{array.path}/" if array.path else ""
    return [folder + array.metadata.encode_chunk_key(cell) for cell in product(*grid)]


def _chunk_warnings(root: Root, array: Array, files: Mapping[str, InputFile]) -> list[str]:
    """A warning if chunks are absent; an InputError for an empty one.

    zarr reads an empty shard as fill without a word, and an empty Blosc chunk ends the process.
    """
    keys = chunk_keys(array, 0, array.shape[0])
    for key in keys:
        if key in files and files[key].size == 0:
            raise InputError(f"{root.name(key)}: chunk of 0 bytes; write it again")
    n_absent = sum(key not in files for key in keys)
    if not n_absent:
        return []
    return [
        f"input {root.address}: {n_absent} of {len(keys)} chunks of array {array.path!r} are "
        f"absent from the store and read as the fill value {array.fill_value}"
    ]


def zarr_mark(source: Source) -> str:
    """SHA-256 of all metadata that decide what chunks mean; the number of rows does not."""
    arrays = open_arrays(open_root(source.path), source)
    found = [dict(array.metadata.to_dict()) for array in arrays.watched]
    for metadata, array in zip(found, arrays.watched, strict=True):
        metadata |= {"shape": list(array.shape[1:]), "attributes": None}
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def piece_keys(source: Source, pieces: Iterable[Piece]) -> list[list[str]]:
    """For each piece the keys of the objects it lies in; a piece beyond the last row has none."""
    arrays = open_arrays(open_root(source.path), source)
    n_rows = arrays.vector.shape[0]
    return [
        [key for array in arrays.watched for key in chunk_keys(array, piece.start, piece.stop)]
        if piece.stop <= n_rows
        else []
        for piece in pieces
    ]


def zarr_files(root: Root, source: Source, partition: Partition) -> list[str]:
    """The metadata and chunks that the partition's rows depend on."""
    arrays = open_arrays(root, source)
    folders = {""} | {f"{array.path}/" for array in arrays.watched if array.path}
    metadata = [folder + name for folder in sorted(folders) for name in METADATA]
    return metadata + [
        key
        for piece in partition.pieces
        for array in arrays.watched
        for key in chunk_keys(array, piece.start, piece.stop)
    ]


def read_zarr(root: Root, source: Source, partition: Partition) -> Iterator[Block]:
    """The partition's rows in order, a few chunks at a time."""
    arrays = open_arrays(root, source)
    chunk = arrays.vector.chunks[0]
    row_bytes = arrays.vector.shape[1] * arrays.vector.dtype.itemsize
    step = max(chunk, BLOCK_BYTES // row_bytes // chunk * chunk)
    for piece in partition.pieces:
        # One chunk of ids may be as long as many chunks of vectors: decode it once.
        named = {"ids": arrays.id, "labels": arrays.label, "holdout": arrays.holdout}
        scalars = {n: _read_scalars(root, a, piece) for n, a in named.items() if a is not None}
        passed = {n: _read_scalars(root, array, piece) for n, array in arrays.passed.items()}
        for start in range(piece.start, piece.stop, step):
            stop = min(start + step, piece.stop)
            vectors = _read_rows(root, arrays.vector, start, stop)
            cut = slice(start - piece.start, stop - piece.start)
            yield Block(
                piece.path,
                start,
                vectors,
                passed={name: values[cut] for name, values in passed.items()},
                **{name: values[cut] for name, values in scalars.items()},
            )


def _read_rows(root: Root, array: Array, start: int, stop: int) -> Matrix:
    if stop > array.shape[0]:
        raise InputError(
            f"input {root.address}: array {array.path!r} has {array.shape[0]} rows, needs {stop}; "
            "the array changed, start a new run"
        )
    where = f"input {root.address}: array {array.path!r}, rows {start} to {stop}"
    with store_errors(where), decode_errors(f"{where}: a chunk does not decode"):
        return np.asarray(array[start:stop])


def _read_scalars(root: Root, array: Array, piece: Piece) -> pa.Array:
    """The piece's values of a 1-D array; all kinds of strings become Arrow strings."""
    values = _read_rows(root, array, piece.start, piece.stop)
    if values.dtype.kind == "S":
        values = np.strings.decode(values, "utf-8")
    if values.dtype.kind in "UT":
        return pa.array(values.astype(object), pa.string())
    return pa.array(values.astype(values.dtype.newbyteorder("=")))

"""A lake of Parquet files: footers to partitions, row groups to blocks of rows.

A task holds one batch of a row group at a time, never the row group; no row passes through Python.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import types

from pipeline.errors import InputError
from pipeline.lake.arrow import column_rows, list_rows, plain_array
from pipeline.lake.files import (
    N_THREADS,
    InputFile,
    Root,
    Snapshot,
    Source,
    open_root,
    store_errors,
)
from pipeline.lake.rows import Block, LakePlan, Like, Lost
from pipeline.lake.schema import (
    FileFacts,
    check_columns,
    column_types,
    hive_values,
    stored_dtype,
    vector_columns,
)
from pipeline.partitions import Partition, Piece, split_rows
from pipeline.remote import explain

BATCH_BYTES = 8 << 20  # vectors of one batch, counted as doubles
BUFFER_BYTES = 8 << 20  # read at once, over all columns; without it Arrow reads whole column chunks
READ_AHEAD_BYTES = 1 << 20
MAX_PIECES = 1024  # of one partition, so that a lake of tiny files keeps its plan and tasks small
MANY_PIECES = 8  # of one row group: each piece decodes the rows before it, worth a warning
SAMPLE_ROWS, SAMPLE_GROUPS = 256, 16  # looked at to find the width of list columns


class RangeFile:
    """One object as a readable, seekable file; small reads fetch READ_AHEAD_BYTES."""

    closed = False

    def __init__(self, store: Any, key: str, n_bytes: int) -> None:
        self._store, self._key, self._n_bytes = store, key, n_bytes
        self._at, self._start, self._block = 0, 0, memoryview(b"")

    def read(self, n_bytes: int = -1) -> memoryview:
        """The next n_bytes bytes, fewer at the end; all that are left if negative."""
        left = self._n_bytes - self._at
        n_bytes = left if n_bytes < 0 else min(n_bytes, left)
        ahead = self._at - self._start
        if n_bytes > 0 and not 0 <= ahead <= len(self._block) - n_bytes:
            self._fetch(min(left, max(n_bytes, READ_AHEAD_BYTES)))
            ahead = 0
        self._at += n_bytes
        return self._block[ahead : ahead + n_bytes]

    def _fetch(self, n_bytes: int) -> None:
        data = obstore.get_range(self._store, self._key, start=self._at, length=n_bytes)
        self._start, self._block = self._at, memoryview(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """The new position."""
        self._at = offset + (0, self._at, self._n_bytes)[whence]
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def close(self) -> None:
        """Nothing; the block read ahead is let go."""
        self.closed, self._block = True, memoryview(b"")


def open_file(root: Root, path: str, n_bytes: int | None) -> pa.NativeFile:
    """The file, opened for reading; n_bytes, if known, saves a request."""
    if root.folder is not None:
        return pa.OSFile(str(root.folder / path))  # not mapped: a file cut short would kill us
    if n_bytes is None:
        n_bytes = obstore.head(root.store, path)["size"]
    return pa.PythonFile(RangeFile(root.store, path, n_bytes), mode="r")


@contextmanager
def open_parquet(
    root: Root, path: str, n_bytes: int | None, n_columns: int = 1
) -> Iterator[pq.ParquetFile]:
    """The Parquet file, its footer read; an InputError if it is none."""
    where = root.name(path)
    buffer_bytes = max(BUFFER_BYTES // n_columns, 1 << 16)
    with store_errors(where), closing(open_file(root, path, n_bytes)) as file:
        with decode_errors(f"{where}: not a Parquet file, or one cut short"):
            parquet = pq.ParquetFile(
                file, pre_buffer=False, buffer_size=buffer_bytes, page_checksum_verification=True
            )
        yield parquet


@contextmanager
def decode_errors(what: str) -> Iterator[None]:
    """Nothing; what Arrow cannot decode inside becomes an InputError that begins with `what`."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        # Arrow also calls damage an OSError; one with a number or of a kind comes from the system.
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise
        raise InputError(f"{what} ({explain(error)}); write it again or remove it") from error


def plan_parquet(source: Source, snapshot: Snapshot) -> LakePlan:
    """The partitions of a Parquet lake, from the footers of all its files."""
    root = open_root(source.path)
    vector_columns(source)
    facts = _inspect_all(root, source, snapshot.files)
    for file in facts:
        check_columns(root, source, file, facts[0])
    groups = _row_groups(facts)
    if not groups:
        raise InputError(f"input {source.path}: {len(facts)} files hold no rows; nothing to map")
    width = _find_width(root, source, facts, groups)
    return _make_plan(root, source, facts, groups, width, stored_dtype(source, facts))


def plan_again(
    source: Source, files: Iterable[InputFile], pieces: Iterable[Piece], like: Like
) -> LakePlan:
    """Partitions of the rows of these files, and of pieces that an earlier plan had.

    Of the lake's other files, the footer of one alone is read: all must have the same columns.
    """
    root = open_root(source.path)
    facts = _inspect_all(root, source, files)
    first = facts if like.file is None else _inspect_all(root, source, [like.file])
    for file in facts:
        check_columns(root, source, file, first[0])
    groups = sorted([*_row_groups(facts), *pieces], key=lambda p: (p.path, p.group, p.start))
    dtype = stored_dtype(source, facts) if facts else like.dtype
    return _make_plan(
        root, source, facts, groups, like.width, dtype if dtype == like.dtype else "float32"
    )


def _inspect_all(root: Root, source: Source, files: Iterable[InputFile]) -> list[FileFacts]:
    with ThreadPoolExecutor(N_THREADS) as pool:
        return list(pool.map(partial(_inspect, root, source), files))


def _row_groups(facts: Iterable[FileFacts]) -> list[Piece]:
    return [Piece(f.path, group, 0, n) for f in facts for group, n in enumerate(f.group_rows) if n]


def _make_plan(
    root: Root, source: Source, facts: list[FileFacts], groups: list[Piece], width: int, dtype: str
) -> LakePlan:
    vector_bytes = width * np.dtype(dtype).itemsize
    partitions = group_pieces(groups, max(1, source.partition_bytes // vector_bytes))
    row_bytes = vector_bytes + max((f.scalar_bytes for f in facts), default=0)
    n_rows = partitions[-1].stop if partitions else 0
    warnings = _split_warnings(root, partitions)
    return LakePlan(partitions, n_rows, width, dtype, len(facts), row_bytes, warnings)


def group_pieces(groups: Iterable[Piece], rows_per_part: int) -> list[Partition]:
    """Partitions of at most rows_per_part rows: small row groups together, large ones split."""
    packs: list[list[Piece]] = []
    n_rows = rows_per_part  # of the last pack; full, so that the first group opens one
    for group in groups:
        if n_rows + group.n_rows > rows_per_part or len(packs[-1]) == MAX_PIECES:
            parts = split_rows(group.n_rows, rows_per_part)
            at = group.start
            packs += [[Piece(group.path, group.group, at + p.start, at + p.stop)] for p in parts]
            n_rows = parts[-1].n_rows if len(parts) == 1 else rows_per_part
        else:
            packs[-1].append(group)
            n_rows += group.n_rows
    bounds = np.cumsum([0] + [sum(piece.n_rows for piece in pack) for pack in packs]).tolist()
    return [
        Partition(index, bounds[index], bounds[index + 1], tuple(pack))
        for index, pack in enumerate(packs)
    ]


def _split_warnings(root: Root, partitions: list[Partition]) -> tuple[str, ...]:
    keys = ((p.pieces[0].path, p.pieces[0].group) for p in partitions if len(p.pieces) == 1)
    (path, group), n_pieces = max(
        ((key, len(list(same))) for key, same in groupby(keys)),
        key=lambda found: found[1],
        default=(("", 0), 0),
    )
    if n_pieces <= MANY_PIECES:
        return ()
    return (
        f"{root.name(path)}: row group {group} is read in {n_pieces} pieces, and each decodes the "
        "rows before it; smaller row groups or a larger input.partition_bytes are faster",
    )


def _inspect(root: Root, source: Source, file: InputFile) -> FileFacts:
    """What the footer says of the columns that the source names."""
    with open_parquet(root, file.path, file.size) as parquet:
        schema, metadata = parquet.schema_arrow, parquet.metadata
    known = column_types(root, source, file.path, schema)
    found = {name: known.get(name) for name in (*vector_columns(source), *source.beside)}
    return FileFacts(
        file.path,
        found,
        group_rows(metadata),
        _scalar_bytes(source, file.path, metadata),
        tuple(known) if None in found.values() else (),
    )


def group_rows(metadata: pq.FileMetaData) -> tuple[int, ...]:
    """Rows of each row group."""
    return tuple(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))


def _scalar_bytes(source: Source, path: str, metadata: pq.FileMetaData) -> int:
    """Bytes of one row's name, id, label and flag: the largest mean, at least 64 for each.

    Dictionary pages make the footer's figure smaller than the values, hence the 64.
    """
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    columns = [index for index, path in enumerate(paths) if path in source.beside]
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    n_bytes = 64 + len(path)
    for column in columns:
        sizes = [(g.column(column).total_uncompressed_size, g.num_rows) for g in groups]
        n_bytes += max([64, *(size // n_rows for size, n_rows in sizes if n_rows)])
    return n_bytes


def _find_width(root: Root, source: Source, facts: list[FileFacts], groups: list[Piece]) -> int:
    """The vectors' width: from the schema, else the most common one in the first rows."""
    if not isinstance(source.vector, str):
        return len(vector_columns(source))
    kinds = [f.types[source.vector] for f in facts]
    sizes = [kind.list_size for kind in kinds if kind and types.is_fixed_size_list(kind)]
    width = sizes[0] if sizes else _sample_width(root, source.vector, groups)
    if width < 1:
        raise InputError(
            f"input {source.path}: no row of column {source.vector!r} holds a number in the first "
            f"{min(len(groups), SAMPLE_GROUPS)} row groups; check the column"
        )
    return int(width)


def _sample_width(root: Root, column: str, groups: list[Piece]) -> int:
    """The most common width among the first rows of the first row groups; 0 if there is none."""
    widths: NDArray[np.int64] = np.empty(0, np.int64)
    for piece in islice(groups, SAMPLE_GROUPS):
        # What does not decode is reported when its partition is read.
        with suppress(InputError), open_parquet(root, piece.path, None) as parquet:
            batch = next(read_batches(root, parquet, piece, [column], SAMPLE_ROWS))[1]
            lengths = pc.list_value_length(plain_array(batch.column(column))).drop_null()
            widths = np.concatenate([widths, lengths.to_numpy(zero_copy_only=False)])
    return int(np.bincount(widths).argmax()) if len(widths) else 0


def read_batches(
    root: Root, parquet: pq.ParquetFile, piece: Piece, columns: list[str], batch_rows: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches that cover the piece, each with its first row's number in the row group."""
    where = f"{root.name(piece.path)}: row group {piece.group}"
    at = 0
    groups = [piece.group] if piece.group < parquet.num_row_groups else []
    with decode_errors(f"{where} does not decode"):
        for batch in parquet.iter_batches(batch_rows, groups, columns, use_threads=False):
            start, stop = max(piece.start - at, 0), min(piece.stop - at, batch.num_rows)
            if start < stop:
                yield at + start, batch.slice(start, stop - start)
            at += batch.num_rows
            if at >= piece.stop:
                return
    raise InputError(f"{where} has {at} rows, needs {piece.stop}; write it again or remove it")


def parquet_files(partition: Partition) -> list[str]:
    """The files that the partition's rows lie in."""
    return list(dict.fromkeys(piece.path for piece in partition.pieces))


def read_parquet(
    root: Root,
    source: Source,
    partition: Partition,
    width: int,
    files: Mapping[str, InputFile],
    lost: Container[str] = (),
) -> Iterator[Block | Lost]:
    """The partition's rows in order, a batch at a time; those of lost files as lost.

    `files` may say how large the files are, which saves a request for each.
    """
    wanted = [*vector_columns(source), *source.beside]
    batch_rows = max(1, BATCH_BYTES // (8 * width))
    for path, pieces in groupby(partition.pieces, key=lambda piece: piece.path):
        if path in lost:
            yield Lost(path, [(piece.start, piece.stop) for piece in pieces])
            continue
        n_bytes = files[path].size if path in files else None
        with open_parquet(root, path, n_bytes, len(wanted)) as parquet:
            columns = [name for name in wanted if name in parquet.schema_arrow.names]
            firsts = np.cumsum([0, *group_rows(parquet.metadata)])
            for piece in pieces:
                for row, batch in read_batches(root, parquet, piece, columns, batch_rows):
                    yield _to_block(source, path, int(firsts[piece.group]) + row, batch, width)


def _to_block(
    source: Source, path: str, first_row: int, batch: pa.RecordBatch, width: int
) -> Block:
    hive = hive_values(path)

    def scalar(name: str | None) -> pa.Array | None:
        if name is None:
            return None
        if name in batch.schema.names:
            return plain_array(batch.column(name))
        return pa.repeat(pa.scalar(hive[name], pa.string()), batch.num_rows)

    if isinstance(source.vector, str):
        vectors, faults = list_rows(plain_array(batch.column(source.vector)), width)
    else:
        vectors, faults = column_rows([batch.column(name) for name in vector_columns(source)])
    return Block(
        path,
        first_row,
        vectors,
        faults,
        scalar(source.id),
        scalar(source.label),
        scalar(source.holdout),
        {name: scalar(name) for name in source.passed},
    )

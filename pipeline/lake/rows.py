"""Rows of the lake: how a plan divides them, and the good ones and the bad of one partition.

A format hands its rows over as blocks; what makes a row good is the same for all formats.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.errors import InputError
from pipeline.lake.files import InputFile, Source
from pipeline.partitions import Partition

STORED_DTYPES = frozenset({"uint8", "int8", "float16", "float32"})
BAD_SCHEMA = pa.schema(
    {"file": pa.string(), "row": pa.int64(), "id": pa.string(), "reason": pa.string()}
)

Matrix = NDArray[Any]
Flags = NDArray[np.bool_]
Faults = dict[int, str]  # row of a block → why it cannot be used
Watch = Callable[[Matrix], None]  # told of the good rows that are there so far


@dataclass(frozen=True)
class LakePlan:
    """How the lake is read; partitions number its rows in snapshot order, bad rows included."""

    partitions: list[Partition]
    n_rows: int
    width: int
    dtype: str
    n_files: int
    row_bytes: int
    warnings: tuple[str, ...] = ()


class Like(NamedTuple):
    """What further rows of a lake must be like: width, type, and a file that is already mapped."""

    width: int
    dtype: str
    file: InputFile | None


class Rows(NamedTuple):
    """One partition: its good rows in input order, and a line for every bad one."""

    vectors: Matrix  # (n_good, width)
    ids: pa.Array
    labels: pa.Array | None
    holdout: Flags
    bad: pa.Table  # BAD_SCHEMA
    passed: pa.Table  # the columns that are only handed on
    n_good: dict[str, int]  # good rows of each file that was read
    lost: tuple[str, ...]  # files that changed under the run


class Lost(NamedTuple):
    """Rows of a file that changed under the run: ranges of its rows, in its row groups."""

    file: str
    ranges: list[tuple[int, int]]


CHANGED = "its file changed during the run"


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one file as they were read; a row in `faults` has an arbitrary vector."""

    file: str
    first_row: int
    vectors: Matrix
    faults: Faults = field(default_factory=dict)
    ids: pa.Array | None = None
    labels: pa.Array | None = None
    holdout: pa.Array | None = None
    passed: Mapping[str, pa.Array] = field(default_factory=dict)

    @property
    def row_names(self) -> pa.Array:
        """The rows' names "file:row", for a lake without an id column."""
        numbers = pa.array(np.arange(self.first_row, self.first_row + len(self.vectors)))
        return pc.binary_join_element_wise(self.file, pc.cast(numbers, pa.string()), ":")


def collect_rows(
    source: Source, vectors: Matrix, blocks: Iterable[Block | Lost], watch: Watch | None = None
) -> Rows:
    """The blocks' rows; the good ones' vectors fill `vectors` from its beginning.

    `watch` gets the filled part after every block, while the next one is still to be read.
    """
    n_good, by_file, lost = 0, Counter[str](), []
    tables, passed, flags, bad = [], [], [], [BAD_SCHEMA.empty_table()]
    for block in blocks:
        if isinstance(block, Lost):
            lost.append(block.file)
            bad.append(_lost_rows(block))
            continue
        # A double beyond float32 becomes infinite here, and so a bad row below.
        with np.errstate(over="ignore"):
            found = block.vectors.astype(vectors.dtype, copy=False)
        faults = _value_faults(found, source.reject_zero) | block.faults
        faults = _id_faults(block.ids) | faults
        good = np.delete(np.arange(len(found)), list(faults)) if faults else slice(None)
        n_new = len(found) - len(faults)
        vectors[n_good : n_good + n_new] = found[good]
        n_good += n_new
        by_file[block.file] += n_new
        tables.append(_keep(_scalars(block), good))
        if block.passed:
            passed.append(_keep(pa.table(dict(block.passed)), good))
        flags.append(to_flags(block)[good])
        if faults:
            bad.append(_bad_rows(block, faults))
        if watch is not None:
            watch(vectors[:n_good])
    if not tables:
        nothing = Block("", 0, np.empty((0, vectors.shape[1])), labels=pa.nulls(0))
        tables, flags = [_scalars(nothing)], [np.empty(0, bool)]
        passed = [pa.table(dict.fromkeys(source.passed, pa.nulls(0)))]
    # Permissive: int32 ids in one file and int64 in the next are one column.
    scalars = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    beside = pa.concat_tables(passed or [pa.table({})], promote_options="permissive")
    labels = None if source.label is None else scalars["label"].combine_chunks()
    ids = scalars["id"].combine_chunks()
    return Rows(
        vectors[:n_good],
        ids,
        labels,
        np.concatenate(flags),
        pa.concat_tables(bad),
        beside,
        dict(by_file),
        tuple(lost),
    )


def _keep(table: pa.Table, good: NDArray[np.int64] | slice) -> pa.Table:
    return table if isinstance(good, slice) else table.take(pa.array(good))


def _lost_rows(lost: Lost) -> pa.Table:
    rows = np.concatenate([np.arange(start, stop) for start, stop in lost.ranges])
    columns = {
        "file": [lost.file] * len(rows),
        "row": rows,
        "id": pa.nulls(len(rows), pa.string()),
        "reason": [CHANGED] * len(rows),
    }
    return pa.table(columns, schema=BAD_SCHEMA)


def _scalars(block: Block) -> pa.Table:
    columns = {"id": block.row_names if block.ids is None else block.ids}
    return pa.table(columns if block.labels is None else columns | {"label": block.labels})


def _id_faults(ids: pa.Array | None) -> Faults:
    if ids is None or ids.null_count == 0:
        return {}
    rows = np.flatnonzero(ids.is_null().to_numpy(zero_copy_only=False))
    return {int(row): "null id" for row in rows}


def _value_faults(vectors: Matrix, reject_zero: bool) -> Faults:
    """The rows with a value that is not finite and, if asked for, those of zeros only."""
    faults: Faults = {}
    if reject_zero:
        faults = {int(row): "zero vector" for row in np.flatnonzero(~vectors.any(axis=1))}
    if vectors.dtype.kind == "f":
        for row in np.flatnonzero(~np.isfinite(_sums(vectors))).tolist():
            wrong = ~np.isfinite(vectors[row])  # none where finite values have too large a sum
            if wrong.any():
                position = int(wrong.argmax())
                faults[row] = f"not finite: {vectors[row, position]} at position {position}"
    return faults


def _sums(vectors: Matrix) -> Matrix:
    """The rows' sums: not finite if a value is not, and many times faster than to look at each."""
    with np.errstate(over="ignore", invalid="ignore"):
        if vectors.dtype != np.float32:
            return np.asarray(vectors.sum(axis=1, dtype=np.float32))
        return np.asarray(vectors @ np.ones(vectors.shape[1], np.float32))


def _bad_rows(block: Block, faults: Faults) -> pa.Table:
    rows = sorted(faults)
    ids = [None] * len(rows) if block.ids is None else block.ids.take(pa.array(rows)).to_pylist()
    columns = {
        "file": [block.file] * len(rows),
        "row": [block.first_row + row for row in rows],
        "id": [None if value is None else str(value) for value in ids],
        "reason": [faults[row] for row in rows],
    }
    return pa.table(columns, schema=BAD_SCHEMA)


def to_flags(block: Block) -> Flags:
    """The block's holdout flags; null is False, anything but a truth value an InputError."""
    column = block.holdout
    if column is None or pa.types.is_null(column.type):
        return np.zeros(len(block.vectors), bool)
    if pa.types.is_boolean(column.type):
        return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False), bool)
    texts = pc.utf8_lower(pc.cast(column, pa.string())).fill_null("0")
    wrong = texts.filter(pc.invert(pc.is_in(texts, pa.array(["0", "1", "false", "true"]))))
    if len(wrong):
        raise InputError(
            f"input {block.file}: holdout column holds {wrong[0]}, needs true/false or 0/1; "
            "name such a column in input.holdout"
        )
    return np.asarray(pc.is_in(texts, pa.array(["1", "true"])).to_numpy(zero_copy_only=False), bool)

"""Arrow columns as numpy matrices, without a Python object per row."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import types

from pipeline.lake.rows import Faults, Matrix


def plain_array(column: pa.Array) -> pa.Array:
    """The column without extension types, dictionaries and string views."""
    if isinstance(column.type, pa.BaseExtensionType):
        return plain_array(column.storage)
    if types.is_dictionary(column.type):
        return plain_array(column.dictionary_decode())
    return column.cast(pa.string()) if types.is_string_view(column.type) else column


def _raw_values(column: pa.Array) -> Matrix:
    """A number column's buffer as numpy, without a copy; nulls are whatever lies there."""
    dtype = np.dtype(column.type.to_pandas_dtype())
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros(len(column), dtype)
    return np.frombuffer(buffer, dtype, len(column), column.offset * dtype.itemsize)


def _null_faults(nulls: Matrix) -> Faults:
    """The rows in which `nulls` (n_rows, width) is set."""
    rows = np.flatnonzero(nulls.any(axis=1)).tolist()
    return {row: f"null value at position {int(nulls[row].argmax())}" for row in rows}


def column_rows(columns: list[pa.Array]) -> tuple[Matrix, Faults]:
    """The columns side by side (n_rows, n_columns), and the rows with a null."""
    vectors = np.stack([_raw_values(column) for column in columns], axis=1)
    if not any(column.null_count for column in columns):
        return vectors, {}
    nulls = [column.is_null().to_numpy(zero_copy_only=False) for column in columns]
    return vectors, _null_faults(np.stack(nulls, axis=1))


def _bytes_as_lists(column: pa.Array) -> pa.Array:
    """A column of bytes of a fixed number as lists of uint8, without a copy."""
    validity, data = column.buffers()
    width, end = column.type.byte_width, column.offset + len(column)
    values = pa.Array.from_buffers(pa.uint8(), end * width, [None, data])
    kind = pa.list_(pa.uint8(), width)
    return pa.Array.from_buffers(
        kind, len(column), [validity], column.null_count, column.offset, [values]
    )


def list_rows(column: pa.Array, width: int) -> tuple[Matrix, Faults]:
    """A column of lists, or bytes, as a matrix (n_rows, width), and the rows that do not fit."""
    if types.is_fixed_size_binary(column.type):
        column = _bytes_as_lists(column)
    starts, widths = _list_layout(column)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    fits = valid & (widths == width)
    faults = dict.fromkeys(np.flatnonzero(~valid).tolist(), "null vector")
    for row in np.flatnonzero(valid & ~fits).tolist():
        faults[row] = f"width {widths[row]}, expected {width}"
    vectors = _gather(_raw_values(column.values), starts, fits, width)
    if column.values.null_count:
        nulls = column.values.is_null().to_numpy(zero_copy_only=False)
        faults |= _null_faults(_gather(nulls, starts, fits, width))
    return vectors, faults


def _list_layout(column: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each row's values begin in column.values, and how many there are."""
    if types.is_fixed_size_list(column.type):
        size = column.type.list_size
        # `values` takes no account of a slice's offset, unlike `offsets` of the other lists.
        return (column.offset + np.arange(len(column))) * size, np.full(len(column), size)
    offsets = np.asarray(column.offsets, np.int64)
    return offsets[:-1], np.diff(offsets)


def _gather(values: Matrix, starts: NDArray[np.int64], fits: Matrix, width: int) -> Matrix:
    """Rows of `width` values (n_rows, width): a view if all fit, else zeros for the rest."""
    if fits.all():
        return values[starts[0] : starts[0] + len(fits) * width].reshape(len(fits), width)
    rows = np.zeros((len(fits), width), values.dtype)
    rows[fits] = values[starts[fits][:, None] + np.arange(width)]
    return rows

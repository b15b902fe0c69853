"""Columns of a Parquet lake: which ones a source means, and whether all files agree on them."""

from difflib import get_close_matches
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from pyarrow import types

from pipeline.errors import InputError
from pipeline.lake.files import Root, Source
from pipeline.lake.rows import STORED_DTYPES, Block, to_flags

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"

Types = dict[str, pa.DataType | None]  # of the columns the source names; None: not in this file


class FileFacts(NamedTuple):
    """What the plan needs of one footer; `names` of all columns, only if a column is missing."""

    path: str
    types: Types
    group_rows: tuple[int, ...]
    scalar_bytes: int
    names: tuple[str, ...]


def hive_values(path: str) -> dict[str, str | None]:
    """Column values that the path's folders named key=value stand for."""
    pairs = (part.partition("=") for part in path.split("/")[:-1] if "=" in part)
    return {unquote(key): None if value == HIVE_NULL else unquote(value) for key, _, value in pairs}


def vector_columns(source: Source) -> tuple[str, ...]:
    """Names of the columns that make up the vector."""
    if source.vector is None:
        raise InputError(f"input {source.path}: which column is the vector? set input.vector")
    return (source.vector,) if isinstance(source.vector, str) else source.vector


def column_types(root: Root, source: Source, path: str, schema: pa.Schema) -> Types:
    """Types of all the file's columns, those from its folders included."""
    for name in (*vector_columns(source), *source.beside):
        if len(schema.get_all_field_indices(name)) > 1:
            raise InputError(
                f"{root.name(path)}: several columns are named {name!r}; give each its own name"
            )
    found: Types = dict.fromkeys(hive_values(path), pa.string())
    found |= {field.name: plain_type(field.type) for field in schema}
    if isinstance(source.vector, str):
        found |= {source.vector: _vector_type(found.get(source.vector))}
    return {name: kind for name, kind in found.items() if kind is not None}


def _vector_type(kind: pa.DataType | None) -> pa.DataType | None:
    """Bytes of a fixed number are a list of numbers from 0 to 255."""
    if kind is not None and types.is_fixed_size_binary(kind):
        return pa.list_(pa.uint8(), kind.byte_width)
    return kind


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type below extensions and dictionaries."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    return plain_type(kind.value_type) if types.is_dictionary(kind) else kind


def check_columns(root: Root, source: Source, facts: FileFacts, first: FileFacts) -> None:
    """Nothing, or an InputError for a column that is missing, unusable or not as in `first`."""
    for name, kind in facts.types.items():
        where = f"{root.name(facts.path)}: column {name!r}"
        expected = first.types[name]
        if expected is None:
            near = get_close_matches(name, facts.names, 3, 0.5) or list(facts.names[:8])
            raise InputError(f"{where} does not exist; the nearest are {', '.join(near)}")
        if kind is None or not _agree(source, name, kind, expected):
            raise InputError(
                f"{where} is {kind or 'missing'}, but {expected} in {first.path}; "
                "give all files the same columns"
            )
        if name in vector_columns(source) and not _is_vector(source, kind):
            raise InputError(
                f"{where} is {kind}; a vector is one column of lists of numbers, or several "
                "columns of numbers: name such in input.vector"
            )
        if name in source.scalars and types.is_nested(kind):
            raise InputError(f"{where} is {kind}; id, label and holdout must be single values")
    _check_holdout(root, source, facts)


def _check_holdout(root: Root, source: Source, facts: FileFacts) -> None:
    kind = None if source.holdout is None else facts.types[source.holdout]
    if kind is None or types.is_boolean(kind) or types.is_integer(kind) or types.is_null(kind):
        return
    hive = hive_values(facts.path)
    if source.holdout not in hive:
        raise InputError(
            f"{root.name(facts.path)}: holdout column {source.holdout!r} is {kind}; "
            "it must be boolean, or integers 0 and 1"
        )
    value = pa.array([hive[source.holdout]], pa.string())
    to_flags(Block(facts.path, 0, np.empty((1, 0)), holdout=value))


def _agree(source: Source, name: str, kind: pa.DataType, expected: pa.DataType) -> bool:
    """Whether two files' types of a column can be read as one."""
    if name in vector_columns(source) and _is_vector(source, kind) and _is_vector(source, expected):
        sizes = {k.list_size for k in (kind, expected) if types.is_fixed_size_list(k)}
        return len(sizes) < 2
    # A column of nothing but nulls is written with the type null.
    null = types.is_null(kind) or types.is_null(expected)
    return null or _family(kind) == _family(expected)


def _family(kind: pa.DataType) -> str:
    if types.is_integer(kind):
        return "integer"
    if types.is_floating(kind):
        return "float"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "string"
    return str(kind)


def _is_list(kind: pa.DataType) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


def _is_vector(source: Source, kind: pa.DataType) -> bool:
    """Whether the type is one the source's vector column, or columns, may have."""
    if isinstance(source.vector, str):
        return _is_list(kind) and _is_number(kind.value_type)
    return _is_number(kind)


def stored_dtype(source: Source, facts: list[FileFacts]) -> str:
    """The vectors' own numpy type if all files share it and it is a small one, else float32."""
    kinds = {found.types[name] for found in facts for name in vector_columns(source)}
    values = {kind.value_type if _is_list(kind) else kind for kind in kinds if kind is not None}
    names = {np.dtype(value.to_pandas_dtype()).name for value in values}
    return names.pop() if len(names) == 1 and names <= STORED_DTYPES else "float32"

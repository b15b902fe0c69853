"""Columns of a Parquet lake: what cannot be used, and files that disagree."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import InputError
from pipeline.lake import Source
from tests.lake.test_parquet import fixed, plan, read_all, vectors, write


def test_unusable_columns_are_refused(tmp_path: Path) -> None:
    write(
        tmp_path / "a.parquet",
        vector=fixed(vectors(3)),
        words=["a", "b", "c"],
        number=[1.5, 2.0, 3.0],
        lists=[["a"], ["b"], ["c"]],
        seven=[0, 7, 1],
        nothing=pa.array([None, [], None], pa.list_(pa.float32())),
    )
    path = str(tmp_path)
    for source, match in [
        (Source(path, "vectr"), r"a.parquet: column 'vectr' does not exist; .* are vector"),
        (Source(path, "vector", id="zzz"), r"'zzz' does not exist; the nearest are vector, words"),
        (Source(path, "words"), r"column 'words' is string; a vector is one column of lists"),
        (Source(path, "number"), r"column 'number' is double; a vector is"),
        (Source(path, "lists"), r"column 'lists' is list<element: string>; a vector is"),
        (Source(path, ("number", "words")), r"column 'words' is string; a vector is"),
        (Source(path, None), r"which column is the vector\? set input.vector"),
        (Source(path, "vector", label="lists"), r"'lists' is list<.* must be single values"),
        (Source(path, "vector", holdout="number"), r"'number' is double; it must be boolean"),
        (Source(path, "nothing"), r"no row of column 'nothing' holds a number in the first 1 row"),
    ]:
        with pytest.raises(InputError, match=match):
            plan(source)
    with pytest.raises(InputError, match=r"a.parquet: holdout column holds 7, needs true/false"):
        read_all(Source(path, "vector", holdout="seven"))


def test_schemas_that_differ_are_refused(tmp_path: Path) -> None:
    first = {"v": fixed(vectors(2)), "id": [1, 2], "part": ["a", "b"]}
    write(tmp_path / "a.parquet", **first)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"v": ["x", "y"]}, r"b.parquet: column 'v' is string, but fixed_size_list<.*a.parquet"),
        ({"v": fixed(vectors(2, 7))}, r"'v' is fixed_size_list<.*>\[7\], but fixed.*>\[8\] in a.p"),
        ({"id": ["1", "2"]}, r"b.parquet: column 'id' is string, but int64 in a.parquet"),
        ({"id": [0.5, 1.5]}, r"column 'id' is double, but int64"),
    ]
    for change, match in cases:
        write(tmp_path / "b.parquet", **(first | change))
        with pytest.raises(InputError, match=match):
            plan(Source(str(tmp_path), "v", id="id"))
    write(tmp_path / "b.parquet", v=fixed(vectors(2)))
    with pytest.raises(InputError, match=r"column 'id' is missing, but int64 in a.parquet"):
        plan(Source(str(tmp_path), "v", id="id"))
    twice = pa.Table.from_arrays([fixed(vectors(2))] * 2, names=["v", "v"])
    pq.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b.parquet: several columns are named 'v'"):
        plan(Source(str(tmp_path), "v"))


def test_hive_holdout_must_be_a_truth_value(tmp_path: Path) -> None:
    (tmp_path / "split=test").mkdir()
    write(tmp_path / "split=test" / "a.parquet", v=fixed(vectors(2)))
    with pytest.raises(InputError, match=r"split=test/a.parquet: holdout column holds test"):
        plan(Source(str(tmp_path), "v", holdout="split"))


def test_files_without_rows_are_refused_only_together(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", v=fixed(vectors(2))[:0])
    with pytest.raises(InputError, match=r"1 files hold no rows; nothing to map"):
        plan(Source(str(tmp_path), "v"))
    write(tmp_path / "b.parquet", v=fixed(vectors(2)))
    assert plan(Source(str(tmp_path), "v")).n_rows == 2

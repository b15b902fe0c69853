"""Good rows and bad: reasons, row numbers in the file, holdout flags."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.lake import Source
from tests.lake.test_parquet import all_ids, bad_rows, fixed, joined, read_all, vectors


@pytest.mark.parametrize("layout", ["fixed", "list", "large"])
def test_bad_rows_have_reasons_and_their_row_in_the_file(tmp_path: Path, layout: str) -> None:
    rows: list[Any] = vectors(40, 4).tolist()
    rows[2] = None
    rows[11] = [1.0, None, 3.0, None]
    rows[12] = [1.0, 2.0, np.nan, 4.0]
    rows[13] = [1.0, 2.0, 3.0, -np.inf]
    rows[14] = [0.0] * 4
    expected = {
        2: "null vector",
        11: "null value at position 1",
        12: "not finite: nan at position 2",
        13: "not finite: -inf at position 3",
        14: "zero vector",
        39: "null id",
    }
    if layout != "fixed":
        rows[25], rows[26], rows[30] = [1.0] * 3, [], [2.0] * 5
        expected |= {row: f"width {len(rows[row])}, expected 4" for row in (25, 26, 30)}
    kind = {
        "fixed": pa.list_(pa.float32(), 4),
        "list": pa.list_(pa.float32()),
        "large": pa.large_list(pa.float32()),
    }[layout]
    ids = [f"r{row}" for row in range(39)] + [None]
    table = pa.table({"v": pa.array(rows, kind), "id": ids})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=17)
    source = Source(str(tmp_path), "v", id="id", reject_zero=True, partition_bytes=5 * 16)
    _, parts = read_all(source)
    assert bad_rows(parts) == [
        {"file": "a.parquet", "row": row, "id": ids[row], "reason": expected[row]}
        for row in sorted(expected)
    ]
    good = [row for row in range(40) if row not in expected]
    assert all_ids(parts) == [ids[row] for row in good]
    np.testing.assert_array_equal(joined(parts), np.array([rows[r] for r in good], "float32"))


def test_bad_rows_of_scalar_columns(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, None, 3.0, 1e300], "y": pa.array([1, 2, None, 4], pa.int16())})
    pq.write_table(table, tmp_path / "a.parquet")
    _, [part] = read_all(Source(str(tmp_path), ("x", "y")))
    assert part.vectors.tolist() == [[1.0, 1.0]]
    assert [(row["row"], row["id"], row["reason"]) for row in part.bad.to_pylist()] == [
        (1, None, "null value at position 0"),
        (2, None, "null value at position 1"),
        (3, None, "not finite: inf at position 0"),
    ]


def test_null_values_of_integers_are_bad_and_zero_rows_may_be_good(tmp_path: Path) -> None:
    rows = pa.array([[0, 0], [1, None], [2, 3]], pa.list_(pa.uint8()))
    pq.write_table(pa.table({"v": rows}), tmp_path / "a.parquet")
    plan, [part] = read_all(Source(str(tmp_path), "v"))
    assert plan.dtype == "uint8"
    assert part.vectors.tolist() == [[0, 0], [2, 3]]
    assert [row["reason"] for row in part.bad.to_pylist()] == ["null value at position 1"]


@pytest.mark.parametrize(
    "flags",
    [
        pa.array([True, None, False]),
        pa.array([1, None, 0], pa.int8()),
        pa.array([1, 0, 0], pa.uint64()),
    ],
)
def test_holdout_columns(tmp_path: Path, flags: pa.Array) -> None:
    pq.write_table(pa.table({"v": fixed(vectors(3)), "h": flags}), tmp_path / "a.parquet")
    _, [part] = read_all(Source(str(tmp_path), "v", holdout="h"))
    assert part.holdout.tolist() == [True, False, False]

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.partitions import Partition, Piece, block_rows, split_rows


@given(n_rows=st.integers(0, 5000), rows_per_part=st.integers(1, 6000))
def test_every_row_is_covered_once_and_in_order(n_rows: int, rows_per_part: int) -> None:
    parts = split_rows(n_rows, rows_per_part)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(n_rows))
    assert [part.index for part in parts] == list(range(len(parts)))


@given(n_rows=st.integers(1, 10**12), n_parts=st.integers(1, 300), spare=st.integers(0, 10**6))
def test_sizes_keep_the_bound_and_differ_by_one(n_rows: int, n_parts: int, spare: int) -> None:
    rows_per_part = -(-n_rows // n_parts) + spare
    parts = split_rows(n_rows, rows_per_part)
    sizes = [part.n_rows for part in parts]
    assert sum(sizes) == n_rows
    assert max(sizes) <= rows_per_part
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == -(-n_rows // rows_per_part)


def test_partitions_carry_no_pieces_unless_told() -> None:
    assert split_rows(3, 2) == [Partition(0, 0, 1), Partition(1, 1, 3)]
    piece = Piece("a.parquet", 0, 5, 9)
    assert piece.n_rows == 4
    assert Partition(0, 0, 4, (piece,)).n_rows == 4


@pytest.mark.parametrize("rows_per_part", [0, -3])
def test_a_part_needs_a_row(rows_per_part: int) -> None:
    with pytest.raises(ValueError, match=f"rows_per_part is {rows_per_part}, must be at least 1"):
        split_rows(10, rows_per_part)


@pytest.mark.parametrize(
    ("row_bytes", "n_rows"),
    [(1, 8192), (8192, 8192), (8193, 8191), (1 << 20, 64), (64 << 20, 1), (1 << 40, 1)],
)
def test_blocks_are_8192_rows_or_64_mib(row_bytes: int, n_rows: int) -> None:
    assert block_rows(row_bytes) == n_rows

"""Contiguous ranges of rows: the unit of work of every stage."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Rows start..stop of row group `group` of the input file `path`; group -1 is a Zarr array."""

    path: str
    group: int
    start: int
    stop: int

    @property
    def n_rows(self) -> int:
        """Number of rows of the piece."""
        return self.stop - self.start


@dataclass(frozen=True)
class Partition:
    """Rows start..stop of whatever a stage works on; `pieces` says where they lie in the lake."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...] = ()

    @property
    def n_rows(self) -> int:
        """Number of rows of the partition."""
        return self.stop - self.start


def split_rows(n_rows: int, rows_per_part: int) -> list[Partition]:
    """Partitions that cover rows 0..n_rows once, in order, each of at most rows_per_part rows."""
    if rows_per_part < 1:
        raise ValueError(f"rows_per_part is {rows_per_part}, must be at least 1")
    starts = range(0, n_rows, rows_per_part)
    return [
        Partition(index, start, min(start + rows_per_part, n_rows))
        for index, start in enumerate(starts)
    ]

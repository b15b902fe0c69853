"""Contiguous ranges of rows: the unit of work of every stage."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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
    """Partitions that cover rows 0..n_rows once, in order, of nearly equal size.

    None has more than rows_per_part rows; sizes differ by one row at most.
    """
    if rows_per_part < 1:
        raise ValueError(f"rows_per_part is {rows_per_part}, must be at least 1")
    n_parts = -(-n_rows // rows_per_part)
    bounds = [n_rows * part // n_parts for part in range(n_parts)] + [n_rows]
    return [Partition(index, bounds[index], bounds[index + 1]) for index in range(n_parts)]


def block_rows(row_bytes: int) -> int:
    """Rows of one block of the training sample: 8,192, fewer where rows are wide.

    8,192 rows keep a block below 64 MiB up to 2,048 float32 columns, and give small samples
    enough blocks to occupy several workers. It never depends on the workers, so results do not.
    """
    return max(1, min(8192, (64 << 20) // row_bytes))


def graph_rows(n_rows: int) -> int:
    """Rows of one block of the graph: an eighth of all, but 4,096 to 32,768.

    Small samples occupy several workers, large ones have few enough blocks to shuffle between,
    and a block's memory has a bound. It never depends on the workers, so results do not.
    """
    return min(max(-(-n_rows // 8), 4096), 32_768)

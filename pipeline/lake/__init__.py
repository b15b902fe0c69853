"""The input lake: what lies there, how its rows fall into partitions, and reading one partition.

Files are in files.py, good and bad rows in rows.py, the formats in parquet.py and zarr.py.
"""

from collections.abc import Mapping

import numpy as np

from pipeline.lake.files import (
    InputFile,
    Snapshot,
    Source,
    is_zarr,
    open_root,
    take_snapshot,
)
from pipeline.lake.parquet import plan_parquet, read_parquet
from pipeline.lake.rows import LakePlan, Rows, collect_rows
from pipeline.lake.zarr import plan_zarr, read_zarr
from pipeline.partitions import Partition

__all__ = [
    "InputFile",
    "LakePlan",
    "Rows",
    "Snapshot",
    "Source",
    "plan_lake",
    "read_partition",
    "take_snapshot",
]


def plan_lake(source: Source, snapshot: Snapshot) -> LakePlan:
    """The partitions of the lake, every file's schema checked."""
    return (plan_zarr if is_zarr(snapshot.files) else plan_parquet)(source, snapshot)


def read_partition(
    source: Source,
    partition: Partition,
    width: int,
    dtype: str,
    snapshot_files: Mapping[str, InputFile] | None = None,
) -> Rows:
    """The partition's rows; with snapshot_files, its files are first compared with them.

    A Zarr partition needs the whole snapshot's files: its chunks are not named in its pieces.
    """
    root = open_root(source.path)
    if partition.pieces[0].group < 0:
        blocks = read_zarr(root, source, partition, snapshot_files)
    else:
        blocks = read_parquet(root, source, partition, width, snapshot_files)
    return collect_rows(source, np.empty((partition.n_rows, width), dtype), blocks)

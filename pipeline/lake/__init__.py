"""The input lake: what lies there, how its rows fall into partitions, and reading one partition.

Files are in files.py, good and bad rows in rows.py, the formats in parquet.py and zarr.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.errors import InputError, LakemapError
from pipeline.lake.files import (
    InputFile,
    Root,
    Snapshot,
    Source,
    find_changed,
    is_zarr,
    open_root,
    take_snapshot,
)
from pipeline.lake.parquet import parquet_files, plan_parquet, read_parquet
from pipeline.lake.rows import CHANGED, Block, LakePlan, Lost, Rows, Watch, collect_rows
from pipeline.lake.zarr import plan_zarr, read_zarr, zarr_files
from pipeline.partitions import Partition

__all__ = [
    "CHANGED",
    "InputFile",
    "LakePlan",
    "Rows",
    "Snapshot",
    "Source",
    "Watch",
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
    files: Mapping[str, InputFile] | None = None,
    watch: Watch | None = None,
) -> Rows:
    """The partition's rows; with `files`, those of the snapshot, it is seen that none changed.

    One that did ends the run or, if the source says so, its rows are lost: bad rows with that
    reason. A Zarr partition whose chunks changed is lost as a whole. `watch` is told of the good
    rows while others are still being read; where files were lost it is told of all again, in
    another array.
    """
    root = open_root(source.path)
    lost: dict[str, str] = {}
    while True:
        blocks = _blocks(root, source, partition, width, files or {}, lost)
        if root.folder is None:  # on a disk the system reads ahead, and a thread costs more
            blocks = _read_ahead(blocks)
        try:
            rows = collect_rows(source, np.empty((partition.n_rows, width), dtype), blocks, watch)
        except LakemapError:
            changed = _find_changed(root, source, partition, files, lost)
            if not changed:
                raise
        else:
            changed = _find_changed(root, source, partition, files, lost)
            if not changed:
                return rows
        if source.on_change == "stop":
            path, what = next(iter(changed.items()))
            raise InputError(f"{root.name(path)}: file {what} since the run began; start a new run")
        lost |= changed


def _is_zarr(partition: Partition) -> bool:
    return partition.pieces[0].group < 0


def _blocks(
    root: Root,
    source: Source,
    partition: Partition,
    width: int,
    files: Mapping[str, InputFile],
    lost: Mapping[str, str],
) -> Iterable[Block | Lost]:
    if not _is_zarr(partition):
        return read_parquet(root, source, partition, width, files, lost)
    if lost:
        return [Lost(piece.path, [(piece.start, piece.stop)]) for piece in partition.pieces]
    return read_zarr(root, source, partition)


def _read_ahead(blocks: Iterable[Block | Lost]) -> Iterator[Block | Lost]:
    """The blocks; each is fetched while what is done with the one before goes on."""
    waiting = iter(blocks)
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, waiting, None)
        while (block := coming.result()) is not None:
            coming = thread.submit(next, waiting, None)
            yield block


def _find_changed(
    root: Root,
    source: Source,
    partition: Partition,
    files: Mapping[str, InputFile] | None,
    known: Mapping[str, str],
) -> dict[str, str]:
    """The partition's files that are not as in the snapshot, less those known before."""
    if files is None or (_is_zarr(partition) and known):
        return {}
    is_parquet = not _is_zarr(partition)
    paths = parquet_files(partition) if is_parquet else zarr_files(root, source, partition)
    return find_changed(root, [path for path in paths if path not in known], files)

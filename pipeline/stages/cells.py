"""cells: k-means centroids of the sample, then each row's copies in the cells nearest to it.

A block of `assign` is a bucket file: its rows sorted by cell, so that a search task reads only
its cell's range of every block. One cell is exact search, so one path serves every size.
"""

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from pipeline.config import Job
from pipeline.kernels.cells import assign_cells, train_centroids
from pipeline.kernels.neighbors import widen
from pipeline.kernels.sampling import draw_positions
from pipeline.manifest import Part, Plan
from pipeline.partitions import Partition, block_rows, split_rows
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage, one_partition

# k-means gains little from more rows per centroid.
ROWS_PER_CENTROID = 256


@dataclass(frozen=True)
class CellSettings:
    """What the cells depend on."""

    metric: str
    cells: int | None
    cell_rows: int
    overlap: int
    seed: int


def settings(job: Job) -> CellSettings:
    """The cells' settings."""
    config = job.neighbors
    return CellSettings(config.metric, config.cells, config.cell_rows, config.overlap, config.seed)


def count_cells(config: CellSettings, n_rows: int) -> int:
    """How many cells: one, which is exact, up to twice the rows of a cell; then as few as fit."""
    if config.cells is not None:
        return min(config.cells, n_rows)
    if n_rows <= 2 * config.cell_rows:
        return 1
    return -(-n_rows * config.overlap // config.cell_rows)


def estimate_centroids(job: Job, shape: Shape) -> Estimate:
    """One task holds the rows k-means is trained on, twice."""
    n_cells = count_cells(settings(job), shape.n_train)
    n_rows = min(shape.n_train, ROWS_PER_CENTROID * n_cells)
    return Estimate(1, PROCESS_BYTES + 3 * n_rows * shape.width * 4, n_cells * shape.width * 4)


def estimate_assign(job: Job, shape: Shape) -> Estimate:
    """One task holds a block widened, and its copies."""
    config = settings(job)
    n_cells = count_cells(config, shape.n_train)
    copies = min(config.overlap, n_cells)
    row = shape.width * 4 + 2 * copies * (shape.row_bytes + 8)
    task = PROCESS_BYTES + shape.block_rows * row + n_cells * shape.width * 4
    return Estimate(shape.n_blocks, task, shape.n_train * copies * (shape.row_bytes + 8))


def train_part(context: Context[CellSettings], _: Partition, __: Report) -> Part:
    """The centroids, from a seeded sample of the training rows."""
    sample, config = context.read("sample"), context.settings
    n_cells = count_cells(config, sample.n_rows)
    seed = [config.seed, crc32(b"centroids")]
    chosen = np.sort(draw_positions(sample.n_rows, ROWS_PER_CENTROID * n_cells, seed))
    blocks = []
    for part in split_rows(sample.n_rows, 8192):
        inside = chosen[(chosen >= part.start) & (chosen < part.stop)] - part.start
        vectors = sample.rows("vectors", part.start, part.stop)[inside]
        blocks.append(widen(vectors, config.metric))
    centroids = train_centroids(np.concatenate(blocks), n_cells, config.seed)
    return Part(len(centroids), arrays={"centroids": centroids})


def prepare_assign(context: Context[CellSettings]) -> Plan:
    """Blocks of the sample."""
    sample = context.read("sample")
    facts = sample.manifest.facts
    row_bytes = facts["width"] * np.dtype(facts["dtype"]).itemsize
    return Plan(split_rows(sample.n_rows, block_rows(row_bytes)))


def assign_part(context: Context[CellSettings], partition: Partition, _: Report) -> Part:
    """A bucket file: row numbers and vectors sorted by cell, and where each cell starts."""
    centroids = context.read("centroids").rows("centroids", 0, context.read("centroids").n_rows)
    overlap = min(context.settings.overlap, len(centroids))
    vectors = context.read("sample").rows("vectors", partition.start, partition.stop)
    cells = assign_cells(widen(vectors, context.settings.metric), centroids, overlap)
    order = np.argsort(cells.ravel(), kind="stable")
    copies = order // overlap  # the row, counted in the block, of each sorted copy
    starts = np.searchsorted(cells.ravel()[order], np.arange(len(centroids) + 1))
    arrays = {
        "rows": copies + partition.start,
        "vectors": vectors[copies],
        "starts": starts.astype(np.int64),
    }
    return Part(len(copies), arrays=arrays)


CENTROIDS = Stage(
    name="centroids",
    version=1,
    reads=("sample",),
    settings=settings,
    estimate=estimate_centroids,
    prepare=one_partition,
    do_part=train_part,
)
ASSIGN = Stage(
    name="assign",
    version=1,
    reads=("sample", "centroids"),
    settings=settings,
    estimate=estimate_assign,
    prepare=prepare_assign,
    do_part=assign_part,
)

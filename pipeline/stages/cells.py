"""cells: how the sample is cut into overlapping cells, then each row on its way to its cells.

centroids  how many cells and how many a row is put in, by cost among what reaches the recall
assign     one bucket file per block: the rows of every bucket, a group of neighbouring cells

Neighbours that share a cell are found, so the recall is the share of such pairs; it is measured
on drawn rows before anything is built. One cell is exact search, so one path serves every size.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Job
from pipeline.errors import ConfigError
from pipeline.kernels.cells import (
    Assigned,
    assign_cells,
    coverage,
    group_cells,
    train_centroids,
    trim_cells,
)
from pipeline.kernels.neighbors import search_exact, widen
from pipeline.kernels.sampling import draw_positions
from pipeline.manifest import Part, Plan, Record, Store, open_store
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report
from pipeline.stage import (
    PROCESS_BYTES,
    Context,
    Estimate,
    Shape,
    Stage,
    StoreRef,
    one_partition,
)
from pipeline.stores import Buckets

EXACT_ROWS = 4096  # up to so many rows one cell costs less than choosing several
FINEST_CELL = 128  # rows; smaller ones need so much overlap that nothing is won
MOST_CELLS = 8192  # every row is compared with every centroid
COARSER = 4  # times fewer cells, from one option to the next
MOST_OVERLAP = 16
ROWS_PER_CENTROID = 16
COVERAGE_QUERIES = 1500
SURE = 2  # standard errors by which the estimate must exceed the recall: the cheapest of several
# options that seem to suffice is often one that was lucky
COUNTED_ROWS = 32_768
PART_OF_ROWS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75)  # that may do with one
# cell more than the others
UNLIMITED = 1e30  # a reach for all rows; JSON has no infinity
BUCKET_ROWS = 16_384  # rows a bucket should have, copies apart
LEAST_BUCKETS = 8


@dataclass(frozen=True)
class CellSettings:
    """What the cells depend on."""

    k: int
    metric: str
    recall: float
    cells: int | None
    overlap: int | None
    memory: int
    seed: int


class Probe(NamedTuple):
    """Drawn rows: some train the centroids, others, which these must not know, measure them."""

    training: NDArray[np.float32]  # (t, d)
    rows: NDArray[np.float32]  # (m, d), to count the rows of cells and buckets
    n_total: int  # rows of the whole sample
    queries: NDArray[np.float32]  # (q, d)
    neighbors: NDArray[np.float32]  # (q * j, d), the j rows nearest to each query


class Option(NamedTuple):
    """One way to cut the sample, and what it gives."""

    centroids: NDArray[np.float32]  # (n_cells, d)
    overlap: int
    reach: float  # rows whose last cell is farther than this, in first cells, do without it
    coverage: float
    error: float  # standard error of the coverage
    cost: float  # nanoseconds a row, by the cost model
    groups: NDArray[np.int32]  # (n_cells,), bucket of each cell
    bucket_rows: int  # of the largest bucket


def settings(job: Job) -> CellSettings:
    """The cells' settings."""
    c = job.neighbors
    return CellSettings(c.k, c.metric, c.recall, c.cells, c.overlap, int(c.memory), c.seed)


def bucket_row_bytes(width: int, item_bytes: int, k: int) -> int:
    """Memory of one row in a search task: as read, widened, centred; its lists, also encoded."""
    return width * (8 + item_bytes) + 44 * k + 4 * MOST_OVERLAP + 32


def count_drawn(config: CellSettings, n_rows: int, width: int) -> int:
    """Rows to draw: 16 a cell to train and as many to measure, if half of the memory holds them."""
    wanted = 2 * ROWS_PER_CENTROID * (config.cells or min(n_rows // FINEST_CELL, MOST_CELLS))
    held = config.memory // 2 // (4 * width)
    return min(n_rows, max(EXACT_ROWS, min(wanted, held)))


def assign_rows(config: CellSettings, n_rows: int, row_bytes: int) -> int:
    """Rows of one block of `assign`: an eighth of all; its copies fit half of the memory."""
    held = config.memory // (2 * MOST_OVERLAP * (row_bytes + 4 * MOST_OVERLAP + 8))
    return max(1, min(max(-(-n_rows // 8), 4096), held))


def estimate_centroids(job: Job, shape: Shape) -> Estimate:
    """One task holds the drawn rows, and those it trains on centred and grouped."""
    config = settings(job)
    drawn = count_drawn(config, shape.n_train, shape.width)
    n_cells = config.cells or max(1, min(shape.n_train // FINEST_CELL, MOST_CELLS))
    store = n_cells * shape.width * 4
    return Estimate(1, PROCESS_BYTES + 3 * drawn * shape.width * 4 + 2 * store, 2 * store)


def estimate_assign(job: Job, shape: Shape) -> Estimate:
    """One task holds a block, its copies and their encoding."""
    config = settings(job)
    block = assign_rows(config, shape.n_train, shape.row_bytes)
    copies = config.overlap or MOST_OVERLAP
    copied = shape.row_bytes + 4 * copies + 8
    task = PROCESS_BYTES + block * (shape.width * 8 + copies * 2 * copied)
    store = shape.n_train * min(copies, 4) * copied
    return Estimate(-(-shape.n_train // block), task, store)


def train_part(context: Context[CellSettings], _: Partition, __: Report) -> Part:
    """The centroids, the bucket of each cell, and the overlap, from a draw of the sample."""
    sample, config = context.read("sample"), context.settings
    width, dtype = sample.manifest.facts["width"], np.dtype(sample.manifest.facts["dtype"])
    n_drawn = count_drawn(config, sample.n_rows, width)
    seed = [config.seed, crc32(b"centroids")]
    rows = widen(_gather(sample, draw_positions(sample.n_rows, n_drawn, seed)), config.metric)
    probe = make_probe(rows, sample.n_rows, config.k)
    option = choose(probe, config, bucket_row_bytes(width, dtype.itemsize, config.k))
    arrays = {"centroids": option.centroids, "groups": option.groups}
    metrics = {
        "cells": len(option.centroids),
        "overlap": option.overlap,
        "reach": option.reach,
        "coverage": option.coverage,
        "coverage_error": option.error,
        "buckets": int(option.groups.max()) + 1,
    }
    return Part(len(option.centroids), arrays=arrays, metrics=metrics)


def finish_centroids(_: Context[CellSettings], records: list[Record]) -> dict[str, Any]:
    """What was chosen, and the recall that it promises."""
    return records[0].metrics


def _gather(sample: Store, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """The rows at those positions, in order of position; the sample is read a part at a time."""
    wanted = np.sort(positions)
    blocks = []
    for part in split_rows(sample.n_rows, 8192):
        start, stop = np.searchsorted(wanted, [part.start, part.stop])
        if stop > start:
            vectors = sample.rows("vectors", part.start, part.stop)
            blocks.append(vectors[wanted[start:stop] - part.start])
    return np.concatenate(blocks)


def make_probe(drawn: NDArray[np.float32], n_total: int, k: int) -> Probe:
    """The drawn rows in two halves, and queries in the second with their nearest ones there.

    Of a row's k neighbours in the whole sample that half holds a share of len(rows) / n_total,
    and these are its nearest rows there: they stand for the k.
    """
    training, rows = drawn[::2].copy(), drawn[1::2].copy()
    if len(rows) < 2:  # a lake of two or three rows
        training = rows = drawn
    n_near = min(max(1, round((k + 1) * len(rows) / n_total - 1)), len(rows) - 1)
    numbers = np.arange(len(rows))
    queries = numbers[:: max(1, len(rows) // COVERAGE_QUERIES)][:COVERAGE_QUERIES]
    found = search_exact(rows[queries], queries, rows, numbers, n_near)
    counted = rows[:: -(-len(rows) // COUNTED_ROWS)]
    return Probe(training, counted, n_total, rows[queries], rows[found.ids.ravel()])


def choose(probe: Probe, config: CellSettings, row_bytes: int) -> Option:
    """The cheapest option that reaches the recall and fits the memory; the likeliest come first."""
    best: Option | None = None
    tried: list[Option] = []
    counts = count_options(config, probe.n_total, len(probe.training))
    for least, n_cells in sorted((_least_cost(n, probe, config.k), n) for n in counts):
        if best is not None and best.cost <= least:
            break
        centroids = train_centroids(probe.training, n_cells, config.seed)
        option = _weigh(centroids, probe, config, row_bytes)
        tried.append(option)
        cheaper = best is None or option.cost < best.cost
        if cheaper and _suffices(option, config) and _fits(option, config, row_bytes):
            best = option
    if best is None:
        raise ConfigError(_explain(tried, config, row_bytes))
    return best


def count_options(config: CellSettings, n_rows: int, n_drawn: int) -> list[int]:
    """Numbers of cells to try, many first, one last."""
    if config.cells is not None:
        return [min(config.cells, n_drawn)]
    if n_rows <= EXACT_ROWS:
        return [1]
    counts = [min(n_rows // FINEST_CELL, n_drawn // 8, MOST_CELLS)]
    while counts[-1] >= COARSER:
        counts.append(counts[-1] // COARSER)
    return counts if counts[-1] == 1 else [*counts, 1]


def _weigh(
    centroids: NDArray[np.float32], probe: Probe, config: CellSettings, row_bytes: int
) -> Option:
    """The centroids with the least overlap that reaches the recall, or the largest tried."""
    most = min(config.overlap or MOST_OVERLAP, len(centroids))
    queries = assign_cells(probe.queries, centroids, most)
    near = assign_cells(probe.neighbors, centroids, most)
    means, errors = _measure(queries.cells, near.cells)
    reached = np.flatnonzero(means - SURE * errors >= config.recall)
    overlap = int(reached[0]) + 1 if len(reached) and config.overlap is None else most
    assigned = assign_cells(probe.rows, centroids, overlap)
    mean, error, reach = float(means[overlap - 1]), float(errors[overlap - 1]), UNLIMITED
    if len(reached) and config.overlap is None and overlap > 1:
        pairs = [Assigned(cells[:, :overlap], far[:, :overlap]) for cells, far in (queries, near)]
        mean, error, reach = _find_reach(pairs, config.recall) or (mean, error, reach)
    cells = trim_cells(assigned, reach)
    scale = probe.n_total / len(probe.rows)
    counts = np.bincount(cells[cells >= 0], minlength=len(centroids)) * np.float64(scale)
    groups, bucket_rows = _make_buckets(centroids, cells, counts, config.memory / row_bytes)
    cost = _cost(counts, probe.n_total, centroids.shape[1], config.k)
    return Option(centroids, overlap, reach, mean, error, cost, groups, int(bucket_rows * scale))


def _measure(
    queries: NDArray[np.int32], near: NDArray[np.int32]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The share of neighbours that share a cell, by overlap, and its standard error."""
    shares = coverage(queries, near.reshape(len(queries), -1, queries.shape[1]))
    return shares.mean(axis=0), shares.std(axis=0) / len(shares) ** 0.5


def _find_reach(pairs: list[Assigned], recall: float) -> tuple[float, float, float] | None:
    """Coverage, its error and the least reach that suffices, if not all rows need the last cell."""
    first, last = pairs[0].distances[:, 0], pairs[0].distances[:, -1]
    for reach in np.quantile(last / np.maximum(first, 1e-30), PART_OF_ROWS).tolist():
        means, errors = _measure(*(trim_cells(assigned, reach) for assigned in pairs))
        if means[-1] - SURE * errors[-1] >= recall:
            return float(means[-1]), float(errors[-1]), reach
    return None


def _cost(counts: NDArray[np.float64], n_rows: int, width: int, k: int) -> float:
    """Nanoseconds a row on one core: pairs, copies, centroids; measured at 100 and 784 columns."""
    pairs, copies = float((counts**2).sum()) / n_rows, float(counts.sum()) / n_rows
    search = pairs * (0.0165 * width + 0.8) + copies * (1.5 * width + 60 * k + 1000)
    return float(search + len(counts) * 0.022 * width)


def _least_cost(n_cells: int, probe: Probe, k: int) -> float:
    """The cost if all cells were equal and did not overlap."""
    counts = np.full(n_cells, probe.n_total / n_cells)
    return _cost(counts, probe.n_total, probe.rows.shape[1], k)


def _make_buckets(
    centroids: NDArray[np.float32],
    cells: NDArray[np.int32],
    counts: NDArray[np.float64],
    most_rows: float,
) -> tuple[NDArray[np.int32], float]:
    """The bucket of each cell, and the drawn rows of the largest one."""
    n_cells = len(centroids)
    scale = counts.sum() / np.count_nonzero(cells >= 0)
    n_rows = scale * len(cells)
    costs = counts * (counts + 1000)
    wanted = min(max(LEAST_BUCKETS, -(-int(n_rows) // BUCKET_ROWS)), n_cells)
    while True:
        groups = group_cells(centroids, costs, wanted)
        _, buckets = rows_by_bucket(np.where(cells < 0, -1, groups[cells]))
        largest = float(np.bincount(buckets).max())
        if largest * scale <= most_rows or wanted == n_cells:
            return groups, largest
        wanted = min(2 * wanted, n_cells)


def rows_by_bucket(
    buckets: NDArray[np.int32],
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Each row with each of its buckets once, sorted by bucket, then row.

    buckets is (n, overlap), of a row's cells, -1 for none; the result is rows and buckets, (m,).
    """
    per_row = np.sort(buckets, axis=1)
    first = per_row >= 0
    first[:, 1:] &= per_row[:, 1:] != per_row[:, :-1]
    rows, found = np.nonzero(first)[0], per_row[first]
    order = np.argsort(found, kind="stable")
    return rows[order], found[order]


def _suffices(option: Option, config: CellSettings) -> bool:
    return config.overlap is not None or option.coverage - SURE * option.error >= config.recall


def _fits(option: Option, config: CellSettings, row_bytes: int) -> bool:
    return option.bucket_rows * row_bytes <= config.memory


def _explain(tried: list[Option], config: CellSettings, row_bytes: int) -> str:
    """What was tried in vain, as one line."""
    fitting = [option for option in tried if _fits(option, config, row_bytes)]
    sufficient = [option for option in tried if _suffices(option, config)] or tried
    smallest = min(sufficient, key=lambda option: option.bucket_rows)
    needed = smallest.bucket_rows * row_bytes // (1 << 20) + 1
    memory = f"needs {needed} MiB a task, neighbors.memory is {config.memory >> 20} MiB"
    if not fitting:
        what = f"{_name(smallest)} (finds {smallest.coverage:.3f})"
        return f"neighbors: {what} {memory}; raise it to {needed}MiB or lower neighbors.recall"
    best = max(fitting, key=lambda option: option.coverage)
    short = config.recall - best.coverage + SURE * best.error
    more = "" if len(fitting) == len(tried) else f"; {_name(smallest)} {memory}"
    return (
        f"neighbors: recall {config.recall:g} is not reached: {_name(best)} finds "
        f"{best.coverage:.3f} ± {best.error:.3f}, {short:.3f} too little{more}; "
        f"raise neighbors.memory or lower neighbors.recall"
    )


def _name(option: Option) -> str:
    return f"overlap {option.overlap} of {len(option.centroids)} cells"


@lru_cache(maxsize=1)
def read_cells(ref: StoreRef) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The centroid and the bucket of each cell, read once per process."""
    store = open_store(ref.folder, ref.digest)
    block = store.arrays(store.records[0])
    return block.read("centroids"), block.read("groups")


def prepare_assign(context: Context[CellSettings]) -> Plan:
    """Blocks of the sample."""
    sample = context.read("sample")
    facts = sample.manifest.facts
    row_bytes = facts["width"] * np.dtype(facts["dtype"]).itemsize
    return Plan(split_rows(sample.n_rows, assign_rows(context.settings, sample.n_rows, row_bytes)))


def assign_part(context: Context[CellSettings], partition: Partition, _: Report) -> Part:
    """A bucket file: row numbers, cells and vectors of the rows that go to each bucket."""
    metrics = context.read("centroids").records[0].metrics
    centroids, groups = read_cells(context.inputs["centroids"])
    vectors = context.read("sample").rows("vectors", partition.start, partition.stop)
    widened = widen(vectors, context.settings.metric)
    cells = trim_cells(assign_cells(widened, centroids, metrics["overlap"]), metrics["reach"])
    rows, buckets = rows_by_bucket(np.where(cells < 0, -1, groups[cells]))
    starts = np.searchsorted(buckets, np.arange(metrics["buckets"] + 1))
    arrays: dict[str, NDArray[Any]] = {
        "rows": rows + partition.start,
        "cells": cells[rows],
        "vectors": vectors[rows],
    }
    return Part(len(rows), buckets=Buckets(starts.astype(np.int64), arrays))


CENTROIDS = Stage(
    name="centroids",
    version=3,
    reads=("sample",),
    settings=settings,
    estimate=estimate_centroids,
    prepare=one_partition,
    do_part=train_part,
    finish=finish_centroids,
)
ASSIGN = Stage(
    name="assign",
    version=2,
    reads=("sample", "centroids"),
    settings=settings,
    estimate=estimate_assign,
    prepare=prepare_assign,
    do_part=assign_part,
)

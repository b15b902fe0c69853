"""neighbors: search inside each cell, merge per row, measure the recall.

search     cells → candidates, one task per slice of a cell's rows
neighbors  candidates → exactly k sorted neighbours of every row, one task per block of rows
recall     neighbours against exact search on seeded rows, with a confidence interval
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Job
from pipeline.kernels.neighbors import (
    Neighbors,
    best_of,
    mean_interval,
    merge_candidates,
    recall_per_query,
    search_exact,
    widen,
)
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
from pipeline.stages import cells

QUERIES_PER_TASK = 8192


@dataclass(frozen=True)
class NeighborSettings:
    """What the neighbours depend on, beside the cells."""

    k: int
    metric: str


@dataclass(frozen=True)
class RecallSettings:
    """What the measured recall depends on, beside the neighbours."""

    k: int
    metric: str
    queries: int
    seed: int


class Cell(NamedTuple):
    """All rows of one cell, by row number."""

    rows: NDArray[np.int64]
    vectors: NDArray[np.float32]


def settings(job: Job) -> NeighborSettings:
    """The settings of search and merge."""
    return NeighborSettings(job.neighbors.k, job.neighbors.metric)


def recall_settings(job: Job) -> RecallSettings:
    """The settings of the recall measurement."""
    config = job.neighbors
    return RecallSettings(config.k, config.metric, config.recall_queries, config.seed)


def estimate_search(job: Job, shape: Shape) -> Estimate:
    """One task holds its cell (perhaps thrice the average), for a moment also the last one."""
    config = cells.settings(job)
    n_cells = cells.count_cells(config, shape.n_train)
    copies = shape.n_train * min(config.overlap, n_cells)
    cell_rows = min(shape.n_train, copies // n_cells * (1 if n_cells == 1 else 3))
    vectors = cell_rows * (shape.width * 12 + shape.row_bytes)
    results = QUERIES_PER_TASK * job.neighbors.k * 48
    n_parts = max(n_cells, copies // QUERIES_PER_TASK)
    store = copies * (job.neighbors.k * 12 + 8)
    return Estimate(n_parts, PROCESS_BYTES + vectors + results, store)


def estimate_merge(job: Job, shape: Shape) -> Estimate:
    """One task holds the candidates of a block and their sort."""
    overlap = min(job.neighbors.overlap, cells.count_cells(cells.settings(job), shape.n_train))
    task = PROCESS_BYTES + shape.block_rows * job.neighbors.k * overlap * 100
    return Estimate(shape.n_blocks, task, shape.n_train * job.neighbors.k * 12)


def estimate_recall(job: Job, shape: Shape) -> Estimate:
    """One task holds the queries and one block of the sample."""
    rows = job.neighbors.recall_queries + 3 * shape.block_rows
    return Estimate(1, PROCESS_BYTES + rows * shape.width * 4, 1000)


def prepare_search(context: Context[NeighborSettings]) -> Plan:
    """Slices of the cells; rows are numbered cell after cell."""
    assign = context.read("assign")
    sizes = sum(np.diff(assign.arrays(record).read("starts")) for record in assign.records)
    cell_starts = np.concatenate([[0], np.cumsum(sizes)])
    parts: list[Partition] = []
    for start, size in zip(cell_starts, np.asarray(sizes), strict=False):
        for part in split_rows(int(size), QUERIES_PER_TASK):
            place = int(start)
            parts.append(Partition(len(parts), place + part.start, place + part.stop))
    return Plan(parts, {"cell_starts": cell_starts.tolist()})


def search_part(context: Context[NeighborSettings], partition: Partition, _: Report) -> Part:
    """Candidates of a slice of one cell's rows, in order of row number."""
    cell_starts = context.facts["cell_starts"]
    number = int(np.searchsorted(cell_starts, partition.start, side="right")) - 1
    cell = _read_cell(context.inputs["assign"], number, context.settings.metric)
    inside = slice(partition.start - cell_starts[number], partition.stop - cell_starts[number])
    found = search_exact(
        cell.vectors[inside], cell.rows[inside], cell.vectors, cell.rows, context.settings.k
    )
    rows = cell.rows[inside]
    arrays: dict[str, NDArray[Any]] = {"rows": rows, **found._asdict()}
    span = {"first_row": int(rows[0]), "last_row": int(rows[-1])}
    return Part(len(rows), arrays=arrays, metrics=span)


@lru_cache(maxsize=1)
def _read_cell(ref: StoreRef, number: int, metric: str) -> Cell:
    """The cell's rows from every bucket file; kept for the cell's next slice."""
    assign = open_store(ref.folder, ref.digest)
    rows, vectors = [], []
    for record in assign.records:
        block = assign.arrays(record)
        start, stop = block.read("starts", number, number + 2)
        if stop > start:
            rows.append(block.read("rows", start, stop))
            vectors.append(widen(block.read("vectors", start, stop), metric))
    return Cell(np.concatenate(rows), np.concatenate(vectors))


def prepare_merge(context: Context[NeighborSettings]) -> Plan:
    """Blocks of the sample, as `assign` has them."""
    return Plan([record.partition for record in context.read("assign").records])


def merge_part(context: Context[NeighborSettings], partition: Partition, _: Report) -> Part:
    """Exactly k neighbours of every row of the block."""
    search, k = context.read("search"), context.settings.k
    candidates = [
        _candidates(search, record, partition)
        for record in search.records
        if record.metrics["first_row"] < partition.stop
        and record.metrics["last_row"] >= partition.start
    ]
    rows, ids, distances = (np.concatenate(column) for column in zip(*candidates, strict=True))
    found = merge_candidates(
        partition.n_rows, np.repeat(rows, k), ids.ravel(), distances.ravel(), k
    )
    found = _fill_short_rows(context, partition, found)
    return Part(partition.n_rows, arrays=found._asdict())


def _candidates(search: Store, record: Record, partition: Partition) -> tuple[NDArray[Any], ...]:
    """The block's rows (counted in the block), candidate ids and distances in one search part."""
    block = search.arrays(record)
    rows = block.read("rows")
    start, stop = np.searchsorted(rows, [partition.start, partition.stop])
    return (
        rows[start:stop] - partition.start,
        block.read("ids", start, stop),
        block.read("distances", start, stop),
    )


def _fill_short_rows(
    context: Context[NeighborSettings], partition: Partition, found: Neighbors
) -> Neighbors:
    """The same neighbours; rows left short by small cells are searched in the whole sample."""
    short = np.flatnonzero(found.ids[:, -1] < 0)
    if not len(short):
        return found
    exact = _search_sample(context, short + partition.start)
    found.ids[short], found.distances[short] = exact
    return found


def _search_sample(context: Context[Any], queries: NDArray[np.int64]) -> Neighbors:
    """Exact neighbours of the rows of those (sorted) numbers; the sample is read block by block."""
    sample, k, metric = context.read("sample"), context.settings.k, context.settings.metric
    blocks = split_rows(sample.n_rows, QUERIES_PER_TASK)
    vectors = np.concatenate([_pick(sample, queries, block, metric) for block in blocks])
    best: Neighbors | None = None
    for block in blocks:
        rows = widen(sample.rows("vectors", block.start, block.stop), metric)
        numbers = np.arange(block.start, block.stop, dtype=np.int64)
        found = search_exact(vectors, queries, rows, numbers, k)
        best = found if best is None else best_of(best, found, k)
    assert best is not None
    return best


def _pick(
    sample: Store, queries: NDArray[np.int64], block: Partition, metric: str
) -> NDArray[np.float32]:
    start, stop = np.searchsorted(queries, [block.start, block.stop])
    if start == stop:
        return np.empty((0, sample.manifest.facts["width"]), np.float32)
    rows = sample.rows("vectors", block.start, block.stop)
    return widen(rows[queries[start:stop] - block.start], metric)


def recall_part(context: Context[RecallSettings], _: Partition, __: Report) -> Part:
    """Share of the true k nearest that were found, on seeded rows."""
    config, neighbors = context.settings, context.read("neighbors")
    seed = [config.seed, crc32(b"recall")]
    queries = np.sort(draw_positions(neighbors.n_rows, config.queries, seed))
    exact = _search_sample(context, queries)
    found = _read_neighbors(neighbors, queries)
    mean, low, high = mean_interval(recall_per_query(found, exact))
    metrics = {"recall": mean, "recall_low": low, "recall_high": high, "n_queries": len(queries)}
    return Part(len(queries), metrics=metrics)


def _read_neighbors(neighbors: Store, queries: NDArray[np.int64]) -> Neighbors:
    """The stored neighbours of the rows of those (sorted) numbers."""
    ids, distances = [], []
    for record in neighbors.records:
        part, block = record.partition, neighbors.arrays(record)
        inside = queries[(queries >= part.start) & (queries < part.stop)] - part.start
        ids.append(block.read("ids")[inside])
        distances.append(block.read("distances")[inside])
    return Neighbors(np.concatenate(ids), np.concatenate(distances))


def finish_recall(_: Context[RecallSettings], records: list[Record]) -> dict[str, Any]:
    """The recall and its 95% interval."""
    return records[0].metrics


SEARCH = Stage(
    name="search",
    version=1,
    reads=("assign",),
    settings=settings,
    estimate=estimate_search,
    prepare=prepare_search,
    do_part=search_part,
)
NEIGHBORS = Stage(
    name="neighbors",
    version=1,
    reads=("sample", "assign", "search"),
    settings=settings,
    estimate=estimate_merge,
    prepare=prepare_merge,
    do_part=merge_part,
)
RECALL = Stage(
    name="recall",
    version=1,
    reads=("sample", "neighbors"),
    settings=recall_settings,
    estimate=estimate_recall,
    prepare=one_partition,
    do_part=recall_part,
    finish=finish_recall,
)

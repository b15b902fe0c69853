"""neighbors: search inside each cell, merge per row, measure the recall.

search     cells → lists of neighbours, one task per bucket, a group of neighbouring cells
neighbors  lists → exactly k sorted neighbours of every row, one task per block of rows
recall     neighbours against exact search on seeded rows, with a confidence interval
"""

from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Job
from pipeline.kernels.neighbors import (
    Neighbors,
    empty_neighbors,
    group_members,
    mean_interval,
    merge_found,
    recall_per_query,
    search_cells,
    search_exact,
    widen,
)
from pipeline.kernels.sampling import draw_positions
from pipeline.manifest import Part, Plan, Record, Store
from pipeline.partitions import Partition, graph_rows, split_rows
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage
from pipeline.stages import cells
from pipeline.stores import Buckets

BLOCK_ROWS = 8192  # of the sample that are compared with queries at once
QUERIES_PER_TASK = 500  # each task reads the whole sample


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


class Bucket(NamedTuple):
    """All rows of one bucket, by row number: their cells, everywhere, and vectors."""

    rows: NDArray[np.int64]
    cells: NDArray[np.int32]
    vectors: NDArray[np.float32]


def settings(job: Job) -> NeighborSettings:
    """The settings of search and merge."""
    return NeighborSettings(job.neighbors.k, job.neighbors.metric)


def recall_settings(job: Job) -> RecallSettings:
    """The settings of the recall measurement."""
    config = job.neighbors
    return RecallSettings(config.k, config.metric, config.recall_queries, config.seed)


def estimate_search(job: Job, shape: Shape) -> Estimate:
    """One task holds a bucket, as much of it as neighbors.memory allows."""
    config = cells.settings(job)
    n_parts = max(cells.LEAST_BUCKETS, shape.n_train // cells.BUCKET_ROWS)
    row = cells.bucket_row_bytes(shape.width, shape.item_bytes, job.neighbors.k)
    task = PROCESS_BYTES + min(config.memory, shape.n_train * row)
    store = shape.n_train * min(config.overlap or 4, 4) * (job.neighbors.k * 12 + 8)
    return Estimate(n_parts, task, store)


def estimate_merge(job: Job, shape: Shape) -> Estimate:
    """One task holds the lists of a block, those of one bucket, and their encoding."""
    task = PROCESS_BYTES + shape.graph_rows * job.neighbors.k * 12 * 4
    return Estimate(shape.n_graph_blocks, task, shape.n_train * job.neighbors.k * 12)


def estimate_recall(job: Job, shape: Shape) -> Estimate:
    """One task holds its queries and one block of the sample."""
    n_parts = -(-min(job.neighbors.recall_queries, shape.n_train) // QUERIES_PER_TASK)
    rows = QUERIES_PER_TASK + 3 * BLOCK_ROWS
    return Estimate(n_parts, PROCESS_BYTES + rows * shape.width * 4, 1000)


def prepare_search(context: Context[NeighborSettings]) -> Plan:
    """One task per bucket that has rows, large ones first; rows are numbered task after task."""
    assign = context.read("assign")
    sizes = np.sum([assign.bucket_index(record).n_rows for record in assign.records], axis=0)
    buckets = [int(bucket) for bucket in np.argsort(-sizes, kind="stable") if sizes[bucket]]
    stops = np.cumsum(sizes[buckets]).tolist()
    parts = [
        Partition(index, stop - int(sizes[bucket]), stop)
        for index, (bucket, stop) in enumerate(zip(buckets, stops, strict=True))
    ]
    return Plan(parts, {"buckets": buckets})


def search_part(context: Context[NeighborSettings], partition: Partition, _: Report) -> Part:
    """Lists of a bucket's rows, as a bucket file by the block of the graph that they go to."""
    number, k = context.facts["buckets"][partition.index], context.settings.k
    bucket = _read_bucket(context, number, partition.n_rows)
    inside = _cells_inside(context, number, bucket)
    found = search_cells(bucket.vectors, group_members(bucket.cells, inside), k)
    _complete(found, bucket, inside[:, 0])
    # A list may still be short, of a row that another bucket completes: -1 stays -1.
    ids = np.where(found.ids < 0, -1, bucket.rows[found.ids])
    blocks = split_rows(context.read("sample").n_rows, graph_rows(context.read("sample").n_rows))
    starts = np.searchsorted(bucket.rows, [block.start for block in blocks] + [blocks[-1].stop])
    arrays = {"rows": bucket.rows, "ids": ids, "distances": found.distances}
    return Part(partition.n_rows, buckets=Buckets(starts.astype(np.int64), arrays))


def _read_bucket(context: Context[NeighborSettings], number: int, n_rows: int) -> Bucket:
    """The bucket's rows out of every bucket file, in order of row number."""
    assign, metric = context.read("assign"), context.settings.metric
    width = context.read("sample").manifest.facts["width"]
    vectors = np.empty((n_rows, width), np.float32)
    rows, row_cells, at = [], [], 0
    for record in assign.records:
        part = assign.bucket(record, number)
        rows.append(part["rows"])
        row_cells.append(part["cells"])
        vectors[at : at + len(part["rows"])] = widen(part["vectors"], metric)
        at += len(part["rows"])
    return Bucket(np.concatenate(rows), np.concatenate(row_cells), vectors)


def _cells_inside(
    context: Context[NeighborSettings], number: int, bucket: Bucket
) -> NDArray[np.bool_]:
    """Which of the rows' cells, (n, overlap), lie in this bucket."""
    _, groups = cells.read_cells(context.inputs["centroids"])
    return np.asarray((groups[bucket.cells] == number) & (bucket.cells >= 0))


def _complete(found: Neighbors, bucket: Bucket, at_home: NDArray[np.bool_]) -> None:
    """Search the whole bucket for rows at home in it that small cells have left short."""
    short = np.flatnonzero(at_home & (found.ids[:, -1] < 0))
    if len(short):
        every, k = np.arange(len(bucket.rows)), found.ids.shape[1]
        exact = search_exact(bucket.vectors[short], short, bucket.vectors, every, k)
        found.ids[short], found.distances[short] = exact


def prepare_merge(context: Context[NeighborSettings]) -> Plan:
    """Blocks of the graph."""
    n_rows = context.read("sample").n_rows
    return Plan(split_rows(n_rows, graph_rows(n_rows)))


def merge_part(context: Context[NeighborSettings], partition: Partition, _: Report) -> Part:
    """Exactly k neighbours of every row of the block."""
    search = context.read("search")
    found = empty_neighbors(partition.n_rows, context.settings.k)
    for record in search.records:
        part = search.bucket(record, partition.index)
        more = Neighbors(part["ids"], part["distances"])
        merge_found(found, part["rows"] - partition.start, more)
    found = _fill_short_rows(context, partition, found)
    return Part(partition.n_rows, arrays=found._asdict())


def _fill_short_rows(
    context: Context[NeighborSettings], partition: Partition, found: Neighbors
) -> Neighbors:
    """The same neighbours; rows left short by a small bucket are searched in the whole sample."""
    short = np.flatnonzero(found.ids[:, -1] < 0)
    if not len(short):
        return found
    exact = _search_sample(context, short + partition.start)
    found.ids[short], found.distances[short] = exact
    return found


def _search_sample(context: Context[Any], queries: NDArray[np.int64]) -> Neighbors:
    """Exact neighbours of the rows of those (sorted) numbers; the sample is read block by block."""
    sample, k, metric = context.read("sample"), context.settings.k, context.settings.metric
    blocks = split_rows(sample.n_rows, BLOCK_ROWS)
    vectors = np.concatenate([_pick(sample, queries, block, metric) for block in blocks])
    best, every = empty_neighbors(len(queries), k), np.arange(len(queries))
    for block in blocks:
        rows = widen(sample.rows("vectors", block.start, block.stop), metric)
        numbers = np.arange(block.start, block.stop, dtype=np.int64)
        merge_found(best, every, search_exact(vectors, queries, rows, numbers, k))
    return best


def _pick(
    sample: Store, queries: NDArray[np.int64], block: Partition, metric: str
) -> NDArray[np.float32]:
    start, stop = np.searchsorted(queries, [block.start, block.stop])
    if start == stop:
        return np.empty((0, sample.manifest.facts["width"]), np.float32)
    rows = sample.rows("vectors", block.start, block.stop)
    return widen(rows[queries[start:stop] - block.start], metric)


def prepare_recall(context: Context[RecallSettings]) -> Plan:
    """Parts of the queries."""
    n_queries = min(context.settings.queries, context.read("sample").n_rows)
    return Plan(split_rows(n_queries, QUERIES_PER_TASK))


def recall_part(context: Context[RecallSettings], partition: Partition, _: Report) -> Part:
    """Shares of the true k nearest that were found, on seeded rows."""
    config, neighbors = context.settings, context.read("neighbors")
    seed = [config.seed, crc32(b"recall")]
    drawn = np.sort(draw_positions(neighbors.n_rows, config.queries, seed))
    queries = drawn[partition.start : partition.stop]
    exact = _search_sample(context, queries)
    found = _read_neighbors(neighbors, queries)
    return Part(len(queries), metrics={"shares": recall_per_query(found, exact).tolist()})


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
    shares = np.concatenate([record.metrics["shares"] for record in records])
    mean, low, high = mean_interval(shares)
    return {"recall": mean, "recall_low": low, "recall_high": high, "n_queries": len(shares)}


SEARCH = Stage(
    name="search",
    version=2,
    reads=("sample", "centroids", "assign"),
    settings=settings,
    estimate=estimate_search,
    prepare=prepare_search,
    do_part=search_part,
)
NEIGHBORS = Stage(
    name="neighbors",
    version=2,
    reads=("sample", "search"),
    settings=settings,
    estimate=estimate_merge,
    prepare=prepare_merge,
    do_part=merge_part,
)
RECALL = Stage(
    name="recall",
    version=2,
    reads=("sample", "neighbors"),
    settings=recall_settings,
    estimate=estimate_recall,
    prepare=prepare_recall,
    do_part=recall_part,
    finish=finish_recall,
)

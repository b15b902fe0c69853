"""sample: a uniform sample of rows to train on, and rows apart from it to measure the map with.

Held-out rows are never trained on. Which rows are drawn depends on the seed and on the lake's
partitions, never on the workers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Job
from pipeline.kernels.sampling import draw_positions
from pipeline.lake import Source
from pipeline.manifest import Part, Plan, Record, Store
from pipeline.partitions import Partition, block_rows
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage
from pipeline.stages.ingest import lake_source, read_good_rows

# A task that picks few rows from each partition still reads them whole; this bounds its time.
MOST_PARTITIONS_PER_TASK = 64

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class SampleSettings:
    """What the sample depends on."""

    source: Source
    rows: int
    seed: int
    evaluate_rows: int


class Drawn(NamedTuple):
    """Sorted positions among the trainable rows and among the rows that measure."""

    train: Positions
    evaluate: Positions


def settings(job: Job) -> SampleSettings:
    """The sample's settings."""
    return SampleSettings(lake_source(job), job.sample.rows, job.sample.seed, job.evaluate.rows)


def estimate(job: Job, shape: Shape) -> Estimate:
    """One task holds a partition of the lake and the rows drawn so far."""
    rows = shape.n_train + job.evaluate.rows
    task = PROCESS_BYTES + 6 * int(job.input.partition_bytes)
    return Estimate(min(shape.n_partitions, shape.n_blocks), task, rows * (shape.row_bytes + 16))


def prepare(context: Context[SampleSettings]) -> Plan:
    """Runs of the lake's partitions that give about one block of the sample each."""
    ingest = context.read("ingest")
    width, dtype = ingest.manifest.facts["width"], ingest.manifest.facts["dtype"]
    n_trainable = ingest.n_rows - ingest.manifest.metrics["n_holdout"]
    n_train = min(context.settings.rows, n_trainable)
    wanted = block_rows(width * np.dtype(dtype).itemsize)
    rows_per_task = max(1, wanted * n_trainable // max(1, n_train))
    facts = {
        "width": width,
        "dtype": dtype,
        "evaluated_on": _evaluated_on(context.settings, ingest),
    }
    return Plan(_group(ingest.records, rows_per_task), facts)


def _group(records: Any, rows_per_task: int) -> list[Partition]:
    """Partitions whose start and stop are partition numbers of the lake."""
    groups: list[Partition] = []
    start, rows = 0, 0
    for index, record in enumerate(records):
        full = rows + record.n_rows > rows_per_task or index - start >= MOST_PARTITIONS_PER_TASK
        if full and index > start:
            groups.append(Partition(len(groups), start, index))
            start, rows = index, 0
        rows += record.n_rows
    return [*groups, Partition(len(groups), start, len(records))]


def _evaluated_on(config: SampleSettings, ingest: Store) -> str:
    if ingest.manifest.metrics["n_holdout"]:
        return "held-out rows"
    return "rows outside the sample" if config.rows < ingest.n_rows else "training rows"


@lru_cache(maxsize=2)
def draw(n_trainable: int, n_holdout: int, config: SampleSettings) -> Drawn:
    """Positions of the rows to train on and to measure with; memory O(rows drawn)."""
    seed = [config.seed, crc32(b"sample")]
    n_train = min(config.rows, n_trainable)
    if n_holdout:
        evaluate = draw_positions(n_holdout, config.evaluate_rows, [*seed, 1])
        return Drawn(np.sort(draw_positions(n_trainable, n_train, seed)), np.sort(evaluate))
    positions = draw_positions(n_trainable, n_train + config.evaluate_rows, seed)
    outside = positions[n_train:]
    if not len(outside):  # every row trains; measure on some of them
        outside = positions[: config.evaluate_rows]
    return Drawn(np.sort(positions[:n_train]), np.sort(outside))


def do_part(context: Context[SampleSettings], partition: Partition, _: Report) -> Part:
    """Vectors of the rows drawn from a run of the lake's partitions, and where they lie."""
    ingest = context.read("ingest")
    n_holdout = ingest.manifest.metrics["n_holdout"]
    drawn = draw(ingest.n_rows - n_holdout, n_holdout, context.settings)
    holdout_starts = _starts(record.metrics["n_holdout"] for record in ingest.records)
    starts = _starts(record.n_rows for record in ingest.records)
    blocks = []
    for index in range(partition.start, partition.stop):
        trainable = slice(*(starts - holdout_starts)[index : index + 2])
        held_out = slice(*holdout_starts[index : index + 2])
        train = _within(drawn.train, trainable)
        evaluate = _within(drawn.evaluate, held_out if n_holdout else trainable)
        blocks.append(_take(context, ingest.records[index], train, evaluate))
    arrays = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    n_evaluate = len(arrays["evaluate_rank"])
    return Part(len(arrays["rank"]), arrays=arrays, metrics={"n_evaluate": n_evaluate})


def _starts(counts: Iterable[int]) -> Positions:
    """Where each partition starts, and last where all end."""
    return np.cumsum([0, *counts], dtype=np.int64)


def _within(positions: Positions, span: slice) -> Positions:
    """The positions inside the span, counted from its start."""
    low, high = np.searchsorted(positions, [span.start, span.stop])
    inside: Positions = positions[low:high] - span.start
    return inside


def _take(
    context: Context[SampleSettings], record: Record, train: Positions, evaluate: Positions
) -> dict[str, NDArray[Any]]:
    """The drawn rows of one partition: vectors, partition number, rank among its good rows."""
    index, ingest = record.partition.index, context.read("ingest")
    if not len(train) and not len(evaluate):
        nothing = np.empty((0, context.facts["width"]), context.facts["dtype"])
        return _located(nothing, index, train, evaluate)
    rows = read_good_rows(context.settings.source, ingest, record).rows
    if rows.lost:  # what is left of the partition no longer has the ranks that were drawn
        train = evaluate = train[:0]
    trainable = np.flatnonzero(~rows.holdout)
    apart = ingest.manifest.metrics["n_holdout"] > 0
    measuring = np.flatnonzero(rows.holdout) if apart else trainable
    return _located(rows.vectors, index, trainable[train], measuring[evaluate])


def _located(
    vectors: NDArray[Any], index: int, train: Positions, evaluate: Positions
) -> dict[str, NDArray[Any]]:
    return {
        "vectors": vectors[train],
        "partition": np.full(len(train), index, np.int64),
        "rank": train.astype(np.int64),
        "evaluate_vectors": vectors[evaluate],
        "evaluate_partition": np.full(len(evaluate), index, np.int64),
        "evaluate_rank": evaluate.astype(np.int64),
    }


SAMPLE = Stage(
    name="sample",
    version=1,
    reads=("ingest",),
    settings=settings,
    estimate=estimate,
    prepare=prepare,
    do_part=do_part,
)

"""affinity: distances to perplexity-calibrated p(j|i), stored by row and, transposed, by column."""

from typing import Any

import numpy as np

from pipeline.config import AffinityConfig, Job
from pipeline.kernels.affinity import calibrate
from pipeline.manifest import Part, Plan, Record
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage


def settings(job: Job) -> AffinityConfig:
    """The affinity section."""
    return job.affinity


def estimate(job: Job, shape: Shape) -> Estimate:
    """One task holds a block's distances, affinities and their transpose."""
    entries = shape.block_rows * job.neighbors.k
    return Estimate(
        shape.n_blocks, PROCESS_BYTES + entries * 80, shape.n_train * job.neighbors.k * 24
    )


def prepare(context: Context[AffinityConfig]) -> Plan:
    """The blocks of the neighbours; their starts cut the transposed entries."""
    parts = [record.partition for record in context.read("neighbors").records]
    starts = [part.start for part in parts] + [parts[-1].stop]
    return Plan(parts, {"block_starts": starts})


def do_part(context: Context[AffinityConfig], partition: Partition, _: Report) -> Part:
    """A block's affinities, and the same entries sorted by column: a bucket file."""
    neighbors = context.read("neighbors")
    ids = neighbors.rows("ids", partition.start, partition.stop)
    distances = neighbors.rows("distances", partition.start, partition.stop)
    found = calibrate(distances, context.settings.perplexity)
    order = np.argsort(ids, axis=None, kind="stable")
    columns = ids.ravel()[order]
    arrays = {
        "values": found.affinities,
        "column_rows": columns,
        "column_columns": order // ids.shape[1] + partition.start,
        "column_values": found.affinities.ravel()[order],
        "column_starts": np.searchsorted(columns, context.facts["block_starts"]).astype(np.int64),
    }
    wanted = context.settings.perplexity
    off = np.abs(found.perplexity / wanted - 1)[found.solved]
    metrics = {
        "n_unsolved": int((~found.solved).sum()),
        "worst_error": float(off.max(initial=0.0)),
    }
    return Part(partition.n_rows, arrays=arrays, metrics=metrics)


def finish(_: Context[AffinityConfig], records: list[Record]) -> dict[str, Any]:
    """Rows without a solution (ties), and the worst relative error of the perplexity."""
    return {
        "n_unsolved": sum(record.metrics["n_unsolved"] for record in records),
        "worst_error": max(record.metrics["worst_error"] for record in records),
    }


AFFINITY = Stage(
    name="affinity",
    version=1,
    reads=("neighbors",),
    settings=settings,
    estimate=estimate,
    prepare=prepare,
    do_part=do_part,
    finish=finish,
)

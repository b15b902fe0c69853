"""symmetrize: p(j|i) and p(i|j) to the joint P, as CSR blocks of rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config import Job
from pipeline.kernels.symmetrize import Entries, joint_probabilities
from pipeline.manifest import Part, Plan, Record
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage


@dataclass(frozen=True)
class SymmetrizeSettings:
    """Nothing: P follows from the affinities."""


def settings(_: Job) -> SymmetrizeSettings:
    """The (empty) settings."""
    return SymmetrizeSettings()


def estimate(job: Job, shape: Shape) -> Estimate:
    """One task holds a block's forward and reverse entries; hubs may triple the latter."""
    entries = shape.block_rows * job.neighbors.k * 4
    store = shape.n_train * job.neighbors.k * 2 * 12
    return Estimate(shape.n_blocks, PROCESS_BYTES + entries * 80, store)


def prepare(context: Context[SymmetrizeSettings]) -> Plan:
    """The blocks of the affinities."""
    return Plan([record.partition for record in context.read("affinity").records])


def do_part(context: Context[SymmetrizeSettings], partition: Partition, _: Report) -> Part:
    """Rows start..stop of P."""
    n_total = context.read("neighbors").n_rows
    forward, reverse = _forward(context, partition), _reverse(context, partition)
    graph = joint_probabilities(partition.n_rows, forward, reverse, n_total)
    mass = float(graph.values.sum(dtype=np.float64))
    metrics = {"mass": mass, "n_entries": len(graph.values)}
    return Part(partition.n_rows, arrays=graph._asdict(), metrics=metrics)


def _forward(context: Context[SymmetrizeSettings], partition: Partition) -> Entries:
    """Entries p(j|i) of the block's own rows."""
    ids = context.read("neighbors").rows("ids", partition.start, partition.stop)
    values = context.read("affinity").rows("values", partition.start, partition.stop)
    rows = np.repeat(np.arange(partition.n_rows), ids.shape[1])
    return Entries(rows, ids.ravel(), values.ravel())


def _reverse(context: Context[SymmetrizeSettings], partition: Partition) -> Entries:
    """Entries p(i|j) of all rows j that have a row i of this block as neighbour."""
    affinity = context.read("affinity")
    rows, columns = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    values = [np.empty(0, np.float32)]
    for record in affinity.records:
        block = affinity.arrays(record)
        start, stop = block.read("column_starts", partition.index, partition.index + 2)
        if stop > start:
            rows.append(block.read("column_rows", start, stop) - partition.start)
            columns.append(block.read("column_columns", start, stop))
            values.append(block.read("column_values", start, stop))
    return Entries(np.concatenate(rows), np.concatenate(columns), np.concatenate(values))


def finish(_: Context[SymmetrizeSettings], records: list[Record]) -> dict[str, Any]:
    """Sum and number of the entries of P."""
    return {
        "mass": sum(record.metrics["mass"] for record in records),
        "n_entries": sum(record.metrics["n_entries"] for record in records),
    }


SYMMETRIZE = Stage(
    name="symmetrize",
    version=1,
    reads=("neighbors", "affinity"),
    settings=settings,
    estimate=estimate,
    prepare=prepare,
    do_part=do_part,
    finish=finish,
)

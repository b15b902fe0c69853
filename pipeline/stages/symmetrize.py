"""symmetrize: affinities in one direction to a symmetric graph, as CSR blocks of rows.

transpose   one task per block: its entries, in a bucket file by the block of their neighbour
symmetrize  one task per block: its own entries and its bucket of every file, joined
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.config import Job
from pipeline.kernels.symmetrize import (
    Received,
    join_memberships,
    join_probabilities,
    send_entries,
)
from pipeline.manifest import Part, Plan, Record
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage
from pipeline.stores import Buckets

JOIN = {"gaussian": join_probabilities, "umap": join_memberships}


@dataclass(frozen=True)
class TransposeSettings:
    """Nothing: where an entry goes follows from the neighbours."""


@dataclass(frozen=True)
class SymmetrizeSettings:
    """How two directions become one: the mean of p(j|i) and p(i|j), or UMAP's fuzzy union."""

    kind: Literal["gaussian", "umap"]


def transpose_settings(_: Job) -> TransposeSettings:
    """The (empty) settings."""
    return TransposeSettings()


def settings(job: Job) -> SymmetrizeSettings:
    """The kind of affinity."""
    return SymmetrizeSettings(job.affinity_kind)


def graph_entries(job: Job, shape: Shape) -> int:
    """Entries that one block of the symmetric graph may have.

    Its own; thrice as many that come from other rows, where the average is as many; and those of
    one row that is everyone's neighbour.
    """
    return 4 * shape.graph_rows * job.neighbors.k + shape.n_train


def estimate_transpose(job: Job, shape: Shape) -> Estimate:
    """One task holds a block's entries, their order, and the bucket file twice."""
    entries = shape.graph_rows * job.neighbors.k
    store = shape.n_train * job.neighbors.k * 8
    return Estimate(shape.n_graph_blocks, PROCESS_BYTES + entries * 48, store)


def estimate(job: Job, shape: Shape) -> Estimate:
    """One task holds a block's entries in both directions, and joined."""
    store = shape.n_train * job.neighbors.k * 2 * 12
    task = PROCESS_BYTES + graph_entries(job, shape) * 64
    return Estimate(shape.n_graph_blocks, task, store)


def prepare_transpose(context: Context[TransposeSettings]) -> Plan:
    """The blocks of the neighbours; their starts say where an entry goes."""
    parts = [record.partition for record in context.read("neighbors").records]
    return Plan(parts, {"block_starts": [part.start for part in parts] + [parts[-1].stop]})


def prepare(context: Context[SymmetrizeSettings]) -> Plan:
    """The blocks of the neighbours."""
    return Plan([record.partition for record in context.read("neighbors").records])


def transpose_part(context: Context[TransposeSettings], partition: Partition, _: Report) -> Part:
    """A block's entries by the block of their neighbour."""
    ids, values = _read_block(context, partition)
    starts, *arrays = send_entries(ids, values, np.array(context.facts["block_starts"]))
    names = ("targets", "sources", "values")
    return Part(partition.n_rows, buckets=Buckets(starts, dict(zip(names, arrays, strict=True))))


def do_part(context: Context[SymmetrizeSettings], partition: Partition, _: Report) -> Part:
    """Rows start..stop of the symmetric graph."""
    ids, values = _read_block(context, partition)
    join = JOIN[context.settings.kind]
    graph = join(ids, values, _receive(context, partition), context.read("neighbors").n_rows)
    mass = float(graph.values.sum(dtype=np.float64))
    metrics = {"mass": mass, "n_entries": len(graph.values)}
    return Part(partition.n_rows, arrays=graph._asdict(), metrics=metrics)


def _read_block(context: Context[Any], partition: Partition) -> tuple[Any, Any]:
    """Ids and values of the block's neighbours, (n, k) each."""
    neighbors, affinity = context.read("neighbors"), context.read("affinity")
    ids = neighbors.arrays(neighbors.records[partition.index]).read("ids")
    return ids, affinity.arrays(affinity.records[partition.index]).read("values")


def _receive(context: Context[SymmetrizeSettings], partition: Partition) -> Received:
    """Entries of all rows that have a row of this block as neighbour."""
    transpose = context.read("transpose")
    found = [transpose.bucket(record, partition.index) for record in transpose.records]
    starts = [record.partition.start for record in transpose.records]
    return Received(
        np.concatenate([bucket["targets"] for bucket in found]),
        np.concatenate(
            [
                bucket["sources"].astype(np.int64) + start
                for bucket, start in zip(found, starts, strict=True)
            ]
        ),
        np.concatenate([bucket["values"] for bucket in found]),
    )


def finish(_: Context[SymmetrizeSettings], records: list[Record]) -> dict[str, Any]:
    """Sum and number of the graph's entries."""
    return {
        "mass": sum(record.metrics["mass"] for record in records),
        "n_entries": sum(record.metrics["n_entries"] for record in records),
    }


TRANSPOSE = Stage(
    name="transpose",
    version=1,
    reads=("neighbors", "affinity"),
    settings=transpose_settings,
    estimate=estimate_transpose,
    prepare=prepare_transpose,
    do_part=transpose_part,
)
SYMMETRIZE = Stage(
    name="symmetrize",
    version=2,
    reads=("neighbors", "affinity", "transpose"),
    settings=settings,
    estimate=estimate,
    prepare=prepare,
    do_part=do_part,
    finish=finish,
)

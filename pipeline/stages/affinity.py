"""affinity: distances to how strongly each row is drawn to its neighbours.

gaussian  p(j|i) of the requested perplexity
umap      memberships, which follow from the number of neighbours alone
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Job
from pipeline.kernels.affinity import calibrate
from pipeline.kernels.memberships import find_memberships
from pipeline.manifest import Part, Plan, Record
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage


@dataclass(frozen=True)
class AffinitySettings:
    """What the affinities depend on; memberships know no perplexity."""

    kind: Literal["gaussian", "umap"]
    perplexity: float | None


def settings(job: Job) -> AffinitySettings:
    """The affinity section, less what its kind does not use."""
    kind = job.affinity_kind
    return AffinitySettings(kind, job.affinity.perplexity if kind == "gaussian" else None)


def estimate(job: Job, shape: Shape) -> Estimate:
    """One task holds a block's distances and values, and the values once more when encoded."""
    entries = shape.graph_rows * job.neighbors.k
    store = shape.n_train * job.neighbors.k * 4
    return Estimate(shape.n_graph_blocks, PROCESS_BYTES + entries * 24, store)


def prepare(context: Context[AffinitySettings]) -> Plan:
    """The blocks of the neighbours."""
    return Plan([record.partition for record in context.read("neighbors").records])


def do_part(context: Context[AffinitySettings], partition: Partition, _: Report) -> Part:
    """A block's affinities, aligned with the neighbours."""
    neighbors = context.read("neighbors")
    distances = neighbors.arrays(neighbors.records[partition.index]).read("distances")
    values, off, solved = _weigh(distances, context.settings)
    metrics = {
        "n_unsolved": int((~solved).sum()),
        "worst_error": float(off[solved].max(initial=0.0)),
    }
    return Part(partition.n_rows, arrays={"values": values}, metrics=metrics)


def _weigh(
    distances: NDArray[np.float32], config: AffinitySettings
) -> tuple[NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_]]:
    """Values, (n, k), each row's relative distance from its goal, (n,), and whether it has one."""
    if config.perplexity is not None:
        found = calibrate(distances, config.perplexity)
        return found.affinities, np.abs(found.perplexity / config.perplexity - 1), found.solved
    members = find_memberships(distances)
    wanted = np.log2(distances.shape[1] + 1)
    return members.values, np.abs(members.sums / wanted - 1), members.solved


def finish(_: Context[AffinitySettings], records: list[Record]) -> dict[str, Any]:
    """Rows without a solution (ties), and the worst relative error of all others."""
    return {
        "n_unsolved": sum(record.metrics["n_unsolved"] for record in records),
        "worst_error": max(record.metrics["worst_error"] for record in records),
    }


AFFINITY = Stage(
    name="affinity",
    version=2,
    reads=("neighbors",),
    settings=settings,
    estimate=estimate,
    prepare=prepare,
    do_part=do_part,
    finish=finish,
)

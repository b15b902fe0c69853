"""train: the encoder, from the sample's rows and the edges; one task with the whole machine.

The task keeps a checkpoint in its store, so a killed run goes on where it was.
"""

from dataclasses import dataclass, replace
from typing import Any

from pipeline.config import Job, TrainConfig
from pipeline.manifest import Part, Record
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage, one_partition

CHECKPOINT = "checkpoint.safetensors"
COMPONENTS = 100  # principal components that dense networks get by default
BLOCK_ROWS = 8192  # that are widened at once when statistics are taken
BLOCK_POINTS = 256  # of a batch that are compared with all others at once


@dataclass(frozen=True)
class TrainSettings:
    """What the encoder depends on."""

    train: TrainConfig
    metric: str
    negatives: int
    edges_per_step: int


def settings(job: Job) -> TrainSettings:
    """The train section, the metric, which decides whether rows are normalised, and the edges."""
    return TrainSettings(job.train, job.neighbors.metric, job.edges.negatives, job.edges_per_step)


def estimate(job: Job, shape: Shape) -> Estimate:
    """All training rows, the network's passes over a batch, the batch's pairs, components."""
    config = job.train
    hidden, depth = config.encoder.hidden, 2 * config.encoder.layers + 2
    weights = 4 * hidden * (shape.width + hidden * depth)
    pairs = config.batch if config.batches == "points" else BLOCK_POINTS
    batch = config.batch * 4 * (2 * shape.width + 3 * depth * hidden + 6 * pairs)
    rows = shape.n_train * shape.row_bytes
    graph = 24 * shape.n_train * job.neighbors.k if config.batches == "points" else 0
    n_components = count_components(config)
    components = 32 * shape.width * n_components
    projected = 4 * shape.n_train * min(n_components, shape.width)
    held = max(batch + 5 * weights, components + 2 * BLOCK_ROWS * 8 * shape.width) + graph
    held += 2 * projected
    return Estimate(1, PROCESS_BYTES + 2 * rows + held, 2 * weights)


def count_components(config: TrainConfig) -> int:
    """The principal components that the network gets; 0: the columns themselves."""
    if config.preprocessing.pca is not None:
        return config.preprocessing.pca
    return COMPONENTS if config.encoder.kind in ("mlp", "residual") else 0


def do_part(context: Context[TrainSettings], _: Partition, report: Report) -> Part:
    """The encoder's files and the telemetry of its training."""
    from pipeline.training import train  # noqa: PLC0415 - loads torch; the driver needs none

    return train(context, report)


def finish(context: Context[TrainSettings], records: list[Record]) -> dict[str, Any]:
    """Final loss, clipped shares, the map's frame; the checkpoint is no longer needed."""
    context.folder.delete(CHECKPOINT)
    return records[0].metrics


TRAIN = Stage(
    name="train",
    version=8,
    reads=("sample", "symmetrize", "edges"),
    settings=settings,
    estimate=estimate,
    prepare=one_partition,
    do_part=do_part,
    finish=finish,
    whole_machine=True,
)
RETRAIN = replace(TRAIN, reads=(*TRAIN.reads, "published"))

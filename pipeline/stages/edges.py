"""edges: positive edges drawn by P with their negatives, in training order.

draw   one task per block of P: as many edges as the block's share of P's mass, a bucket per shard
edges  one task per shard: its bucket of every file, shuffled, and the negatives

Draws of a block are independent, so bucket s of every block together is a draw from the whole P.
With memberships for probabilities, P is the symmetric graph, and its mass is not 1.
"""

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from pipeline.config import Job
from pipeline.kernels.edges import apportion, draw_negatives, draw_positives
from pipeline.kernels.symmetrize import SparseRows
from pipeline.manifest import Part, Plan
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage
from pipeline.stages.symmetrize import graph_entries
from pipeline.stores import Buckets

EDGES_PER_SHARD = 1 << 18
# A block that has most of P's mass, as hubs may, is drawn from by several tasks.
EDGES_PER_DRAW = 1 << 20


@dataclass(frozen=True)
class EdgeSettings:
    """What the edges depend on."""

    samples: int
    negatives: int
    seed: int


@dataclass(frozen=True)
class DrawSettings:
    """What the positive edges depend on."""

    samples: int
    seed: int


def settings(job: Job) -> EdgeSettings:
    """The edges section; samples default to what training consumes, one if that is none."""
    consumed = job.train.steps * job.edges_per_step
    return EdgeSettings(job.edges.samples or max(1, consumed), job.edges.negatives, job.edges.seed)


def draw_settings(job: Job) -> DrawSettings:
    """The edges section, less the negatives."""
    config = settings(job)
    return DrawSettings(config.samples, config.seed)


def estimate_draw(job: Job, shape: Shape) -> Estimate:
    """One task holds a block of P with its cumulative sum, its draws and the bucket file twice."""
    samples = settings(job).samples
    draws = min(samples, EDGES_PER_DRAW)
    task = PROCESS_BYTES + graph_entries(job, shape) * 32 + draws * 64
    n_parts = shape.n_graph_blocks + samples // EDGES_PER_DRAW
    return Estimate(n_parts, task, samples * 16)


def estimate_edges(job: Job, _: Shape) -> Estimate:
    """One task holds a shard, its shuffle and its encoding."""
    config = settings(job)
    edge_bytes = 8 * (2 + config.negatives)
    n_shards = -(-config.samples // EDGES_PER_SHARD)
    task = PROCESS_BYTES + EDGES_PER_SHARD * 4 * edge_bytes
    return Estimate(n_shards, task, config.samples * edge_bytes)


def prepare_draw(context: Context[DrawSettings]) -> Plan:
    """Runs of draws, block after block of P; `blocks` says from which block each one draws."""
    records = context.read("symmetrize").records
    masses = np.array([record.metrics["mass"] for record in records])
    rng = np.random.default_rng([context.settings.seed, crc32(b"apportion")])
    counts = apportion(masses, context.settings.samples, rng)
    parts: list[Partition] = []
    blocks: list[int] = []
    for block, (count, stop) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
        for part in split_rows(int(count), EDGES_PER_DRAW):
            first = int(stop - count)
            parts.append(Partition(len(parts), first + part.start, first + part.stop))
            blocks.append(block)
    return Plan(parts, {"blocks": blocks, "n_shards": len(_shards(context.settings.samples))})


def _shards(samples: int) -> list[Partition]:
    return split_rows(samples, EDGES_PER_SHARD)


def draw_part(context: Context[DrawSettings], partition: Partition, _: Report) -> Part:
    """A run of one block's edges, cut into equal buckets."""
    graph_store = context.read("symmetrize")
    record = graph_store.records[context.facts["blocks"][partition.index]]
    block = graph_store.arrays(record)
    graph = SparseRows(*(block.read(name) for name in SparseRows._fields))
    n_shards = context.facts["n_shards"]
    slices = partition.n_rows * np.arange(n_shards + 1) // n_shards
    rng = np.random.default_rng([context.settings.seed, crc32(b"draw"), partition.index])
    rows, tails = draw_positives(graph, slices, rng)
    arrays = {"heads": rows + record.partition.start, "tails": tails}
    return Part(partition.n_rows, buckets=Buckets(slices, arrays))


def prepare_edges(context: Context[EdgeSettings]) -> Plan:
    """Shards of nearly equal size."""
    return Plan(_shards(context.settings.samples))


def edges_part(context: Context[EdgeSettings], partition: Partition, _: Report) -> Part:
    """A shard in training order."""
    drawn, config = context.read("draw"), context.settings
    found = [drawn.bucket(record, partition.index) for record in drawn.records]
    heads, tails = (
        np.concatenate([bucket[name] for bucket in found]) for name in ("heads", "tails")
    )
    rng = np.random.default_rng([config.seed, crc32(b"edges"), partition.index])
    order = rng.permutation(len(heads))
    heads, tails = heads[order], tails[order]
    n_rows = context.read("symmetrize").n_rows
    negatives = draw_negatives(heads, n_rows, config.negatives, rng)
    arrays = {"heads": heads, "tails": tails, "negatives": negatives}
    return Part(len(heads), arrays=arrays)


DRAW = Stage(
    name="draw",
    version=2,
    reads=("symmetrize",),
    settings=draw_settings,
    estimate=estimate_draw,
    prepare=prepare_draw,
    do_part=draw_part,
)
EDGES = Stage(
    name="edges",
    version=2,
    reads=("symmetrize", "draw"),
    settings=settings,
    estimate=estimate_edges,
    prepare=prepare_edges,
    do_part=edges_part,
)

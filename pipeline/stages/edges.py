"""edges: positive edges drawn by P with their negatives, in training order.

draw   one task per block of P: as many edges as the block's share of P's mass, in random order
edges  one task per shard: the shard's slice of every block's draws, shuffled

Draws of a block are independent, so slice s of every block together is a draw from the whole P.
"""

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from pipeline.config import Job
from pipeline.kernels.edges import apportion, draw_negatives, draw_positives
from pipeline.kernels.symmetrize import SparseRows
from pipeline.manifest import Part, Plan
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage

EDGES_PER_SHARD = 1 << 18


@dataclass(frozen=True)
class EdgeSettings:
    """What the edges depend on."""

    samples: int
    negatives: int
    seed: int


def settings(job: Job) -> EdgeSettings:
    """The edges section; samples default to what training consumes."""
    consumed = job.train.steps * (job.train.batch // 2)
    return EdgeSettings(job.edges.samples or consumed, job.edges.negatives, job.edges.seed)


def _edge_bytes(config: EdgeSettings) -> int:
    return 8 * (2 + config.negatives)


def estimate_draw(job: Job, shape: Shape) -> Estimate:
    """One task holds a block of P and its draws, of which a block may have thrice the average."""
    config = settings(job)
    entries = shape.block_rows * job.neighbors.k * 4
    draws = 3 * config.samples // max(1, shape.n_blocks)
    task = PROCESS_BYTES + entries * 24 + draws * 3 * _edge_bytes(config)
    return Estimate(shape.n_blocks, task, config.samples * _edge_bytes(config))


def estimate_edges(job: Job, _: Shape) -> Estimate:
    """One task holds a shard, its shuffle and its encoding."""
    config = settings(job)
    n_shards = -(-config.samples // EDGES_PER_SHARD)
    task = PROCESS_BYTES + 2 * EDGES_PER_SHARD * 3 * _edge_bytes(config)
    return Estimate(n_shards, task, config.samples * _edge_bytes(config))


def prepare_draw(context: Context[EdgeSettings]) -> Plan:
    """The blocks of P, with the number of edges to draw from each."""
    records = context.read("symmetrize").records
    masses = np.array([record.metrics["mass"] for record in records])
    rng = np.random.default_rng([context.settings.seed, crc32(b"apportion")])
    counts = apportion(masses, context.settings.samples, rng)
    return Plan([record.partition for record in records], {"counts": counts.tolist()})


def draw_part(context: Context[EdgeSettings], partition: Partition, _: Report) -> Part:
    """The block's edges, in random order."""
    graph_store, config = context.read("symmetrize"), context.settings
    block = graph_store.arrays(graph_store.records[partition.index])
    graph = SparseRows(*(block.read(name) for name in SparseRows._fields))
    rng = np.random.default_rng([config.seed, crc32(b"draw"), partition.index])
    n_draws = context.facts["counts"][partition.index]
    heads, tails = draw_positives(graph, n_draws, rng)
    heads = heads + partition.start
    negatives = draw_negatives(heads, graph_store.n_rows, config.negatives, rng)
    return Part(n_draws, arrays={"heads": heads, "tails": tails, "negatives": negatives})


def prepare_edges(context: Context[EdgeSettings]) -> Plan:
    """Shards of nearly equal size."""
    return Plan(split_rows(context.settings.samples, EDGES_PER_SHARD))


def edges_part(context: Context[EdgeSettings], partition: Partition, _: Report) -> Part:
    """A shard in training order."""
    drawn = context.read("draw")
    n_shards = -(-context.settings.samples // EDGES_PER_SHARD)
    slices: dict[str, list[Any]] = {"heads": [], "tails": [], "negatives": []}
    for record in drawn.records:
        start = record.n_rows * partition.index // n_shards
        stop = record.n_rows * (partition.index + 1) // n_shards
        if stop > start:
            for name, found in slices.items():
                found.append(drawn.arrays(record).read(name, start, stop))
    arrays = {name: np.concatenate(found) for name, found in slices.items()}
    rng = np.random.default_rng([context.settings.seed, crc32(b"edges"), partition.index])
    order = rng.permutation(len(arrays["heads"]))
    return Part(len(order), arrays={name: array[order] for name, array in arrays.items()})


DRAW = Stage(
    name="draw",
    version=1,
    reads=("symmetrize",),
    settings=settings,
    estimate=estimate_draw,
    prepare=prepare_draw,
    do_part=draw_part,
)
EDGES = Stage(
    name="edges",
    version=1,
    reads=("draw",),
    settings=settings,
    estimate=estimate_edges,
    prepare=prepare_edges,
    do_part=edges_part,
)

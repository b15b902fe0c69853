"""train: the encoder, from the sample's rows and the edges; one task with the whole machine.

The task keeps a checkpoint in its store, so a killed run goes on where it was.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from encoders.artifact import Encoder, set_threads
from encoders.fit import DivergedError, FitConfig, Fitted, fit, fit_preprocessing
from encoders.networks import NetworkConfig
from pipeline.config import Job, TrainConfig
from pipeline.errors import ConfigError
from pipeline.manifest import Part, Record, Store
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage, one_partition

log = logging.getLogger("lakemap")

CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_SECONDS = 10.0
EDGES_IN_MEMORY = 1 << 18
EXTENT_ROWS = 50_000
STEPS_PER_REPORT = 20


@dataclass(frozen=True)
class TrainSettings:
    """What the encoder depends on."""

    train: TrainConfig
    metric: str


def settings(job: Job) -> TrainSettings:
    """The train section, and the metric, which decides whether rows are normalised."""
    return TrainSettings(job.train, job.neighbors.metric)


def estimate(job: Job, shape: Shape) -> Estimate:
    """All training rows, the network's passes over a batch and the batch's pairs."""
    config = job.train
    weights = 4 * config.encoder.hidden * (shape.width + config.encoder.hidden * 4)
    batch = config.batch * 4 * (2 * shape.width + 10 * config.encoder.hidden + 4 * config.batch)
    rows = shape.n_train * shape.row_bytes
    return Estimate(1, PROCESS_BYTES + 2 * rows + batch + 5 * weights, 2 * weights)


def do_part(context: Context[TrainSettings], _: Partition, report: Report) -> Part:
    """The encoder's files and the telemetry of its training."""
    sample = context.read("sample")
    rows = sample.rows("vectors", 0, sample.n_rows)
    preprocessing = fit_preprocessing(rows, context.settings.metric == "cosine")
    config = _fit_config(context.settings.train)
    edges = EdgeReader(context.read("edges"), config.batch // 2)

    def run(resume: bytes | None) -> Fitted:
        return fit(
            rows,
            edges,
            config,
            preprocessing,
            resume=resume,
            save=lambda data: context.folder.put(CHECKPOINT, data),
            report=_reporter(config.steps, report),
        )

    fitted = _resumed(context, run)
    info = {"training_rows": len(rows), "sample": context.inputs["sample"].digest}
    encoder = Encoder(rows.shape[1], config.network, preprocessing, fitted.network, info)
    metrics = {
        "extent": _extent(encoder, rows),
        "loss": float(np.mean(fitted.telemetry["loss"][-100:])),
        "pair_clipped": float(np.mean(fitted.telemetry["pair_clipped"])),
        "layer_clipped": float(np.mean(fitted.telemetry["layer_clipped"])),
        "encoder": encoder.digest,
    }
    tables = {"telemetry": pa.table(fitted.telemetry)}
    return Part(len(rows), tables=tables, files=encoder.to_files(), metrics=metrics)


def _fit_config(config: TrainConfig) -> FitConfig:
    network = NetworkConfig(config.encoder.kind, config.encoder.hidden, config.encoder.layers)
    return FitConfig(
        network=network,
        steps=config.steps,
        batch=config.batch,
        learning_rate=config.learning_rate,
        optimizer=config.optimizer,
        exaggeration=config.exaggeration,
        exaggerated_share=config.exaggerated_share,
        clip_pairwise=config.clip_pairwise,
        clip_layer=config.clip_layer,
        seed=config.seed,
        checkpoint_seconds=CHECKPOINT_SECONDS,
        threads=len(os.sched_getaffinity(0)),
    )


def _resumed(context: Context[TrainSettings], run: Callable[[bytes | None], Fitted]) -> Fitted:
    """The trained network, continued from the store's checkpoint if it has a fitting one."""
    saved = context.folder.find(CHECKPOINT)
    try:
        if saved is not None:
            try:
                return run(saved)
            except ValueError as error:
                log.warning("train: checkpoint not used (%s); training starts anew", error)
        return run(None)
    except DivergedError as error:
        raise ConfigError(f"train: {error}") from error


def _reporter(steps: int, report: Report) -> Callable[[int, dict[str, float]], None]:
    """What the loop calls at every step; passes on one call in twenty."""

    def tell(step: int, measured: dict[str, float]) -> None:
        if (step + 1) % STEPS_PER_REPORT == 0 or step + 1 == steps:
            clipped = measured["pair_clipped"] + measured["layer_clipped"]
            note = f"step {step + 1}/{steps}, loss {measured['loss']:.3f}, clipped {clipped:.1%}"
            report((step + 1) / steps, note)

    return tell


class EdgeReader:
    """Heads and tails of each step, read forward through the shards, a stretch at a time."""

    def __init__(self, edges: Store, edges_per_step: int) -> None:
        self._edges = edges
        self._per_step = edges_per_step
        self._start = 0
        self._heads = self._tails = np.empty(0, np.int64)

    def __call__(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row numbers of the step's heads and tails."""
        start = step * self._per_step
        stop = start + self._per_step
        if start < self._start or stop > self._start + len(self._heads):
            self._load(start)
        inside = slice(start - self._start, stop - self._start)
        return self._heads[inside], self._tails[inside]

    def _load(self, start: int) -> None:
        n_edges = max(EDGES_IN_MEMORY, self._per_step)
        stop = min(start + n_edges, self._edges.n_rows)
        self._start = start
        self._heads = self._edges.rows("heads", start, stop)
        self._tails = self._edges.rows("tails", start, stop)


def _extent(encoder: Encoder, rows: NDArray[Any]) -> list[float]:
    """x0, x1, y0, y1 of the training rows' map with a margin: the frame of every picture of it."""
    set_threads(len(os.sched_getaffinity(0)))
    xy = encoder.embed(rows[:: max(1, len(rows) // EXTENT_ROWS)])
    low, high = xy.min(axis=0), xy.max(axis=0)
    margin = 0.05 * float((high - low).max())
    (x0, y0), (x1, y1) = low - margin, high + margin
    return [float(x0), float(x1), float(y0), float(y1)]


def finish(context: Context[TrainSettings], records: list[Record]) -> dict[str, Any]:
    """Final loss, clipped shares, the map's frame; the checkpoint is no longer needed."""
    context.folder.delete(CHECKPOINT)
    return records[0].metrics


TRAIN = Stage(
    name="train",
    version=1,
    reads=("sample", "edges"),
    settings=settings,
    estimate=estimate,
    prepare=one_partition,
    do_part=do_part,
    finish=finish,
    whole_machine=True,
)

"""The training of the encoder: rows and batches from the stores, progress, checkpoints, files."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from encoders.artifact import Encoder, set_threads
from encoders.fit import DivergedError, Draw, FitConfig, Fitted, Trained, fit
from encoders.networks import NetworkConfig, build_network
from encoders.objectives import ObjectiveConfig, build_objective
from encoders.preprocessing import PreprocessingConfig
from encoders.reference import REFERENCE_FILE, Extent, fit_reference
from encoders.restart import Start, start_anew, start_from
from pipeline.batches import EdgeBatches, Edges, PointBatches
from pipeline.config import TrainConfig
from pipeline.errors import ConfigError
from pipeline.kernels.symmetrize import SparseRows
from pipeline.manifest import Part, Store
from pipeline.model import load_model
from pipeline.runner import Report
from pipeline.stage import Context
from pipeline.stages.train import CHECKPOINT, TrainSettings, count_components

log = logging.getLogger("lakemap")

CHECKPOINT_SECONDS = 10.0
EXTENT_ROWS = 50_000
STEPS_PER_REPORT = 20
GAMMA = {"tsne": 1.0, "largevis": 7.0, "umap": 1.0}  # the papers' own


def train(context: Context[TrainSettings], report: Report) -> Part:
    """The encoder's files and the telemetry of its training."""
    sample, config = context.read("sample"), context.settings.train
    rows = sample.rows("vectors", 0, sample.n_rows)
    architecture, fit_config = network_config(config), make_fit_config(context.settings)
    earlier = context.inputs.get("published")
    if earlier is not None:  # its clusters are apart already
        fit_config = replace(fit_config, exaggerated_share=0.0)
    try:
        start = _start(context, rows)
        draw = _batches(context)

        def run(resume: bytes | None) -> Fitted:
            network = build_network(architecture, start.preprocessing.n_outputs, config.seed)
            if start.weights is not None:
                network.load_state_dict(start.weights)
            objective = build_objective(fit_config.objective)
            return fit(
                Trained(rows, start.preprocessing, network, objective, start.anchors),
                draw,
                fit_config,
                resume=resume,
                save=lambda data: context.folder.put(CHECKPOINT, data),
                report=_reporter(config, report),
            )

        fitted = _resumed(context, run)
    except (DivergedError, ValueError) as error:
        raise ConfigError(f"train: {error}") from error
    info = {"training_rows": len(rows), "sample": context.inputs["sample"].digest}
    if earlier is not None:
        info["earlier"] = earlier.digest
    encoder = Encoder(architecture, start.preprocessing, fitted.network, info)
    set_threads(len(os.sched_getaffinity(0)))
    xy = encoder.embed(rows[:: max(1, len(rows) // EXTENT_ROWS)])
    extent = _extent(xy)
    reference = fit_reference(encoder, rows, xy, extent)
    metrics = {
        "extent": list(extent),
        "loss": float(np.mean(fitted.telemetry["loss"][-100:])),
        "pair_clipped": float(np.mean(fitted.telemetry["pair_clipped"])),
        "layer_clipped": float(np.mean(fitted.telemetry["layer_clipped"])),
        "encoder": encoder.digest,
        "warm_start": start.weights is not None,
    }
    tables = {"telemetry": pa.table(fitted.telemetry)}
    files = encoder.to_files() | {REFERENCE_FILE: reference.to_bytes()}
    return Part(len(rows), tables=tables, files=files, metrics=metrics)


def _start(context: Context[TrainSettings], rows: NDArray[Any]) -> Start:
    """What the training starts from: the published model where the stage is given one."""
    config = preprocessing_config(context.settings)
    if "published" not in context.inputs:
        return start_anew(rows, config)
    set_threads(len(os.sched_getaffinity(0)))
    encoder, reference = load_model(context.inputs["published"])
    return start_from(encoder, reference, rows, network_config(context.settings.train), config)


def _batches(context: Context[TrainSettings]) -> Draw:
    """The points of every step."""
    config = context.settings.train
    if config.batches == "points":
        return PointBatches(_read_graph(context.read("symmetrize")), config.batch, config.seed)
    edges = context.read("edges")
    names = ("heads", "tails", "negatives") if config.batches == "negatives" else ("heads", "tails")

    def read(start: int, stop: int) -> Edges:
        return Edges(*(edges.rows(name, start, stop) for name in names))

    return EdgeBatches(read, edges.n_rows, context.settings.edges_per_step)


def _read_graph(store: Store) -> SparseRows:
    """The whole graph of the sample; batches of points need it in memory."""
    blocks = [store.arrays(record) for record in store.records]
    offsets = [block.read("offsets") for block in blocks]
    starts = np.cumsum([0, *(part[-1] for part in offsets[:-1])])
    joined = [part[:-1] + start for part, start in zip(offsets, starts, strict=True)]
    end = starts[-1] + offsets[-1][-1]
    return SparseRows(
        np.concatenate([*joined, [end]]),
        np.concatenate([block.read("columns") for block in blocks]),
        np.concatenate([block.read("values") for block in blocks]),
    )


def network_config(config: TrainConfig) -> NetworkConfig:
    """The network's settings for those of the job."""
    encoder = config.encoder
    return NetworkConfig(encoder.kind, encoder.hidden, encoder.layers, encoder.shape)


def preprocessing_config(config: TrainSettings) -> PreprocessingConfig:
    """The preprocessing's settings for those of the job."""
    given = config.train.preprocessing
    normalize = config.metric == "cosine" if given.normalize is None else given.normalize
    pca = count_components(config.train) or None
    return PreprocessingConfig(normalize, given.centre, given.scale, pca)


def make_fit_config(settings: TrainSettings) -> FitConfig:
    """The trainer's settings for those of the job."""
    config = settings.train
    objective = ObjectiveConfig(
        kind=config.objective,
        batches=config.batches,
        clip=config.clip_pairwise,
        negatives=settings.negatives,
        gamma=config.gamma or GAMMA[config.objective],
        epsilon=config.epsilon,
        min_dist=config.min_dist,
        spread=config.spread,
    )
    return FitConfig(
        objective=objective,
        steps=config.steps,
        learning_rate=config.learning_rate,
        schedule=config.schedule,
        optimizer=config.optimizer,
        exaggeration=config.exaggeration,
        exaggerated_share=config.exaggerated_share,
        noise=config.noise,
        clip_layer=config.clip_layer,
        seed=config.seed,
        checkpoint_seconds=CHECKPOINT_SECONDS,
        threads=len(os.sched_getaffinity(0)),
    )


def _resumed(context: Context[TrainSettings], run: Callable[[bytes | None], Fitted]) -> Fitted:
    """The trained network, continued from the store's checkpoint if it has a fitting one."""
    saved = context.folder.find(CHECKPOINT)
    if saved is not None:
        try:
            return run(saved)
        except ValueError as error:
            log.warning("train: checkpoint not used (%s); training starts anew", error)
    return run(None)


def _reporter(config: TrainConfig, report: Report) -> Callable[[int, dict[str, float]], None]:
    """What the loop calls at every step; passes on one call in twenty."""
    steps, before = config.steps, time.monotonic()

    def tell(step: int, measured: dict[str, float]) -> None:
        nonlocal before
        if (step + 1) % STEPS_PER_REPORT == 0 or step + 1 == steps:
            now = time.monotonic()
            rate = STEPS_PER_REPORT * config.batch / max(now - before, 1e-9)
            before = now
            clipped = measured["pair_clipped"] + measured["layer_clipped"]
            note = (
                f"step {step + 1}/{steps}, loss {measured['loss']:.3f}, "
                f"{rate:,.0f} rows/s, clipped {clipped:.1%}"
            )
            report((step + 1) / steps, note)

    return tell


def _extent(xy: NDArray[np.float32]) -> Extent:
    """x0, x1, y0, y1 of the training rows' map with a margin: the frame of every picture of it."""
    low, high = xy.min(axis=0), xy.max(axis=0)
    margin = 0.05 * float((high - low).max())
    (x0, y0), (x1, y1) = low - margin, high + margin
    return float(x0), float(x1), float(y0), float(y1)

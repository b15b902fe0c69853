"""Training: draw edges, place their end points, clip, step; resumable to the bit."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from encoders import checkpoint
from encoders.networks import NetworkConfig, build_network
from encoders.objectives import Clipped, clip, tsne_edges

LAST_LEARNING_RATE = 1e-7
# RMSProp starts with an empty memory of squares (decay 0.99), so its first step is ten times longer
# than the learning rate says; without a rise the first steps would undo the Xavier weights.
WARM_UP_STEPS = 50
BLOCK_ROWS = 8192  # rows widened at once when statistics are taken
COLUMNS = (
    "step",
    "loss",
    "learning_rate",
    "exaggeration",
    "pair_gradient",
    "pair_gradient_after",
    "pair_clipped",
    "layer_gradient",
    "layer_gradient_after",
    "layer_clipped",
)

Array = np.ndarray[Any, np.dtype[Any]]
Draw = Callable[[int], tuple[Array, Array]]


class DivergedError(RuntimeError):
    """A loss or gradient was not a number; training stopped before it reached the weights."""


@dataclass(frozen=True)
class FitConfig:
    """The settings of a training run; `batch` counts points, two for every edge.

    clip_pairwise is in the unit of one point's own loss, batch * dL/dy: the pull of its edge is at
    most 2 * exaggeration and its own push at most 1, so 16 only cuts hubs that many points push.
    clip_layer cuts single entries of the weights' gradient: 0.1 is usual and 0.6 the largest seen
    on scaled rows, so 1 only cuts what outlying rows make of it. (The paper's 1e14 and 1e4 never
    act here: both gradients are bounded far below.)
    """

    network: NetworkConfig = field(default_factory=NetworkConfig)
    steps: int = 3000
    batch: int = 1024
    learning_rate: float = 3e-3
    optimizer: str = "rmsprop"
    exaggeration: float = 4.0
    exaggerated_share: float = 0.5
    clip_pairwise: float = 16.0
    clip_layer: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 60.0
    threads: int = 1


@dataclass(frozen=True, eq=False)
class Preprocessing:
    """What happens to a row before the network sees it; part of the artefact.

    centre: (d,) float32. scale: one number for all columns, so that distances keep their order.
    normalize: rows are brought to unit length first, for cosine distances.
    """

    centre: Array
    scale: float
    normalize: bool

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """(b, d) float32: the rows, of any dtype, normalised if asked, centred and scaled."""
        centre = torch.from_numpy(self.centre).to(rows.device)
        return (_widen(rows, self.normalize) - centre) / self.scale


class Fitted(NamedTuple):
    """A trained network, on the CPU and in eval mode; telemetry has one number per step."""

    network: torch.nn.Module
    telemetry: dict[str, Array]


def fit_preprocessing(rows: Array, normalize: bool) -> Preprocessing:
    """The mean of the rows and their root mean square about it, accumulated in float64."""
    n, d = rows.shape
    if n == 0:
        raise ValueError("fit_preprocessing: there are no rows; at least one is needed")
    total = sum((block.sum(0) for block in _blocks(rows, normalize)), np.zeros(d))
    if not np.isfinite(total).all():
        raise ValueError("fit_preprocessing: rows hold NaN or infinity; remove such rows first")
    centre = (total / n).astype(np.float32)
    squares = sum(float(np.square(block - centre).sum()) for block in _blocks(rows, normalize))
    return Preprocessing(centre, math.sqrt(squares / rows.size) or 1.0, normalize)


def fit(
    rows: Array,
    draw: Draw,
    config: FitConfig,
    preprocessing: Preprocessing,
    *,
    resume: bytes | None = None,
    save: Callable[[bytes], None] | None = None,
    report: Callable[[int, dict[str, float]], None] | None = None,
) -> Fitted:
    """The trained network and its telemetry.

    rows: (n, d), any dtype; widened batch by batch. draw(step): row numbers of the heads and the
    tails, batch//2 each, the same whenever asked. save gets a checkpoint every checkpoint_seconds;
    resume takes one and ends in bitwise the same weights, given the same number of threads.
    report gets every step's number and telemetry.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = _start(rows.shape, config, preprocessing, device)
    network, optimizer = training.network, training.optimizer
    first = 0 if resume is None else checkpoint.restore(training, resume)
    gather = _gatherer(rows, device)
    saved = time.monotonic()
    with _threads(config.threads):
        for step in range(first, config.steps):
            batch = _end_points(draw, step, config.batch, len(rows))
            y = network(preprocessing.apply(gather(batch)))
            row_numbers = torch.from_numpy(batch).to(device)
            loss, gradient = tsne_edges(y.detach(), row_numbers, exaggeration(config, step))
            pair = clip(gradient, config.clip_pairwise / config.batch)
            optimizer.zero_grad()
            y.backward(pair.gradient)
            layers = _clip_layers(network, config.clip_layer)
            if not math.isfinite(loss) or math.isnan(pair.largest + layers.largest):
                raise DivergedError(_blame(step, batch, y.detach(), gradient, config))
            optimizer.param_groups[0]["lr"] = learning_rate(config, step)
            optimizer.step()
            measured = _measure(step, loss, pair, layers, config)
            for name, value in measured.items():
                training.telemetry[name][step] = value
            if report is not None:
                report(step, measured)
            if save is not None and time.monotonic() - saved >= config.checkpoint_seconds:
                save(checkpoint.dump(training, step + 1))
                saved = time.monotonic()
    return Fitted(network.cpu().eval(), training.telemetry)


def learning_rate(config: FitConfig, step: int) -> float:
    """The learning rate of a step: a short rise, then a cosine down to almost nothing."""
    height = (1 + math.cos(math.pi * step / config.steps)) / 2 * min(1, (step + 1) / WARM_UP_STEPS)
    return LAST_LEARNING_RATE + (config.learning_rate - LAST_LEARNING_RATE) * height


def exaggeration(config: FitConfig, step: int) -> float:
    """The factor on the attraction at a step."""
    return config.exaggeration if step < config.exaggerated_share * config.steps else 1.0


def _start(
    shape: tuple[int, ...], config: FitConfig, preprocessing: Preprocessing, device: torch.device
) -> checkpoint.Training:
    """A run before its first step."""
    network = build_network(config.network, shape[1], seed=config.seed).to(device)
    telemetry: dict[str, Array] = {name: np.zeros(config.steps) for name in COLUMNS}
    settings = _settings_digest(shape, config, preprocessing)
    return checkpoint.Training(settings, network, _optimizer(config, network), telemetry)


def _optimizer(config: FitConfig, network: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimiser of `config` over the network's parameters."""
    parameters = network.parameters()
    match config.optimizer:
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=config.learning_rate)
        case "adam":
            return torch.optim.Adam(parameters, lr=config.learning_rate)
        case "sgd":
            return torch.optim.SGD(parameters, lr=config.learning_rate, momentum=0.9)
    raise ValueError(f"fit: optimizer {config.optimizer!r} is unknown; use rmsprop, adam or sgd")


def _settings_digest(
    shape: tuple[int, ...], config: FitConfig, preprocessing: Preprocessing
) -> bytes:
    """A digest of all that decides the weights, save the rows' values and the last bits.

    The number of threads only moves last bits, so a run may be resumed on a machine with others.
    """
    settings = asdict(config)
    del settings["threads"], settings["checkpoint_seconds"]
    described = [settings, list(shape), preprocessing.scale, preprocessing.normalize]
    text = json.dumps(described, sort_keys=True).encode()
    return hashlib.sha256(text + preprocessing.centre.tobytes()).digest()


def _gatherer(rows: Array, device: torch.device) -> Callable[[Array], torch.Tensor]:
    """A function from row numbers to those rows on the device, in the dtype they are held in."""
    if device.type == "cuda" and rows.nbytes < torch.cuda.mem_get_info()[0] // 2:
        held = torch.tensor(rows, device=device)
        return lambda batch: held[torch.from_numpy(batch).to(device)]
    return lambda batch: torch.from_numpy(rows[batch]).to(device)


def _end_points(draw: Draw, step: int, batch: int, n_rows: int) -> Array:
    """(2B,) int64 row numbers of a step's edges, heads then tails, checked."""
    heads, tails = draw(step)
    points = np.concatenate([heads, tails]).astype(np.int64, copy=False)
    if len(heads) != batch // 2 or len(tails) != batch // 2:
        raise ValueError(
            f"fit: step {step} drew {len(heads)} heads and {len(tails)} tails; "
            f"a batch of {batch} points needs {batch // 2} of each"
        )
    if points.min() < 0 or points.max() >= n_rows:
        raise ValueError(
            f"fit: step {step} drew rows {points.min()} to {points.max()}, there are {n_rows}; "
            "draw edges of this sample"
        )
    return points


def _clip_layers(network: torch.nn.Module, threshold: float) -> Clipped:
    """The clipped gradients of all layers, flat; the parameters' own gradients are replaced."""
    weights = list(network.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    clipped = clip(torch.cat([gradient.ravel() for gradient in gradients]), threshold)
    parts = torch.split(clipped.gradient, [gradient.numel() for gradient in gradients])
    for weight, part in zip(weights, parts, strict=True):
        weight.grad = part.view_as(weight)
    return clipped


def _measure(
    step: int, loss: float, pair: Clipped, layers: Clipped, config: FitConfig
) -> dict[str, float]:
    """One step's telemetry, by column; pairwise gradients are in the unit of clip_pairwise."""
    pair_gradient = pair.largest * config.batch
    return {
        "step": step,
        "loss": loss,
        "learning_rate": learning_rate(config, step),
        "exaggeration": exaggeration(config, step),
        "pair_gradient": pair_gradient,
        "pair_gradient_after": min(pair_gradient, config.clip_pairwise),
        "pair_clipped": pair.share,
        "layer_gradient": layers.largest,
        "layer_gradient_after": min(layers.largest, config.clip_layer),
        "layer_clipped": layers.share,
    }


def _blame(
    step: int, batch: Array, y: torch.Tensor, gradient: torch.Tensor, config: FitConfig
) -> str:
    """The message of a DivergedError: the step, the rows at fault and what to try."""
    lost = ~y.isfinite().all(1)  # one such point spoils every gradient of its batch
    if not lost.any():
        lost = ~gradient.isfinite().all(1)
    farthest = y.abs().amax(1).nan_to_num(math.inf).argsort(descending=True)
    rows = list(dict.fromkeys(batch[farthest[lost[farthest]].cpu().numpy()].tolist()))
    found = f"rows {rows[:5]} ({len(rows)} of the batch)" if rows else "no one row"
    return (
        f"fit: loss or gradient is not a number at step {step}, caused by {found}; "
        f"look for NaN or huge values in them, lower learning_rate ({config.learning_rate:g}), "
        f"clip_pairwise ({config.clip_pairwise:g}) or clip_layer ({config.clip_layer:g})"
    )


def _blocks(rows: Array, normalize: bool) -> Iterator[Array]:
    """The rows as the network would get them but for centre and scale, float64, in blocks."""
    for start in range(0, len(rows), BLOCK_ROWS):
        block = np.array(rows[start : start + BLOCK_ROWS])  # torch refuses read-only arrays
        yield _widen(torch.from_numpy(block), normalize).numpy().astype(np.float64)


def _widen(rows: torch.Tensor, normalize: bool) -> torch.Tensor:
    """(b, d) float32 rows, brought to unit length if asked; a row of zeros stays one."""
    wide = rows.float()
    if not normalize:
        return wide
    length: torch.Tensor = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    return wide / length.where(length > 0, 1.0)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run torch with `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Training: draw a batch, place its points, clip, step; resumable to the bit."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from encoders import checkpoint
from encoders.networks import places_rows_apart
from encoders.objectives import Batch, Clipped, Objective, ObjectiveConfig, PairLoss, clip
from encoders.optimizers import Kind as OptimizerKind
from encoders.optimizers import build_optimizer, flatten
from encoders.preprocessing import Array, Preprocessing
from encoders.team import ahead, parts, side_by_side, team

LAST_LEARNING_RATE = 1e-7
# RMSProp starts with an empty memory of squares (decay 0.99), so its first step is ten times longer
# than the learning rate says; without a rise the first steps would undo the Xavier weights.
WARM_UP_STEPS = 50
# Noise is uniform in 256 levels: in many columns as good as normal, drawn in a quarter of the time.
NOISE_DEVIATION = math.sqrt((256**2 - 1) / 12)
# In many columns noise points away from all neighbours; in fewer than these it would often reach
# one, so it is as much smaller as keeps its share in any one direction.
NOISE_COLUMNS = 100
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


class Drawn(NamedTuple):
    """The points of one step, (p,) row numbers, laid out as `Batch` says."""

    rows: Array
    n_edges: int = 0
    affinities: Array | None = None


Draw = Callable[[int], Drawn]


class DivergedError(RuntimeError):
    """A loss or gradient was not a number; training stopped before it reached the weights."""


@dataclass(frozen=True)
class FitConfig:
    """The settings of a training run.

    clip_layer cuts single entries of the weights' gradient: 0.1 is usual and 0.6 the largest seen
    on scaled rows, so 1 only cuts what outlying rows make of it. (The paper's 1e14 and 1e4 never
    act on the t-SNE objective of edges: both gradients are bounded far below.) noise: points
    are moved by about this share of an edge's length, at random and anew in every step, so that the
    network learns the places of a neighbourhood, not those of single rows.
    """

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    steps: int = 3000
    learning_rate: float = 4e-3
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    optimizer: OptimizerKind = "rmsprop"
    exaggeration: float = 4.0
    exaggerated_share: float = 0.1
    noise: float = 0.5
    clip_layer: float = 1.0
    seed: int = 0
    checkpoint_seconds: float = 60.0
    threads: int = 1


class Fitted(NamedTuple):
    """A trained network, on the CPU and in eval mode; telemetry has one number per step."""

    network: torch.nn.Module
    telemetry: dict[str, Array]


class Anchors(NamedTuple):
    """Places, (n, 2) float32, near which rows are held; NaN where a row is free.

    Holding adds pull * (d / size)^2 to a point's loss, d being its distance from its place and
    size the diameter of the map the places are of.
    """

    places: Array
    size: float
    pull: float


class Trained(NamedTuple):
    """What a run trains, on what, and to what end."""

    rows: Array
    preprocessing: Preprocessing
    network: torch.nn.Module
    objective: Objective
    anchors: Anchors | None = None


def fit(
    trained: Trained,
    draw: Draw,
    config: FitConfig,
    *,
    resume: bytes | None = None,
    save: Callable[[bytes], None] | None = None,
    report: Callable[[int, dict[str, float]], None] | None = None,
) -> Fitted:
    """The trained network and its telemetry.

    rows: (n, d), any dtype. draw(step): the step's points, the same
    whenever asked. save gets a checkpoint every checkpoint_seconds; resume takes one and ends in
    bitwise the same weights, given the same number of threads. report gets every step's number and
    telemetry.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, objective = trained.network, trained.objective
    settings = _settings_digest(trained, config)
    network.to(device).train()
    trainable = [weight for weight in network.parameters() if weight.requires_grad]
    weights = flatten(trainable)
    optimizer = build_optimizer(config.optimizer, weights)
    telemetry: dict[str, Array] = {name: np.zeros(config.steps) for name in COLUMNS}
    training = checkpoint.Training(settings, network, optimizer, telemetry)
    first = 0 if resume is None else checkpoint.restore(training, resume)
    saved = time.monotonic()
    place, pull_back = partial(_place, network), partial(_pull_back, trainable)
    prepare = _preparer(trained, draw, config, device)
    apart = device.type == "cpu" and places_rows_apart(network)
    with team(config.threads) if apart else _threads(config.threads):
        coming = ahead(prepare, first)
        for step in range(first, config.steps):
            drawn, ready = coming()
            placed = side_by_side(place, [ready[part] for part in parts(len(ready))])
            y = torch.cat([part.detach() for part in placed])
            pair = objective(y, _batch(drawn, device), exaggeration(config, step))
            slope = pair.gradient + hold(y, drawn.rows, trained.anchors)
            slopes = side_by_side(pull_back, placed, slope.split([len(part) for part in placed]))
            if step + 1 < config.steps:
                coming = ahead(prepare, step + 1)  # while this thread moves the weights
            layers = clip(sum(slopes[1:], slopes[0]), config.clip_layer)
            if not math.isfinite(pair.loss) or math.isnan(pair.largest + layers.largest):
                raise DivergedError(_blame(step, drawn.rows, y, pair.gradient, config))
            optimizer.step(layers.gradient, learning_rate(config, step))
            measured = _measure(step, pair, layers, config)
            for name, value in measured.items():
                telemetry[name][step] = value
            if report is not None:
                report(step, measured)
            if save is not None and time.monotonic() - saved >= config.checkpoint_seconds:
                save(checkpoint.dump(training, step + 1))
                saved = time.monotonic()
    return Fitted(network.cpu().eval(), telemetry)


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 numbers are faster there: 1.4 times on CPUs that know them."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def learning_rate(config: FitConfig, step: int) -> float:
    """The learning rate of a step: a short rise, then down to almost nothing, or constant."""
    share = step / config.steps
    match config.schedule:
        case "cosine":
            height = (1 + math.cos(math.pi * share)) / 2
        case "linear":
            height = 1 - share
        case "constant":
            height = 1.0
        case _:
            raise ValueError(
                f"fit: schedule {config.schedule!r} is unknown; use cosine, linear or constant"
            )
    height *= min(1, (step + 1) / WARM_UP_STEPS)
    return LAST_LEARNING_RATE + (config.learning_rate - LAST_LEARNING_RATE) * height


def exaggeration(config: FitConfig, step: int) -> float:
    """The factor on the attraction at a step."""
    return config.exaggeration if step < config.exaggerated_share * config.steps else 1.0


def _place(network: torch.nn.Module, points: torch.Tensor) -> torch.Tensor:
    """The points' positions, float32."""
    device = points.device
    with torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16(device)):
        positions: torch.Tensor = network(points).float()
    return positions


def _pull_back(
    trainable: list[torch.nn.Parameter], positions: torch.Tensor, slope: torch.Tensor
) -> torch.Tensor:
    """The gradient of all weights as one vector, for the positions' own."""
    found = torch.autograd.grad(positions, trainable, slope, materialize_grads=True)
    return torch.cat([part.ravel() for part in found])


def _settings_digest(trained: Trained, config: FitConfig) -> bytes:
    """A digest of all that decides the weights, save the rows' values and the last bits.

    The number of threads only moves last bits, so a run may be resumed on a machine with others.
    """
    settings = asdict(config)
    del settings["threads"], settings["checkpoint_seconds"]
    steps = trained.preprocessing
    described = [settings, list(trained.rows.shape), steps.scale, steps.normalize]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    digest.update(steps.centre.tobytes())
    digest.update(b"" if steps.components is None else steps.components.tobytes())
    if trained.anchors is not None:
        digest.update(trained.anchors.places.tobytes() + repr(trained.anchors[1:]).encode())
    for name, weight in trained.network.state_dict().items():  # as they are before the first step
        digest.update(name.encode() + weight.cpu().numpy().tobytes())
    return digest.digest()


def _preparer(
    trained: Trained, draw: Draw, config: FitConfig, device: torch.device
) -> Callable[[int], tuple[Drawn, torch.Tensor]]:
    """A function from a step to its points and what the network gets of them."""
    gather = _gatherer(trained.rows, trained.preprocessing, device)

    def prepare(step: int) -> tuple[Drawn, torch.Tensor]:
        drawn = _checked(draw(step), step, len(trained.rows))
        return drawn, shaken(gather(drawn.rows), drawn.n_edges, config, step)

    return prepare


def _gatherer(
    rows: Array, preprocessing: Preprocessing, device: torch.device
) -> Callable[[Array], torch.Tensor]:
    """A function from row numbers to those rows on the device, prepared for the network.

    Projected rows are few numbers and are kept; others are prepared batch by batch, from the dtype
    they are held in.
    """
    if preprocessing.components is not None:
        ready = preprocessing.apply_all(rows)
        if _fits(ready.nbytes, device):
            ready = ready.to(device)
        held = ready.device
        return lambda batch: ready.index_select(0, torch.from_numpy(batch).to(held)).to(device)
    if device.type == "cuda" and _fits(rows.nbytes, device):
        copy = torch.tensor(rows, device=device)
        return lambda batch: preprocessing.apply(copy[torch.from_numpy(batch).to(device)])
    return lambda batch: preprocessing.apply(torch.from_numpy(rows[batch]).to(device))


def shaken(ready: torch.Tensor, n_edges: int, config: FitConfig, step: int) -> torch.Tensor:
    """The points, moved by noise of the step's own; batches without edges stay as they are.

    Every point's noise is as long as a random edge of the step says. Were it the same at both ends
    of an edge, or none at negatives, the network would see it, a convolution best, and place points
    by their noise.
    """
    if not config.noise or not n_edges:
        return ready
    random = np.random.default_rng((config.seed, step))
    heads, tails = ready[:n_edges], ready[n_edges : 2 * n_edges]
    gap = torch.linalg.vector_norm(heads - tails, dim=1, keepdim=True)
    gap = gap.where(gap.isfinite(), 0.0)  # a row that is not a number stays the only one to blame
    gaps = gap[torch.from_numpy(random.integers(n_edges, size=len(ready))).to(ready.device)]
    n_columns = max(ready.shape[1], NOISE_COLUMNS)
    size = gaps * (config.noise / (NOISE_DEVIATION * math.sqrt(n_columns)))
    levels = torch.from_numpy(random.integers(-128, 128, tuple(ready.shape), np.int8))
    return torch.addcmul(ready, size, levels.to(ready.device).float().add_(0.5))


def hold(y: torch.Tensor, rows: Array, anchors: Anchors | None) -> torch.Tensor:
    """The gradient, (p, 2), that holds the points of these rows near their places."""
    if anchors is None:
        return torch.zeros_like(y)
    places = torch.from_numpy(anchors.places[rows]).to(y.device)
    away = (y - places).where(places.isfinite(), 0.0)
    return away * (2 * anchors.pull / (anchors.size**2 * len(y)))


def _fits(n_bytes: int, device: torch.device) -> bool:
    """Whether so much takes less than half of the device's free memory."""
    return device.type != "cuda" or n_bytes < torch.cuda.mem_get_info()[0] // 2


def _checked(drawn: Drawn, step: int, n_rows: int) -> Drawn:
    """The points of a step, all of them rows of the sample."""
    rows = drawn.rows.astype(np.int64, copy=False)
    if len(rows) == 0 or len(rows) < 2 * drawn.n_edges:
        raise ValueError(
            f"fit: step {step} drew {len(rows)} points for {drawn.n_edges} edges; "
            "there must be points, two for every edge"
        )
    if rows.min() < 0 or rows.max() >= n_rows:
        raise ValueError(
            f"fit: step {step} drew rows {rows.min()} to {rows.max()}, there are {n_rows}; "
            "draw rows of this sample"
        )
    return drawn._replace(rows=rows)


def _batch(drawn: Drawn, device: torch.device) -> Batch:
    """The points of a step on the device."""
    rows = torch.from_numpy(drawn.rows).to(device)
    if drawn.affinities is None:
        return Batch(rows, drawn.n_edges)
    return Batch(rows, drawn.n_edges, torch.from_numpy(drawn.affinities).to(device))


def _measure(step: int, pair: PairLoss, layers: Clipped, config: FitConfig) -> dict[str, float]:
    """One step's telemetry, by column."""
    return {
        "step": step,
        "loss": pair.loss,
        "learning_rate": learning_rate(config, step),
        "exaggeration": exaggeration(config, step),
        "pair_gradient": pair.largest,
        "pair_gradient_after": min(pair.largest, config.objective.clip),
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
        f"clip_pairwise ({config.objective.clip:g}) or clip_layer ({config.clip_layer:g})"
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run torch with `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

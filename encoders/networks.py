"""Networks that turn rows into map positions, and the settings that describe them."""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch

Layer = TypeVar("Layer", bound=torch.nn.Linear | torch.nn.Conv2d)

LEAK = 0.01  # slope of LeakyReLU below zero, as in the paper
N_OUTPUTS = 2


@dataclass(frozen=True)
class NetworkConfig:
    """The shape of a network.

    mlp       an input layer, `layers` hidden layers, a linear output layer
    residual  an input layer, `layers` blocks of two layers around which the input is added, output;
              with GELU, because a smooth function fits a map in half the steps
    cnn       for rows that are images of `shape` (height, width[, channels]): three convolutions
              that halve the image, two dense layers, output; about as many weights as the mlp
    package.module:name  a function from the number of inputs to a torch module of your own
    """

    kind: str = "mlp"
    hidden: int = 256
    layers: int = 3
    shape: tuple[int, ...] | None = None


def build_network(config: NetworkConfig, n_inputs: int, seed: int = 0) -> torch.nn.Module:
    """The network of `config`, (b, n_inputs) to (b, 2), with weights drawn from `seed`."""
    if min(n_inputs, config.hidden) < 1 or config.layers < 0:
        raise ValueError(
            f"network: {n_inputs} inputs, hidden {config.hidden}, layers {config.layers}; "
            "widths must be at least 1 and layers at least 0"
        )
    generator = torch.Generator().manual_seed(seed)
    with _seeded(seed):
        match config.kind:
            case "mlp":
                return _mlp(config, n_inputs, generator)
            case "residual":
                return _residual(config, n_inputs, generator)
            case "cnn":
                return _cnn(config, n_inputs, generator)
        if ":" in config.kind:
            return _own(config.kind, n_inputs)
    raise ValueError(
        f"network: kind {config.kind!r} is unknown; use 'mlp', 'residual', 'cnn' or "
        "'package.module:name'"
    )


def build_decoder(config: NetworkConfig, n_outputs: int, seed: int = 0) -> torch.nn.Module:
    """The mlp of `config` the other way round: (b, 2) to (b, n_outputs)."""
    generator = torch.Generator().manual_seed(seed)
    widths = [N_OUTPUTS, *[config.hidden] * (config.layers + 1), n_outputs]
    with _seeded(seed):
        return _chain(widths, generator)


class Output(torch.nn.Linear):
    """The last layer, in float32 whatever the others are in: bfloat16 has three digits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, width) to (b, n_outputs) float32."""
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


class Residual(torch.nn.Module):
    """Two layers whose result is added to what went in."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(
            _linear(width, width, generator), torch.nn.GELU(), _linear(width, width, generator)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, width) to (b, width)."""
        added: torch.Tensor = torch.nn.functional.gelu(x + self.inner(x))
        return added


def _mlp(config: NetworkConfig, n_inputs: int, generator: torch.Generator) -> torch.nn.Module:
    widths = [n_inputs, *[config.hidden] * (config.layers + 1), N_OUTPUTS]
    return _chain(widths, generator)


def _chain(widths: list[int], generator: torch.Generator) -> torch.nn.Sequential:
    """Linear layers of those widths with activations between them."""
    parts: list[torch.nn.Module] = []
    for before, after in pairwise(widths[:-1]):
        parts += [_linear(before, after, generator), _activation()]
    return torch.nn.Sequential(*parts, _output(widths[-2], widths[-1], generator))


def _residual(config: NetworkConfig, n_inputs: int, generator: torch.Generator) -> torch.nn.Module:
    entry = [_linear(n_inputs, config.hidden, generator), torch.nn.GELU()]
    blocks = [Residual(config.hidden, generator) for _ in range(config.layers)]
    return torch.nn.Sequential(*entry, *blocks, _output(config.hidden, N_OUTPUTS, generator))


def _cnn(config: NetworkConfig, n_inputs: int, generator: torch.Generator) -> torch.nn.Module:
    height, width, channels = image_shape(config.shape, n_inputs)
    counts = [channels, *(max(1, config.hidden // part) for part in (8, 4, 4))]
    parts: list[torch.nn.Module] = [_Image(height, width, channels)]
    for before, after in pairwise(counts):
        parts += [_convolution(before, after, generator), _activation()]
        height, width = -(-height // 2), -(-width // 2)
    flat = counts[-1] * height * width
    dense = _chain([flat, config.hidden, config.hidden, N_OUTPUTS], generator)
    return torch.nn.Sequential(*parts, torch.nn.Flatten(), *dense)


def image_shape(shape: tuple[int, ...] | None, n_inputs: int) -> tuple[int, int, int]:
    """Height, width and channels of images of n_inputs values."""
    if shape is None or len(shape) not in (2, 3) or min(shape) < 1:
        raise ValueError(
            f"network: a cnn needs the images' shape, [height, width] or [height, width, "
            f"channels]; found {None if shape is None else list(shape)}"
        )
    if math.prod(shape) != n_inputs:
        raise ValueError(
            f"network: shape {list(shape)} holds {math.prod(shape)} values, the rows have "
            f"{n_inputs}; give the shape of one row"
        )
    height, width, *channels = shape
    return height, width, channels[0] if channels else 1


class _Image(torch.nn.Module):
    """Rows, whose channels vary fastest, as images."""

    def __init__(self, height: int, width: int, channels: int) -> None:
        super().__init__()
        self._shape = height, width, channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, height * width * channels) to (b, channels, height, width)."""
        return x.reshape(-1, *self._shape).permute(0, 3, 1, 2)


def _convolution(before: int, after: int, generator: torch.Generator) -> torch.nn.Conv2d:
    """A 3 x 3 convolution that halves the image, with Xavier weights and a bias of zero."""
    layer = torch.nn.Conv2d(before, after, 3, stride=2, padding=1)
    return _initialize(layer, generator)


def _linear(n_inputs: int, n_outputs: int, generator: torch.Generator) -> torch.nn.Linear:
    """A linear layer with Xavier weights and a bias of zero."""
    return _initialize(torch.nn.Linear(n_inputs, n_outputs), generator)


def _output(n_inputs: int, n_outputs: int, generator: torch.Generator) -> Output:
    return _initialize(Output(n_inputs, n_outputs), generator)


def _initialize(layer: Layer, generator: torch.Generator) -> Layer:
    """The layer with Xavier weights and a bias of zero."""
    torch.nn.init.xavier_uniform_(layer.weight, generator=generator)
    assert layer.bias is not None
    torch.nn.init.zeros_(layer.bias)
    return layer


def _activation() -> torch.nn.Module:
    return torch.nn.LeakyReLU(LEAK)


# Modules without chance, without memory and without a view of the other rows.
_ROW_BY_ROW = {
    torch.nn.Sequential,
    torch.nn.Linear,
    torch.nn.Conv2d,
    torch.nn.Flatten,
    torch.nn.GELU,
    torch.nn.LeakyReLU,
    torch.nn.ReLU,
    torch.nn.SiLU,
    torch.nn.Tanh,
    Output,
    Residual,
    _Image,
}


def places_rows_apart(network: torch.nn.Module) -> bool:
    """Whether a batch may be cut: the network is known to place every row by itself alone."""
    return all(type(module) in _ROW_BY_ROW for module in network.modules())


def _own(kind: str, n_inputs: int) -> torch.nn.Module:
    """The user's network, checked to turn rows into positions."""
    network = _import(kind)(n_inputs)
    if not isinstance(network, torch.nn.Module):
        raise ValueError(
            f"network: {kind} gave a {type(network).__name__}; it must give a torch.nn.Module"
        )
    if not any(weight.requires_grad for weight in network.parameters()):
        raise ValueError(f"network: {kind} has no weights that can be trained; give it some")
    try:
        with torch.no_grad():
            found = tuple(network(torch.zeros(2, n_inputs)).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"network: {kind} does not take rows of {n_inputs} values ({reason}); "
            "build it for that width"
        ) from error
    if found != (2, N_OUTPUTS):
        raise ValueError(
            f"network: {kind} turns (2, {n_inputs}) into {found}; it must give (2, {N_OUTPUTS})"
        )
    return network


def _import(kind: str) -> Callable[[int], object]:
    module, _, name = kind.partition(":")
    try:
        found: Callable[[int], object] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"network: {kind} cannot be imported ({error}); install its package on every worker"
        ) from error
    return found


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Let modules draw their weights from the seed, and give the global generator back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield

"""Networks that turn rows into map positions, and the settings that describe them."""

from dataclasses import dataclass
from itertools import pairwise

import torch

LEAK = 0.01  # slope of LeakyReLU below zero, as in the paper


@dataclass(frozen=True)
class NetworkConfig:
    """The shape of a network: an input layer, `layers` hidden layers, a linear output layer."""

    kind: str = "mlp"
    hidden: int = 256
    layers: int = 3


def build_network(
    config: NetworkConfig, n_inputs: int, n_outputs: int = 2, seed: int = 0
) -> torch.nn.Module:
    """The network of `config`, (b, n_inputs) to (b, n_outputs), with weights drawn from `seed`."""
    if config.kind != "mlp":
        raise ValueError(f"network: kind {config.kind!r} is unknown; use 'mlp'")
    if min(n_inputs, n_outputs, config.hidden) < 1 or config.layers < 0:
        raise ValueError(
            f"network: {n_inputs} inputs, {n_outputs} outputs, hidden {config.hidden}, "
            f"layers {config.layers}; widths must be at least 1 and layers at least 0"
        )
    generator = torch.Generator().manual_seed(seed)
    widths = [n_inputs, *[config.hidden] * (config.layers + 1)]
    parts: list[torch.nn.Module] = []
    for before, after in pairwise(widths):
        parts += [_linear(before, after, generator), torch.nn.LeakyReLU(LEAK)]
    return torch.nn.Sequential(*parts, _linear(widths[-1], n_outputs, generator))


def empty_linear(n_inputs: int, n_outputs: int) -> torch.nn.Linear:
    """A linear layer without values yet; a plain Linear would draw from the global generator."""
    return torch.nn.Linear(n_inputs, n_outputs, device="meta").to_empty(device="cpu")


def _linear(n_inputs: int, n_outputs: int, generator: torch.Generator) -> torch.nn.Linear:
    """A linear layer with Xavier weights and a bias of zero."""
    layer = empty_linear(n_inputs, n_outputs)
    torch.nn.init.xavier_uniform_(layer.weight, generator=generator)
    torch.nn.init.zeros_(layer.bias)
    return layer

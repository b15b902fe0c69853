"""Optimisers over one vector of weights.

Those of `torch.optim` give the same bits (a test holds them together), but making one loads torch's
compiler, which takes as long as dozens of steps, and a step takes half as long again.
"""

from typing import Literal, Protocol

import torch

Kind = Literal["rmsprop", "adam", "sgd"]

TINY = 1e-8  # added to a divisor


def flatten(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """All weights as one vector; the network's own become views of it.

    One long step of the optimiser takes less time than many short ones.
    """
    weights = torch.cat([parameter.detach().ravel() for parameter in parameters])
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, weight in zip(parameters, weights.split(sizes), strict=True):
        parameter.data = weight.view_as(parameter)
    return weights


class Optimizer(Protocol):
    """Moves the weights; `state` is what it remembers from step to step."""

    state: dict[str, torch.Tensor]

    def step(self, gradient: torch.Tensor, learning_rate: float) -> None:
        """Move the weights, in place."""


def build_optimizer(kind: Kind, weights: torch.Tensor) -> Optimizer:
    """The optimiser of that name."""
    match kind:
        case "rmsprop":
            return RmsProp(weights)
        case "adam":
            return Adam(weights)
        case "sgd":
            return Sgd(weights)
    raise ValueError(f"fit: optimizer {kind!r} is unknown; use rmsprop, adam or sgd")


class RmsProp:
    """Steps along the gradient, divided by its usual size."""

    DECAY = 0.99

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        self.state = {"squares": torch.zeros_like(weights)}

    def step(self, gradient: torch.Tensor, learning_rate: float) -> None:
        """Move the weights, in place."""
        squares = self.state["squares"]
        squares.mul_(self.DECAY).addcmul_(gradient, gradient, value=1 - self.DECAY)
        self._weights.addcdiv_(gradient, squares.sqrt().add_(TINY), value=-learning_rate)


class Adam:
    """RMSProp along the gradients' running mean; both means are corrected for their empty start."""

    MEAN_DECAY, SQUARES_DECAY = 0.9, 0.999

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        self.state = {
            "mean": torch.zeros_like(weights),
            "squares": torch.zeros_like(weights),
            "n_steps": torch.tensor(0),
        }

    def step(self, gradient: torch.Tensor, learning_rate: float) -> None:
        """Move the weights, in place."""
        mean, squares = self.state["mean"], self.state["squares"]
        n_steps = int(self.state["n_steps"].add_(1))
        mean.lerp_(gradient, 1 - self.MEAN_DECAY)
        squares.mul_(self.SQUARES_DECAY).addcmul_(gradient, gradient, value=1 - self.SQUARES_DECAY)
        root = (1 - self.SQUARES_DECAY**n_steps) ** 0.5
        size = squares.sqrt().div_(root).add_(TINY)
        self._weights.addcdiv_(mean, size, value=-learning_rate / (1 - self.MEAN_DECAY**n_steps))


class Sgd:
    """Steps along the sum of the gradients so far, the older ones ever less."""

    MOMENTUM = 0.9

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights
        self.state = {"velocity": torch.zeros_like(weights)}

    def step(self, gradient: torch.Tensor, learning_rate: float) -> None:
        """Move the weights, in place."""
        velocity = self.state["velocity"].mul_(self.MOMENTUM).add_(gradient)
        self._weights.add_(velocity, alpha=-learning_rate)

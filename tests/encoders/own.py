"""Networks that a user could bring along."""

import torch


class Own(torch.nn.Module):
    """One hidden layer with a norm."""

    def __init__(self, n_inputs: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(n_inputs, 24),
            torch.nn.LayerNorm(24),
            torch.nn.ReLU(),
            torch.nn.Linear(24, 2, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        placed: torch.Tensor = self.layers(x)
        return placed


def narrow(n_inputs: int) -> torch.nn.Module:
    return torch.nn.Linear(n_inputs - 1, 2)


def wide(n_inputs: int) -> torch.nn.Module:
    return torch.nn.Linear(n_inputs, 3)


def weightless(_: int) -> torch.nn.Module:
    return torch.nn.AdaptiveAvgPool1d(2)


def nothing(n_inputs: int) -> int:
    return n_inputs

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from encoders.optimizers import Kind, build_optimizer, flatten

TORCH: dict[Kind, Callable[[torch.nn.Parameter], torch.optim.Optimizer]] = {
    "rmsprop": lambda weights: torch.optim.RMSprop([weights], lr=0.01),
    "adam": lambda weights: torch.optim.Adam([weights], lr=0.01),
    "sgd": lambda weights: torch.optim.SGD([weights], lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("kind", ["rmsprop", "adam", "sgd"])
def test_steps_are_those_of_torch(kind: Kind) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(100, generator=generator)
    known = torch.nn.Parameter(weights.clone())
    ours, theirs = build_optimizer(kind, weights), TORCH[kind](known)
    for number in range(30):
        known.grad = torch.randn(100, generator=generator) * 10.0 ** (number % 5 - 3)
        theirs.param_groups[0]["lr"] = 0.01 / (number + 1)
        ours.step(known.grad, 0.01 / (number + 1))
        theirs.step()
        assert torch.equal(weights, known.detach())


def test_weights_become_views_of_one_vector() -> None:
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    vector = flatten(list(layer.parameters()))
    assert torch.equal(layer.weight, before)
    vector += 1
    assert torch.equal(layer.weight, before + 1)


def test_no_compiler_is_loaded() -> None:
    code = """
import sys, torch
from encoders.optimizers import build_optimizer
weights = torch.zeros(3)
build_optimizer("rmsprop", weights).step(torch.ones(3), 0.1)
assert weights.all()
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

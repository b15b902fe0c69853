import numpy as np
import pytest
import torch

from encoders.checkpoint import Training, dump, restore
from encoders.networks import NetworkConfig, build_network
from encoders.optimizers import Kind, build_optimizer, flatten


def training(optimizer: Kind, seed: int = 0, settings: bytes = b"same") -> Training:
    network = build_network(NetworkConfig(hidden=4, layers=1), 3, seed=seed)
    weights = flatten(list(network.parameters()))
    return Training(settings, network, build_optimizer(optimizer, weights), {"loss": np.zeros(5)})


def step(run: Training) -> None:
    inputs = torch.linspace(-1, 1, 12).view(4, 3)
    loss = run.network(inputs).square().sum()
    slopes = torch.autograd.grad(loss, list(run.network.parameters()))
    run.optimizer.step(torch.cat([slope.ravel() for slope in slopes]), 0.01)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam", "sgd"])
def test_restored_run_goes_on_where_it_was(optimizer: Kind) -> None:
    run = training(optimizer)
    step(run)
    step(run)
    run.telemetry["loss"][:] = [1, 2, 0, 0, 9]
    blob = dump(run, 2)
    other = training(optimizer, seed=1)
    assert restore(other, blob) == 2
    assert other.telemetry["loss"].tolist() == [1, 2, 0, 0, 0]
    step(run)
    step(other)
    for name, weight in run.network.state_dict().items():
        assert torch.equal(weight, other.network.state_dict()[name])


def test_equal_runs_give_equal_bytes() -> None:
    assert dump(training("adam"), 0) == dump(training("adam"), 0)


def test_checkpoint_of_other_settings_is_refused() -> None:
    blob = dump(training("sgd", settings=b"other"), 0)
    with pytest.raises(ValueError, match="made with other settings"):
        restore(training("sgd"), blob)


def test_checkpoint_of_another_optimizer_is_refused() -> None:
    blob, run = dump(training("adam"), 1), training("rmsprop", seed=1)
    before = dump(run, 0)
    with pytest.raises(ValueError, match=r"mean, n_steps, squares of the optimizer, .* squares;"):
        restore(run, blob)
    assert dump(run, 0) == before


@pytest.mark.parametrize("blob", [b"", b"no safetensors at all", dump(training("sgd"), 0)[:-1]])
def test_damaged_checkpoint_is_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match="resume bytes are no checkpoint"):
        restore(training("sgd"), blob)

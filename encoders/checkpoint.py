"""Checkpoints of a training run: one safetensors blob that holds all a resumed run needs."""

from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from encoders.optimizers import Optimizer


class Training(NamedTuple):
    """A training run under way; `settings` is the digest of whatever decides its outcome."""

    settings: bytes
    network: torch.nn.Module
    optimizer: Optimizer
    telemetry: dict[str, np.ndarray[Any, np.dtype[Any]]]


def dump(training: Training, step: int) -> bytes:
    """The state of a run that has finished `step` steps, as safetensors bytes."""
    tensors = {
        "settings": torch.tensor(list(training.settings), dtype=torch.uint8),
        "step": torch.tensor(step),
    }
    for name, weight in training.network.state_dict().items():
        tensors[f"network.{name}"] = weight
    for name, value in training.optimizer.state.items():
        tensors[f"optimizer.{name}"] = value
    for name, column in training.telemetry.items():
        tensors[f"telemetry.{name}"] = torch.tensor(column[:step])
    return save_tensors(tensors)


def restore(training: Training, blob: bytes) -> int:
    """The number of finished steps; network, optimiser and telemetry take the blob's state."""
    try:
        tensors = load_tensors(blob)
        settings, step = bytes(tensors["settings"].tolist()), int(tensors["step"])
    except (SafetensorError, KeyError) as error:
        raise ValueError(
            f"fit: resume bytes are no checkpoint ({error}); start without them"
        ) from error
    if settings != training.settings:
        raise ValueError(
            f"fit: checkpoint was made with other settings ({settings.hex()[:12]}, this run has "
            f"{training.settings.hex()[:12]}); restore them, or start without the checkpoint"
        )
    state = _part(tensors, "optimizer.")
    if state.keys() != training.optimizer.state.keys():
        raise ValueError(
            f"fit: checkpoint remembers {', '.join(sorted(state))} of the optimizer, this version "
            f"needs {', '.join(sorted(training.optimizer.state))}; start without the checkpoint"
        )
    training.network.load_state_dict(_part(tensors, "network."))
    for name, value in state.items():
        training.optimizer.state[name].copy_(value)
    for name, column in _part(tensors, "telemetry.").items():
        training.telemetry[name][:step] = column.numpy()
    return step


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose name starts with the prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }

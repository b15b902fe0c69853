"""The encoder as an artefact: a raw row goes in, a map position comes out, on any machine."""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from encoders.networks import NetworkConfig, build_network
from encoders.preprocessing import Array, Preprocessing

FORMAT = 3
WEIGHTS_FILE = "encoder.safetensors"
HEADER_FILE = "encoder.json"
EMBED_BATCH = 2048  # 1k to 4k rows are fastest on a CPU; more leave the cache
# A matrix product adds in an order that may depend on a row's place in its batch. Measured with
# MKL on AVX2: at fewer than 12 outputs and a number of inputs that is no multiple of 4, most rows
# change in the last bit when they are moved. Widths padded to 16 (a cache line) were never
# affected, at 1 or 2 threads.
WIDTH_UNIT = 16


class ArtifactError(ValueError):
    """The files are not an encoder that this version can load."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """A trained network with its preprocessing; `info` is JSON that does not touch the map."""

    config: NetworkConfig
    preprocessing: Preprocessing
    network: torch.nn.Module
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def n_inputs(self) -> int:
        """Columns of a row."""
        return self.preprocessing.n_inputs

    def embed(self, rows: Array) -> Array:
        """(n, 2) float32 map positions of (n, n_inputs) rows of any dtype.

        A row's position is bitwise the same whatever rows stand beside it, because every batch
        has the same shape, and its shape is one whose products do not depend on the place.
        """
        if rows.ndim != 2 or rows.shape[1] != self.n_inputs:
            raise ValueError(
                f"embed: rows are {rows.shape}, the encoder takes (n, {self.n_inputs}); "
                "pass the columns it was trained on"
            )
        positions = np.empty((len(rows), 2), np.float32)
        batch = np.zeros((EMBED_BATCH, self.n_inputs), np.float32)
        with torch.inference_mode():
            for start in range(0, len(rows), EMBED_BATCH):
                part = rows[start : start + EMBED_BATCH]
                # What an earlier batch left behind the part is not read.
                self.preprocessing.standardize_into(batch[: len(part)], part)
                placed = self._padded(torch.from_numpy(batch))
                positions[start : start + len(part)] = placed[: len(part)].numpy()
        return positions

    @property
    def digest(self) -> str:
        """The sha256 of all that decides a position: weights, architecture, preprocessing."""
        return _digest(self._header(self._weights()))

    def to_files(self) -> dict[str, bytes]:
        """The artefact, by file name; the same encoder gives the same bytes."""
        weights = self._weights()
        header = self._header(weights)
        header |= {"digest": _digest(header), "info": self.info}
        text = json.dumps(header, sort_keys=True, indent=2, allow_nan=False) + "\n"
        return {WEIGHTS_FILE: weights, HEADER_FILE: text.encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Encoder":
        """The encoder in the files, once format, digests and shapes are found to be right."""
        header = _checked_header(files)
        config = NetworkConfig(**header["architecture"])
        if config.shape is not None:
            config = replace(config, shape=tuple(config.shape))
        n_inputs, n_components = int(header["n_inputs"]), header["preprocessing"]["components"]
        network = build_network(config, n_components or n_inputs).eval()
        tensors = _checked_tensors(files[WEIGHTS_FILE], network, n_inputs, n_components)
        components = tensors.pop("preprocessing.components", None)
        preprocessing = Preprocessing(
            tensors.pop("preprocessing.centre").numpy().copy(),
            float(tensors.pop("preprocessing.scale")),
            bool(header["preprocessing"]["normalize"]),
            None if components is None else components.numpy().copy(),
        )
        network.load_state_dict({name.removeprefix("network."): t for name, t in tensors.items()})
        return cls(config, preprocessing, network, header["info"])

    def save(self, folder: Path) -> None:
        """Write the artefact into the folder, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.to_files().items():
            (folder / name).write_bytes(content)

    @classmethod
    def load(cls, folder: Path) -> "Encoder":
        """The encoder saved in the folder."""
        paths = [folder / WEIGHTS_FILE, folder / HEADER_FILE]
        return cls.from_files({path.name: path.read_bytes() for path in paths if path.exists()})

    def _weights(self) -> bytes:
        """The numbers of the encoder as safetensors bytes."""
        tensors = {f"network.{name}": t for name, t in self.network.state_dict().items()}
        tensors["preprocessing.centre"] = torch.from_numpy(self.preprocessing.centre)
        tensors["preprocessing.scale"] = torch.tensor(self.preprocessing.scale, dtype=torch.float64)
        if self.preprocessing.components is not None:
            tensors["preprocessing.components"] = torch.from_numpy(self.preprocessing.components)
        return save_tensors(tensors)

    def _header(self, weights: bytes) -> dict[str, Any]:
        """What the weights alone do not say, and their digest."""
        steps = self.preprocessing
        n_components = None if steps.components is None else steps.n_outputs
        return {
            "format": FORMAT,
            "architecture": asdict(self.config),
            "preprocessing": {"normalize": steps.normalize, "components": n_components},
            "n_inputs": self.n_inputs,
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
        }

    @cached_property
    def _padded(self) -> torch.nn.Module:
        """From standardised rows to positions, by products that do not depend on the place."""
        network = _pad_linears(copy.deepcopy(self.network))
        components = self.preprocessing.components
        if components is None:
            return network.eval()
        projection = torch.from_numpy(components.T)
        bias = torch.zeros(len(projection))
        return torch.nn.Sequential(PaddedLinear(projection, bias), network).eval()


def set_threads(n: int) -> None:
    """Make torch use n threads in this process; embed itself leaves the setting alone."""
    torch.set_num_threads(n)


def _digest(header: Mapping[str, Any]) -> str:
    """The sha256 of a header, in hexadecimal."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _checked_header(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The header of an artefact whose format is ours and whose digests hold."""
    for name in (WEIGHTS_FILE, HEADER_FILE):
        if name not in files:
            raise ArtifactError(f"encoder: {name} is missing; copy both files of the artefact")
    try:
        header = dict(json.loads(files[HEADER_FILE]))
        found = header["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(
            f"encoder: {HEADER_FILE} is no encoder header ({error!r}); copy the artefact again"
        ) from error
    if found != FORMAT:
        raise ArtifactError(
            f"encoder: format {found!r}, this version reads {FORMAT}; "
            "use the version that wrote it, or train again"
        )
    covered = {name: value for name, value in header.items() if name not in ("digest", "info")}
    sums = {
        WEIGHTS_FILE: (hashlib.sha256(files[WEIGHTS_FILE]).hexdigest(), covered["weights_sha256"]),
        HEADER_FILE: (_digest(covered), header["digest"]),
    }
    for name, (have, need) in sums.items():
        if have != need:
            raise ArtifactError(
                f"encoder: {name} has digest {have[:12]}, needs {str(need)[:12]}; "
                "it was changed or cut short, copy the artefact again"
            )
    return header


def _checked_tensors(
    weights: bytes, network: torch.nn.Module, n_inputs: int, n_components: int | None
) -> dict[str, torch.Tensor]:
    """The tensors of an artefact, whose names and shapes are those its header implies."""
    try:
        tensors: dict[str, torch.Tensor] = load_tensors(weights)
    except SafetensorError as error:
        raise ArtifactError(f"encoder: {WEIGHTS_FILE}: {error}; copy the artefact again") from error
    needed = {f"network.{name}": tuple(t.shape) for name, t in network.state_dict().items()}
    needed |= {"preprocessing.centre": (n_inputs,), "preprocessing.scale": ()}
    if n_components is not None:
        needed["preprocessing.components"] = (n_inputs, n_components)
    for name in sorted(needed.keys() | tensors.keys()):
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != needed.get(name, "absent"):
            raise ArtifactError(
                f"encoder: tensor {name} is {found}, needs to be {needed.get(name, 'absent')}; "
                "header and weights are of different encoders"
            )
    return tensors


class PaddedLinear(torch.nn.Module):
    """A linear layer whose product has widths that are multiples of WIDTH_UNIT, padded by zeros."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        super().__init__()
        self._n_outputs = len(weight)
        outputs, self._short = (-width % WIDTH_UNIT for width in weight.shape)
        self._weight = torch.nn.functional.pad(weight.detach(), (0, self._short, 0, outputs))
        self._bias = torch.nn.functional.pad(bias.detach(), (0, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer itself would give, but for the order of the additions."""
        if self._short:
            x = torch.nn.functional.pad(x, (0, self._short))
        outputs: torch.Tensor = torch.nn.functional.linear(x, self._weight, self._bias)
        # Without gaps: with them, a GELU's last bit depends on where threads cut the batch.
        return outputs[..., : self._n_outputs].contiguous()


def _pad_linears(module: torch.nn.Module) -> torch.nn.Module:
    """The module with its linear layers, at any depth, replaced by padded ones."""
    if isinstance(module, torch.nn.Linear):
        bias = torch.zeros(module.out_features) if module.bias is None else module.bias
        return PaddedLinear(module.weight, bias)
    for name, child in module.named_children():
        setattr(module, name, _pad_linears(child))
    return module

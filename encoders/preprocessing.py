"""What happens to a row before the network: fitted on the sample, saved with the weights."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

BLOCK_ROWS = 8192  # rows widened at once when statistics are taken
COMPONENT_ROWS = 20_000  # rows that decide the principal components
SPARE_DIRECTIONS, SUBSPACE_ROUNDS = 10, 4


@dataclass(frozen=True)
class PreprocessingConfig:
    """Which steps there are, in this order.

    pca: the number of components kept; rows of no more columns stay as they are.
    """

    normalize: bool = False
    centre: bool = True
    scale: bool = True
    pca: int | None = None


@dataclass(frozen=True, eq=False)
class Preprocessing:
    """The fitted steps; part of the artefact.

    normalize: rows are brought to unit length first, for cosine distances. centre: (d,) float32.
    scale: one number for all columns, so that distances keep their order. components: (d, c)
    float32, onto which the rows are projected.
    """

    centre: Array
    scale: float
    normalize: bool
    components: Array | None = None

    @property
    def n_inputs(self) -> int:
        """Columns of a raw row."""
        return len(self.centre)

    @property
    def n_outputs(self) -> int:
        """Columns of a prepared row."""
        return self.n_inputs if self.components is None else self.components.shape[1]

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """(b, n_outputs) float32: the rows, of any dtype, prepared for the network."""
        ready = self.standardize(rows)
        if self.components is None:
            return ready
        return ready @ torch.from_numpy(self.components).to(rows.device)

    def apply_all(self, rows: Array) -> torch.Tensor:
        """(n, n_outputs) float32: all the rows, prepared block by block."""
        blocks = [rows[start : start + BLOCK_ROWS] for start in range(0, len(rows), BLOCK_ROWS)]
        return torch.cat([self.apply(torch.from_numpy(np.array(block))) for block in blocks])

    def standardize(self, rows: torch.Tensor) -> torch.Tensor:
        """(b, d) float32: the rows, of any dtype, up to the projection."""
        centre = torch.from_numpy(self.centre).to(rows.device)
        return (_widen(rows, self.normalize) - centre) / self.scale

    def standardize_into(self, out: Array, rows: Array) -> None:
        """What `standardize` gives, but for the last bits, written over `out`.

        Few passes over the numbers: the network alone should take time.
        """
        if self.normalize:
            out[:] = self.standardize(torch.from_numpy(np.array(rows))).numpy()
            return
        np.subtract(rows, self.centre, out=out, dtype=np.float32, casting="unsafe")
        if self.scale != 1:
            out *= np.float32(1 / self.scale)


def fit_preprocessing(rows: Array, config: PreprocessingConfig) -> Preprocessing:
    """The steps of `config`, their statistics taken over the rows and accumulated in float64."""
    n, d = rows.shape
    if n == 0:
        raise ValueError("fit_preprocessing: there are no rows; at least one is needed")
    if config.pca is not None and config.pca < 1:
        raise ValueError(f"fit_preprocessing: pca is {config.pca}; at least 1 component is needed")
    total = sum((block.sum(0) for block in _blocks(rows, config.normalize)), np.zeros(d))
    if not np.isfinite(total).all():
        raise ValueError("fit_preprocessing: rows hold NaN or infinity; remove such rows first")
    centre = (total / n * config.centre).astype(np.float32)
    scale = 1.0
    if config.scale:
        squares = (np.square(block - centre).sum() for block in _blocks(rows, config.normalize))
        scale = math.sqrt(float(sum(squares)) / rows.size) or 1.0
    plain = Preprocessing(centre, scale, config.normalize)
    if config.pca is None or config.pca >= d:
        return plain
    return Preprocessing(centre, scale, config.normalize, _components(rows, plain, config))


def _components(rows: Array, plain: Preprocessing, config: PreprocessingConfig) -> Array:
    """(d, c) principal directions; with `scale` the projections are as large as the rows were.

    Found by iterating on a random subspace, so that rows of any width take memory for a few of its
    directions only: a covariance matrix of 16,384 columns would need 2 GiB and hours.
    """
    some = rows[:: -(-len(rows) // COMPONENT_ROWS)]
    n_kept = min(config.pca or 0, len(some))
    rng = np.random.default_rng(0)
    width = min(n_kept + SPARE_DIRECTIONS, rows.shape[1])
    directions = np.linalg.qr(rng.normal(size=(rows.shape[1], width)))[0]
    for _ in range(SUBSPACE_ROUNDS):
        directions = np.linalg.qr(_spread(some, plain, directions))[0]
    spread = directions.T @ _spread(some, plain, directions)
    values, turned = np.linalg.eigh((spread + spread.T) / 2)
    kept = directions @ turned[:, ::-1][:, :n_kept]
    # The sign of a direction is free; the largest entry decides it on every machine.
    kept = kept * np.sign(kept[np.abs(kept).argmax(axis=0), np.arange(kept.shape[1])])
    if config.scale:
        kept = kept / (math.sqrt(max(float(values[::-1][:n_kept].mean()), 0.0)) or 1.0)
    return np.ascontiguousarray(kept, dtype=np.float32)


def _spread(rows: Array, plain: Preprocessing, directions: Array) -> Array:
    """The covariance of the rows times the directions, (d, w) float64, block by block."""
    narrow = directions.astype(np.float32)
    products, total = np.zeros(directions.shape), np.zeros(len(directions))
    for start in range(0, len(rows), BLOCK_ROWS):
        block = plain.apply(torch.from_numpy(np.array(rows[start : start + BLOCK_ROWS]))).numpy()
        products += block.T @ (block @ narrow)
        total += block.sum(0, dtype=np.float64)
    mean = total / len(rows)
    found: Array = products / len(rows) - np.outer(mean, mean @ directions)
    return found


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

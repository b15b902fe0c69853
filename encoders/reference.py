"""What an encoder was trained on, in small: enough to tell how new a row is to it.

A row's distance is the mean of those to the nearest reference rows, which are training rows. Its
novelty is the share of other training rows that lie nearer than it does: for rows like those
that trained it is even between 0 and 1, and one row in a hundred has more than 0.99.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from encoders.artifact import EMBED_BATCH, ArtifactError, Encoder, PaddedLinear
from encoders.preprocessing import Array, Preprocessing

FORMAT = 1
REFERENCE_FILE = "reference.safetensors"
NEAREST = 5
# Twice as many see new rows little better and take twice the time, which is that of embedding.
REFERENCE_ROWS, REFERENCE_VALUES = 2048, 1 << 23
OTHER_ROWS, FEWEST_OTHER_ROWS = 8192, 1000
TILES = 32

Extent = tuple[float, float, float, float]  # x0, x1, y0, y1


@dataclass(frozen=True, eq=False)
class Reference:
    """Some training rows as `view` gives them, distances of others, and their places on the map.

    rows: (r, v) float32. distances: (m,) float32, rising. tiles: (TILES, TILES) int64, training
    rows by tile of the map's frame, `extent`. encoder: the digest of the one they trained.
    """

    preprocessing: Preprocessing
    rows: Array
    distances: Array
    tiles: Array
    extent: Extent
    encoder: str

    def view(self, rows: Array) -> Array:
        """(n, v) float32: the rows as the network gets them, and how much a projection left out.

        The length of that rest is one more column, so that rows off the plane are seen.
        """
        return _in_batches(rows, lambda batch: view_rows(self.preprocessing, batch))

    def measure(self, rows: Array) -> Array:
        """(n,) float32: the rows' distances; a row's is bitwise the same whatever is beside it."""

        def measure(batch: torch.Tensor) -> torch.Tensor:
            return self._nearest(view_rows(self.preprocessing, batch), NEAREST).mean(1)

        return _in_batches(rows, measure)

    def score(self, rows: Array) -> Array:
        """(n,) float32: the rows' novelties."""
        ranks = np.searchsorted(self.distances, self.measure(rows), side="right")
        return (ranks / (len(self.distances) + 1)).astype(np.float32)

    def to_bytes(self) -> bytes:
        """The reference as safetensors, with a digest of its own."""
        tensors = {
            "rows": torch.from_numpy(self.rows),
            "distances": torch.from_numpy(self.distances),
            "tiles": torch.from_numpy(self.tiles),
            "extent": torch.tensor(self.extent, dtype=torch.float64),
            "encoder": _letters(self.encoder),
            "format": torch.tensor(FORMAT),
        }
        return save_tensors(tensors | {"digest": _letters(_digest(tensors))})

    @classmethod
    def from_bytes(cls, data: bytes, encoder: Encoder) -> "Reference":
        """The reference of that encoder, once format and digests are found to be right."""
        tensors, owner = _checked(data)
        if owner != encoder.digest:
            raise ArtifactError(
                f"encoder: {REFERENCE_FILE} is of encoder {owner[:12]}, this one is "
                f"{encoder.digest[:12]}; copy the artefact again"
            )
        x0, x1, y0, y1 = tensors["extent"].tolist()
        rows, distances, tiles = (
            tensors[name].numpy().copy() for name in ("rows", "distances", "tiles")
        )
        return cls(encoder.preprocessing, rows, distances, tiles, (x0, x1, y0, y1), owner)

    @cached_property
    def _middle(self) -> torch.Tensor:
        """The reference's mean row: about it the products below lose the fewest digits."""
        return torch.from_numpy(self.rows.mean(0, dtype=np.float64).astype(np.float32))

    @cached_property
    def _products(self) -> PaddedLinear:
        """From rows x about the middle to x·r - |r|²/2, for every reference row r about it."""
        rows = torch.from_numpy(self.rows) - self._middle
        return PaddedLinear(rows, rows.square().sum(1) / -2)

    def _nearest(self, view: torch.Tensor, k: int) -> torch.Tensor:
        """(b, k) distances to the nearest reference rows, rising; fewer where there are fewer."""
        view = view - self._middle
        near = self._products(view).topk(min(k, len(self.rows)), dim=1).values
        squares: torch.Tensor = view.square().sum(1, keepdim=True) - 2 * near
        return squares.clamp(min=0).sqrt()


def fit_reference(encoder: Encoder, rows: Array, xy: Array, extent: Extent) -> Reference:
    """The reference of an encoder that was trained on the rows, (n, d).

    xy: places of some of them. Distances are those of rows apart from the reference; where there
    are too few of those, of the reference rows, each without itself.
    """
    preprocessing, digest = encoder.preprocessing, encoder.digest
    width = preprocessing.n_outputs + (preprocessing.components is not None)
    n_rows = min(REFERENCE_ROWS, max(NEAREST + 1, REFERENCE_VALUES // width), len(rows))
    order = np.random.default_rng(0).permutation(len(rows))
    empty = np.empty((0, width), np.float32)
    bare = Reference(preprocessing, empty, empty[:, 0], count_tiles(xy, extent), extent, digest)
    view = bare.view(rows[np.sort(order[:n_rows])])
    reference = Reference(preprocessing, view, empty[:, 0], bare.tiles, extent, digest)
    others = np.sort(order[n_rows : n_rows + OTHER_ROWS])
    if len(others) >= FEWEST_OTHER_ROWS:
        distances = reference.measure(rows[others])
    else:
        nearest = reference._nearest(torch.from_numpy(view), NEAREST + 1)
        distances = nearest[:, 1:].mean(1).numpy()
    return Reference(preprocessing, view, np.sort(distances), bare.tiles, extent, digest)


def diameter(extent: Extent) -> float:
    """The diagonal of the map's frame: what displacements are measured by."""
    x0, x1, y0, y1 = extent
    return math.hypot(x1 - x0, y1 - y0)


def count_tiles(xy: Array, extent: Extent) -> Array:
    """(TILES, TILES) int64: finite places by tile of the frame; others are in the nearest tile."""
    x0, x1, y0, y1 = extent
    shares = (xy.astype(np.float64) - [x0, y0]) / [x1 - x0, y1 - y0]
    column, row = np.clip(shares * TILES, 0, TILES - 1).astype(np.int64).T
    counts: Array = np.bincount(row * TILES + column, minlength=TILES**2)
    return counts.reshape(TILES, TILES)


def view_rows(preprocessing: Preprocessing, batch: torch.Tensor) -> torch.Tensor:
    """(b, v) float32: the rows as the network gets them, and the length of what it does not get."""
    ready = preprocessing.standardize(batch)
    components = preprocessing.components
    if components is None:
        return ready
    project = PaddedLinear(torch.from_numpy(components.T), torch.zeros(components.shape[1]))
    projected = project(ready)
    # The components are orthogonal and of one length, by which the projections were scaled.
    length = float(np.linalg.norm(components[:, 0]))
    squares = (ready * length).square().sum(1) - projected.square().sum(1)
    return torch.cat([projected, squares.clamp(min=0).sqrt()[:, None]], 1)


def _in_batches(rows: Array, function: Callable[[torch.Tensor], torch.Tensor]) -> Array:
    """What the function makes of the rows, (n, ...), given batches of one shape; see `embed`."""
    batch = np.zeros((EMBED_BATCH, rows.shape[1]), np.float32)
    found: list[Array] = []
    with torch.inference_mode():
        for start in range(0, max(1, len(rows)), EMBED_BATCH):
            part = rows[start : start + EMBED_BATCH]
            batch[: len(part)] = part
            found.append(function(torch.from_numpy(batch))[: len(part)].numpy().copy())
    return np.concatenate(found)


def _letters(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """The sha256 of the tensors, in hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _checked(data: bytes) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a reference whose format is ours and whose digest holds; whose it is."""
    try:
        tensors: dict[str, torch.Tensor] = load_tensors(data)
        found = int(tensors["format"])
        digest, owner = (bytes(tensors[name].tolist()).decode() for name in ("digest", "encoder"))
    except (SafetensorError, KeyError, ValueError) as error:
        raise ArtifactError(
            f"encoder: {REFERENCE_FILE} is no reference ({error}); copy the artefact again"
        ) from error
    if found != FORMAT:
        raise ArtifactError(
            f"encoder: {REFERENCE_FILE} has format {found}, this version reads {FORMAT}; "
            "use the version that wrote it, or train again"
        )
    del tensors["digest"]
    if digest != _digest(tensors):
        raise ArtifactError(
            f"encoder: {REFERENCE_FILE} was changed or cut short; copy the artefact again"
        )
    return tensors, owner

"""Rows for the graph benchmarks: data sets from files, generated clusters, both as a lake."""

import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks import measure

Floats = NDArray[np.float32]

SETS = {
    "mnist": ("mnist", "x_train"),
    "fashion_mnist": ("fashion_mnist", "x_train"),
    "glove": ("glove_100d_200k", "x"),
}
QUICK_ROWS = 4000
ROWS_PER_FILE = 50_000

# Clusters 16 apart whose rows are 11 apart and lie, but for some noise, in 12 dimensions: they
# overlap, and cells cut through them.
N_CLUSTERS = 1000
SUBSPACE = 12
SPREAD = 8.0
NOISE = 0.1


class Rows(NamedTuple):
    """A data set: its vectors, as it stores them, (n, d)."""

    name: str
    vectors: NDArray[Any]

    @property
    def title(self) -> str:
        """Name and shape."""
        n_rows, width = self.vectors.shape
        return f"{self.name} {n_rows:,} x {width}"


def load_set(folder: Path | None, name: str, quick: bool) -> Rows | None:
    """The data set, with --quick its first rows; None, and a line, when the file is not there."""
    file, array = SETS[name]
    path = (folder or Path()) / f"{file}.npz"
    if folder is None or not path.is_file():
        print(f"{name}: {file}.npz is missing; benchmarks/README.md says where", file=sys.stderr)
        return None
    with np.load(path, allow_pickle=False) as arrays:
        if array not in arrays.files:
            measure.stop(f"{path} has no {array}; benchmarks/README.md says what it must hold")
        vectors = arrays[array]
    return Rows(name, vectors[:QUICK_ROWS] if quick else vectors)


def generate(n_rows: int, width: int, seed: int = 0) -> Iterator[Floats]:
    """Blocks of clustered rows, (50000, width) float32; more rows begin with the same ones."""
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((N_CLUSTERS, width), dtype=np.float32)
    bases = rng.standard_normal((N_CLUSTERS, SUBSPACE, width), dtype=np.float32)
    bases *= SPREAD / np.sqrt(SUBSPACE * width)
    for index, start in enumerate(range(0, n_rows, ROWS_PER_FILE)):
        rng = np.random.default_rng([seed, index])
        yield _block(rng, centers, bases)[: n_rows - start]


def _block(rng: np.random.Generator, centers: Floats, bases: Floats) -> Floats:
    """One block of rows, each of a random cluster."""
    clusters = rng.integers(len(centers), size=ROWS_PER_FILE)
    places = rng.standard_normal((ROWS_PER_FILE, SUBSPACE), dtype=np.float32)
    rows = rng.standard_normal((ROWS_PER_FILE, centers.shape[1]), dtype=np.float32) * NOISE
    rows += centers[clusters]
    order = np.argsort(clusters, kind="stable")
    bounds = np.searchsorted(clusters[order], np.arange(len(centers) + 1))
    for cluster, (start, stop) in enumerate(pairwise(bounds)):
        members = order[start:stop]
        rows[members] += places[members] @ bases[cluster]
    return rows


def save_generated(path: Path, n_rows: int, width: int) -> Floats:
    """The rows in a .npy file, written block by block; what is returned stays on disk."""
    array = np.lib.format.open_memmap(path, "w+", np.float32, (n_rows, width))
    start = 0
    for block in generate(n_rows, width):
        array[start : start + len(block)] = block
        start += len(block)
    array.flush()
    return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]


def blocks_of(vectors: NDArray[Any], rows_per_file: int = ROWS_PER_FILE) -> Iterator[NDArray[Any]]:
    """The rows in blocks of a file each; small sets in at least four."""
    step = max(1, min(rows_per_file, -(-len(vectors) // 4)))
    return (vectors[start : start + step] for start in range(0, len(vectors), step))


def write_lake(folder: Path, blocks: Iterable[NDArray[Any]]) -> None:
    """The blocks as Parquet files of the columns `row` and `vector`."""
    folder.mkdir(parents=True)
    start = 0
    for index, block in enumerate(blocks):
        columns = {
            "row": pa.array(np.arange(start, start + len(block))),
            "vector": pa.FixedSizeListArray.from_arrays(
                pa.array(np.ascontiguousarray(block).ravel()), block.shape[1]
            ),
        }
        pq.write_table(pa.table(columns), folder / f"part-{index:05d}.parquet", compression="none")
        start += len(block)

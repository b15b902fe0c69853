"""The points of every training step: edges in the order they were drawn, or rows with their P."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from encoders.fit import Drawn
from pipeline.errors import ConfigError
from pipeline.kernels.symmetrize import SparseRows

Ids = NDArray[np.int64]

EDGES_IN_MEMORY = 1 << 18


class Edges(NamedTuple):
    """A stretch of edges; negatives, (n, m), are of the heads."""

    heads: Ids
    tails: Ids
    negatives: Ids | None = None


class EdgeBatches:
    """The points of each step, read forward through the edges, a stretch at a time."""

    def __init__(self, read: Callable[[int, int], Edges], n_edges: int, per_step: int) -> None:
        self._read, self._n_edges, self._per_step = read, n_edges, per_step
        self._start = 0
        self._held = Edges(np.empty(0, np.int64), np.empty(0, np.int64))

    def __call__(self, step: int) -> Drawn:
        """The step's heads, tails and negatives, if there are any."""
        start = step * self._per_step
        stop = start + self._per_step
        if start < self._start or stop > self._start + len(self._held.heads):
            n_read = max(EDGES_IN_MEMORY, self._per_step)
            self._start = start
            self._held = self._read(start, min(start + n_read, self._n_edges))
        inside = slice(start - self._start, stop - self._start)
        points = [part[inside].ravel() for part in self._held if part is not None]
        return Drawn(np.concatenate(points), self._per_step)


class PointBatches:
    """Rows in random order, all of them once an epoch, with their affinities to one another."""

    def __init__(self, graph: SparseRows, batch: int, seed: int) -> None:
        n_rows = len(graph.offsets) - 1
        if batch > n_rows:
            raise ConfigError(
                f"train.batch is {batch}, the sample has {n_rows} rows; "
                "lower it, or train on batches of edges"
            )
        self._graph: Any = sparse.csr_array(
            (graph.values, graph.columns, graph.offsets), shape=(n_rows, n_rows)
        )
        self._n_rows, self._batch, self._seed = n_rows, batch, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __call__(self, step: int) -> Drawn:
        """The step's rows."""
        epoch, number = divmod(step, self._n_rows // self._batch)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._n_rows)
        rows = self._order[number * self._batch : (number + 1) * self._batch]
        affinities = self._graph[rows][:, rows].toarray()
        return Drawn(rows, affinities=affinities)

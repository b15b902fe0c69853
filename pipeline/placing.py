"""Rows to places by a trained encoder, and how new they are to a published one."""

from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from encoders.artifact import EMBED_BATCH, HEADER_FILE, WEIGHTS_FILE, Encoder
from encoders.reference import REFERENCE_FILE, Reference
from pipeline.kernels.sampling import draw_positions
from pipeline.manifest import open_store
from pipeline.partitions import Partition
from pipeline.stage import Context, StoreRef
from pipeline.stages.embed import DRIFT_ROWS, PUBLISHED_ENCODER

NOWHERE = np.empty((0, 2), np.float32)


@lru_cache(maxsize=2)
def load_encoder(ref: StoreRef) -> Encoder:
    """The trained encoder, loaded once per process; its digest is checked."""
    store = open_store(ref.folder, ref.digest)
    record = store.records[0]
    names = (WEIGHTS_FILE, HEADER_FILE)
    return Encoder.from_files({name: store.file(record, name) for name in names})


@lru_cache(maxsize=2)
def load_reference(ref: StoreRef) -> Reference | None:
    """What the published encoder was trained on; None of one that this run trained."""
    store = open_store(ref.folder, ref.digest)
    if store.manifest.stage != PUBLISHED_ENCODER:
        return None
    data = store.file(store.records[0], REFERENCE_FILE)
    return Reference.from_bytes(data, load_encoder(ref))


class Places:
    """Places of rows that are still being read: each batch while it is in the processor's cache."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._read: NDArray[Any] | None = None
        self._n_placed = 0
        self._found: list[NDArray[np.float32]] = []

    def follow(self, vectors: NDArray[Any]) -> None:
        """Place the rows read so far, less those that do not fill a batch."""
        self._place(vectors, len(vectors) // EMBED_BATCH * EMBED_BATCH)

    def of(self, vectors: NDArray[Any]) -> NDArray[np.float32]:
        """The places of all rows, once they are all there."""
        self._place(vectors, len(vectors))
        return np.concatenate([NOWHERE, *self._found])

    def _place(self, vectors: NDArray[Any], stop: int) -> None:
        if vectors.base is not self._read:  # read anew, because a file had changed
            self._read, self._n_placed, self._found = vectors.base, 0, []
        if stop > self._n_placed:
            self._found.append(self._encoder.embed(vectors[self._n_placed : stop]))
            self._n_placed = stop


class Judged(NamedTuple):
    """How new a partition's rows are, and those of them that drift is measured on.

    novelty: (n,) float32. drawn: (m, 2 + v) float32, place and view; see `Reference`.
    """

    novelty: NDArray[np.float32]
    drawn: NDArray[np.float32]


def judge_rows(
    context: Context[Any],
    partition: Partition,
    vectors: NDArray[Any],
    xy: NDArray[np.float32],
) -> Judged | None:
    """How new the rows are to a published encoder; None to one that this run trained.

    Its training rows are what novelty is measured by, and they are a sample of these rows.
    """
    reference = load_reference(context.inputs["train"])
    if reference is None:
        return None
    starts, drawn = _drawn_rows(context.inputs["ingest"])
    start = starts[partition.index]
    low, high = np.searchsorted(drawn, [start, start + len(vectors)])
    some = drawn[low:high] - start
    some = some[np.isfinite(xy[some]).all(axis=1)]
    return Judged(
        reference.score(vectors), np.concatenate([xy[some], reference.view(vectors[some])], axis=1)
    )


@lru_cache(maxsize=2)
def _drawn_rows(ref: StoreRef) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each partition's good rows start among all, and the rows to measure drift on."""
    ingest = open_store(ref.folder, ref.digest)
    starts = np.cumsum([0, *(record.n_rows for record in ingest.records)], dtype=np.int64)
    return starts, np.sort(draw_positions(int(starts[-1]), DRIFT_ROWS, [crc32(b"drift")]))

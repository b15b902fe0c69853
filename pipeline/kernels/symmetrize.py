"""From affinities of rows to their neighbors to a symmetric graph, one block of rows at a time."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Ids = NDArray[np.int64]
Unsigned = NDArray[np.unsignedinteger[Any]]
Floats = NDArray[np.float32]


class SparseRows(NamedTuple):
    """A block of sparse rows: row i holds entries offsets[i]..offsets[i+1]."""

    offsets: Ids  # (n + 1,) int64
    columns: Ids  # (nnz,) int64, ascending in each row
    values: Floats  # (nnz,) float32


class Sent(NamedTuple):
    """Entries of a block sorted by the block their neighbor is in.

    Rows count from their block's first, so that two bytes do for blocks of up to 65,536 rows.
    """

    starts: Ids  # (b + 1,) int64: entries starts[j]..starts[j+1] go to block j
    targets: Unsigned  # (m,), the neighbor's row in block j
    sources: Unsigned  # (m,), the row in this block; ascending inside a block j
    values: Floats  # (m,) float32


class Received(NamedTuple):
    """Entries of any rows to the rows of one block, sources ascending."""

    targets: NDArray[np.integer[Any]]  # (m,), row in the block
    sources: Ids  # (m,) int64, global
    values: Floats  # (m,) float32


def send_entries(ids: Ids, values: Floats, starts: Ids) -> Sent:
    """Return the entries of a block of rows, sorted by the block that each one's neighbor is in.

    ids and values are (n, k); block j, this one among them, holds rows starts[j]..starts[j+1].
    """
    narrow = np.min_scalar_type(np.diff(starts).max() - 1)
    blocks = find_blocks(ids.ravel(), starts)
    targets = (ids.ravel() - starts[blocks]).astype(narrow)
    # NumPy sorts integers of at most 16 bits by counting.
    order = np.argsort(blocks, kind="stable")
    counts = np.bincount(blocks, minlength=len(starts) - 1)
    sources = np.repeat(np.arange(len(ids), dtype=narrow), ids.shape[1])
    return Sent(
        np.concatenate([[0], np.cumsum(counts)]),
        targets[order],
        sources[order],
        values.ravel()[order],
    )


def find_blocks(ids: Ids, starts: Ids) -> Unsigned:
    """Return the block of each id, (m,) in the narrowest type; ids are of 0..starts[-1].

    No block is empty. A table over stretches no longer than a block says which one or two blocks
    an id can be in: a fifth of the time of a binary search.
    """
    shift = int(np.diff(starts).min()).bit_length() - 1
    firsts = np.arange(0, starts[-1], 1 << shift)
    table = np.searchsorted(starts, firsts, side="right") - 1
    blocks: Unsigned = table.astype(np.min_scalar_type(len(starts) - 2))[ids >> shift]
    blocks += ids >= starts[1:][blocks]
    return blocks


def join_probabilities(ids: Ids, values: Floats, received: Received, n_total: int) -> SparseRows:
    """Return P_ij = (p(j|i) + p(i|j)) / (2 n_total) of a block's rows i; see `_pair`.

    P_ij and P_ji are bitwise equal: a sum of two float64 does not depend on their order.
    """
    pairs = _pair(ids, values, received, n_total)
    return _rows(pairs, (_there(pairs) + _back(pairs)) / (2 * n_total))


def join_memberships(ids: Ids, values: Floats, received: Received, n_total: int) -> SparseRows:
    """Return the fuzzy union a + b - ab of memberships in both directions; see `_pair`.

    Bitwise symmetric, as neither a float64 sum nor a product depends on the order.
    """
    pairs = _pair(ids, values, received, n_total)
    there, back = _there(pairs), _back(pairs)
    return _rows(pairs, there + back - there * back)


def _pair(ids: Ids, values: Floats, received: Received, n_total: int) -> Any:
    """Return a CSR array, (n, n_total) complex64: what i sends to j + what j sends to i times 1j.

    ids and values are (n, k), what the block's rows send, no id twice in a row; received is what
    they get. Entries that are 0 in both directions are left out. The one C loop that adds sparse
    rows so does for every way to combine two directions.
    """
    n_rows, k = ids.shape
    shape = (n_rows, n_total)
    # int32 where it does, because SciPy would look through all indices to find that out.
    narrow = max(n_total, ids.size + len(received.values)) < 2**31
    index: type[np.integer[Any]] = np.int32 if narrow else np.int64
    columns, sorted_values = _sort_rows(ids, values)
    forward = sparse.csr_array(
        (
            sorted_values.astype(np.complex64),
            columns.astype(index),
            np.arange(0, ids.size + 1, k, dtype=index),
        ),
        shape=shape,
    )
    data = np.zeros(len(received.values), np.complex64)
    data.imag = received.values
    # Counting by row keeps the order of the sources, so that columns ascend here too.
    places = (received.targets.astype(index), received.sources.astype(index))
    return forward + sparse.coo_array((data, places), shape=shape).tocsr()


def _sort_rows(ids: Ids, values: Floats) -> tuple[Ids, Floats]:
    """Return ids and values, (n * k,) each, every row in order of id.

    Ids are sorted with their place in the lowest bits: half the time of an argsort and two takes.
    """
    n_rows, k = ids.shape
    bits = (k - 1).bit_length()
    keys = (ids << bits) | np.arange(k)
    keys.sort(axis=1)
    places = (keys & ((1 << bits) - 1)) + np.arange(0, n_rows * k, k)[:, np.newaxis]
    keys >>= bits
    return keys.ravel(), values.ravel()[places.ravel()]


def _there(pairs: Any) -> NDArray[np.float64]:
    return np.asarray(pairs.data.real, np.float64)


def _back(pairs: Any) -> NDArray[np.float64]:
    return np.asarray(pairs.data.imag, np.float64)


def _rows(pairs: Any, values: NDArray[np.float64]) -> SparseRows:
    """Return the entries of the pairs with these values."""
    return SparseRows(
        pairs.indptr.astype(np.int64), pairs.indices.astype(np.int64), values.astype(np.float32)
    )

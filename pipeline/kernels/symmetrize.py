"""Joint probabilities of a block of rows from conditional affinities."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class SparseRows(NamedTuple):
    """A block of sparse rows: row i holds entries offsets[i]..offsets[i+1]."""

    offsets: Ids  # (n + 1,) int64
    columns: Ids  # (nnz,) int64, ascending in each row
    values: Floats  # (nnz,) float32


class Entries(NamedTuple):
    """Entries of a block, in any order: row in the block, global column, value."""

    rows: Ids  # (m,) int64
    columns: Ids  # (m,) int64
    values: Floats  # (m,) float32


def joint_probabilities(
    n_block: int, forward: Entries, reverse: Entries, n_total: int
) -> SparseRows:
    """Return P_ij = (p(j|i) + p(i|j)) / (2 n_total) for the n_block rows i of a block.

    Forward entries are (i, j, p(j|i)), reverse entries (i, j, p(i|j)); rows are 0-based in the
    block, columns global, and no pair comes twice in one list. P_ij and P_ji are bitwise equal
    because the sum of two float64 does not depend on their order. Entries that underflow stay.
    """
    rows = np.concatenate([forward.rows, reverse.rows])
    columns = np.concatenate([forward.columns, reverse.columns])
    values = np.concatenate([forward.values, reverse.values]).astype(np.float64)
    joint = sparse.coo_array((values, (rows, columns)), shape=(n_block, n_total)).tocsr()
    joint.sum_duplicates()
    return SparseRows(
        joint.indptr.astype(np.int64),
        joint.indices.astype(np.int64),
        (joint.data / (2 * n_total)).astype(np.float32),
    )

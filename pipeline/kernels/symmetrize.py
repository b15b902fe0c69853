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


def joint_probabilities(  # noqa: PLR0913, PLR0917 - two lists of triples and two sizes
    n_block: int,
    forward_rows: Ids,
    forward_columns: Ids,
    forward_values: Floats,
    reverse_rows: Ids,
    reverse_columns: Ids,
    reverse_values: Floats,
    n_total: int,
) -> SparseRows:
    """Return P_ij = (p(j|i) + p(i|j)) / (2 n_total) for the n_block rows i of a block.

    Forward entries are (i, j, p(j|i)), reverse entries (i, j, p(i|j)); rows are 0-based in the
    block, columns global, and no pair comes twice in one list. P_ij and P_ji are bitwise equal
    because the sum of two float64 does not depend on their order. Entries that underflow stay.
    """
    rows = np.concatenate([forward_rows, reverse_rows])
    columns = np.concatenate([forward_columns, reverse_columns])
    values = np.concatenate([forward_values, reverse_values]).astype(np.float64)
    joint = sparse.coo_array((values, (rows, columns)), shape=(n_block, n_total)).tocsr()
    joint.sum_duplicates()
    return SparseRows(
        joint.indptr.astype(np.int64),
        joint.indices.astype(np.int64),
        (joint.data / (2 * n_total)).astype(np.float32),
    )

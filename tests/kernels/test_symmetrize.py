import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.kernels.symmetrize import Entries, SparseRows, joint_probabilities

Doubles = NDArray[np.float64]


def _conditional(n_rows: int, k: int, seed: int) -> NDArray[np.float32]:
    """Return dense p(j|i), (n, n), with k entries in every row."""
    rng = np.random.default_rng(seed)
    conditional = np.zeros((n_rows, n_rows), dtype=np.float32)
    for row in range(n_rows):
        others = np.delete(np.arange(n_rows), row)
        conditional[row, rng.choice(others, size=k, replace=False)] = rng.dirichlet(np.ones(k))
    return conditional


def _block(conditional: NDArray[np.float32], start: int, stop: int, seed: int = 0) -> SparseRows:
    rng = np.random.default_rng(seed)
    rows, columns = np.nonzero(conditional)
    shuffled = rng.permutation(rows.size)
    rows, columns = rows[shuffled], columns[shuffled]
    values = conditional[rows, columns]
    mine, theirs = (rows >= start) & (rows < stop), (columns >= start) & (columns < stop)
    return joint_probabilities(
        stop - start,
        Entries(rows[mine] - start, columns[mine], values[mine]),
        Entries(columns[theirs] - start, rows[theirs], values[theirs]),
        len(conditional),
    )


def _dense(graph: SparseRows, n_columns: int) -> Doubles:
    dense = np.zeros((graph.offsets.size - 1, n_columns))
    rows = np.repeat(np.arange(len(dense)), np.diff(graph.offsets))
    dense[rows, graph.columns] = graph.values
    return dense


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 40), st.integers(0, 10**6), st.data())
def test_blocks_make_the_dense_joint_matrix(n_rows: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n_rows - 1))
    cut = data.draw(st.integers(0, n_rows))
    conditional = _conditional(n_rows, k, seed)
    parts = [_block(conditional, 0, cut, seed), _block(conditional, cut, n_rows, seed + 1)]
    joint = np.concatenate([_dense(part, n_rows) for part in parts])
    wide = conditional.astype(np.float64)
    np.testing.assert_allclose(joint, (wide + wide.T) / (2 * n_rows), rtol=1e-6)
    np.testing.assert_array_equal(joint, joint.T)
    assert abs(joint.sum() - 1) < 1e-5


def test_rows_are_sorted_distinct_and_typed() -> None:
    graph = _block(_conditional(50, 7, 3), 10, 30)
    assert [part.dtype for part in graph] == [np.int64, np.int64, np.float32]
    assert graph.offsets[0] == 0
    assert graph.offsets[-1] == graph.columns.size == graph.values.size
    for start, stop in zip(graph.offsets[:-1], graph.offsets[1:], strict=True):
        assert (np.diff(graph.columns[start:stop]) > 0).all()


def test_each_pair_is_bitwise_symmetric() -> None:
    rng = np.random.default_rng(0)
    there, back = rng.random((2, 5000)).astype(np.float32) ** 9
    rows, columns = np.zeros(5000, dtype=np.int64), np.arange(5000)
    first = joint_probabilities(
        1, Entries(rows, columns, there), Entries(rows, columns, back), 10**9 + 7
    )
    second = joint_probabilities(
        1, Entries(rows, columns, back), Entries(rows, columns, there), 10**9 + 7
    )
    np.testing.assert_array_equal(first.values, second.values)
    total = there.astype(np.float64) + back.astype(np.float64)
    np.testing.assert_array_equal(first.values, (total / (2e9 + 14)).astype(np.float32))


def test_empty_rows_and_underflowing_entries_stay() -> None:
    none = np.empty(0, dtype=np.int64)
    graph = joint_probabilities(
        4,
        Entries(
            np.array([2, 2, 2]),
            np.array([10**12, 5, 7]),
            np.array([1e-40, 0.5, 0], dtype=np.float32),
        ),
        Entries(none, none, none.astype(np.float32)),
        10**13,
    )
    np.testing.assert_array_equal(graph.offsets, [0, 0, 0, 3, 3])
    np.testing.assert_array_equal(graph.columns, [5, 7, 10**12])
    assert graph.values[1:].tolist() == [0, 0]


def test_no_entries() -> None:
    none, values = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    graph = joint_probabilities(3, Entries(none, none, values), Entries(none, none, values), 3)
    np.testing.assert_array_equal(graph.offsets, [0, 0, 0, 0])
    assert graph.columns.dtype == np.int64


def test_rows_outside_the_block_are_refused() -> None:
    one, values = np.array([7]), np.ones(1, dtype=np.float32)
    with pytest.raises(ValueError, match="7"):
        joint_probabilities(3, Entries(one, one, values), Entries(one, one, values), 9)

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.kernels.symmetrize import (
    Received,
    SparseRows,
    find_blocks,
    join_memberships,
    join_probabilities,
    send_entries,
)

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Join = Callable[[Ids, Floats, Received, int], SparseRows]

NONE = Received(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.float32))


def _graph(n_rows: int, k: int, seed: int) -> tuple[Ids, Floats]:
    """Return k distinct neighbors of every row, not itself, and values in 0..1, (n, k) each."""
    rng = np.random.default_rng(seed)
    steps = np.stack([rng.permutation(n_rows - 1)[:k] for _ in range(n_rows)]) + 1
    ids = (np.arange(n_rows)[:, np.newaxis] + steps) % n_rows
    return ids, rng.dirichlet(np.ones(k), size=n_rows).astype(np.float32)


def _dense(ids: Ids, values: Floats) -> Doubles:
    dense = np.zeros((len(ids), len(ids)))
    np.put_along_axis(dense, ids, values.astype(np.float64), axis=1)
    return dense


def _expand(graph: SparseRows, n_columns: int) -> Doubles:
    dense = np.zeros((graph.offsets.size - 1, n_columns))
    rows = np.repeat(np.arange(len(dense)), np.diff(graph.offsets))
    dense[rows, graph.columns] = graph.values
    return dense


def _join_blocks(ids: Ids, values: Floats, starts: Ids, join: Join) -> list[SparseRows]:
    """Return every block of the graph: each sends, then each joins what it got."""
    spans = [slice(*span) for span in pairwise(starts)]
    sent = [send_entries(ids[span], values[span], starts) for span in spans]
    blocks = []
    for number, span in enumerate(spans):
        got = [slice(*one.starts[number : number + 2]) for one in sent]
        received = Received(
            np.concatenate([one.targets[part] for one, part in zip(sent, got, strict=True)]),
            np.concatenate(
                [
                    one.sources[part].astype(np.int64) + source.start
                    for one, part, source in zip(sent, got, spans, strict=True)
                ]
            ),
            np.concatenate([one.values[part] for one, part in zip(sent, got, strict=True)]),
        )
        blocks.append(join(ids[span], values[span], received, len(ids)))
    return blocks


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 40), st.integers(0, 10**6), st.booleans(), st.data())
def test_blocks_make_the_dense_symmetric_matrix(
    n_rows: int, seed: int, fuzzy: bool, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, n_rows - 1))
    cuts = data.draw(st.sets(st.integers(1, n_rows - 1), max_size=5))
    ids, values = _graph(n_rows, k, seed)
    there = _dense(ids, values)
    starts = np.array([0, *sorted(cuts), n_rows])
    join: Join = join_memberships if fuzzy else join_probabilities
    union = there + there.T - there * there.T
    wanted = union if fuzzy else (there + there.T) / (2 * n_rows)
    blocks = _join_blocks(ids, values, starts, join)
    found = np.concatenate([_expand(block, n_rows) for block in blocks])
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(found, found.T)
    assert sum(block.values.size for block in blocks) == np.count_nonzero(wanted)
    assert fuzzy or abs(found.sum() - 1) < 1e-6


def test_entries_go_to_the_block_of_their_neighbor() -> None:
    ids, values = _graph(300, 9, 1)
    starts = np.array([0, 40, 41, 170, 300])
    sent = send_entries(ids[40:41], values[40:41], starts)
    assert sent.starts[0] == 0
    assert sent.starts[-1] == 9
    rebuilt: dict[int, float] = {}
    for block in range(4):
        part = slice(*sent.starts[block : block + 2])
        assert (sent.targets[part] < starts[block + 1] - starts[block]).all()
        columns = sent.targets[part].astype(np.int64) + starts[block]
        rebuilt |= dict(zip(columns.tolist(), sent.values[part].tolist(), strict=True))
    assert (sent.sources == 0).all()
    assert rebuilt == dict(zip(ids[40].tolist(), values[40].tolist(), strict=True))


@pytest.mark.parametrize(("rows", "width"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
def test_rows_travel_in_the_narrowest_type(rows: int, width: int) -> None:
    ids = np.array([[rows - 1, rows, 2 * rows - 1]])
    sent = send_entries(ids, np.ones((1, 3), np.float32), np.array([0, rows, 2 * rows]))
    assert sent.targets.itemsize == sent.sources.itemsize == width
    assert sent.targets.tolist() == [rows - 1, 0, rows - 1]
    assert sent.starts.tolist() == [0, 1, 3]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=400), st.integers(0, 10**6))
def test_the_table_finds_what_a_binary_search_finds(sizes: list[int], seed: int) -> None:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    ids = np.random.default_rng(seed).integers(starts[-1], size=200)
    ids[:2] = 0, starts[-1] - 1
    found = find_blocks(ids, starts)
    np.testing.assert_array_equal(found, np.searchsorted(starts, ids, side="right") - 1)
    assert found.itemsize == (1 if len(sizes) <= 256 else 2)


def test_rows_are_sorted_distinct_and_typed() -> None:
    ids, values = _graph(50, 7, 3)
    for graph in _join_blocks(ids, values, np.array([0, 10, 30, 50]), join_probabilities):
        assert [part.dtype for part in graph] == [np.int64, np.int64, np.float32]
        assert graph.offsets[0] == 0
        assert graph.offsets[-1] == graph.columns.size == graph.values.size
        for start, stop in zip(graph.offsets[:-1], graph.offsets[1:], strict=True):
            assert (np.diff(graph.columns[start:stop]) > 0).all()


@pytest.mark.parametrize("join", [join_probabilities, join_memberships])
def test_each_pair_is_bitwise_symmetric(join: Join) -> None:
    rng = np.random.default_rng(0)
    there, back = rng.random((2, 5000)).astype(np.float32) ** 9
    ids, targets = np.arange(5000)[np.newaxis], np.zeros(5000, np.int32)
    first = join(ids, there[np.newaxis], Received(targets, ids[0], back), 10**9 + 7)
    second = join(ids, back[np.newaxis], Received(targets, ids[0], there), 10**9 + 7)
    np.testing.assert_array_equal(first.values, second.values)
    a, b = there.astype(np.float64), back.astype(np.float64)
    wanted = (a + b) / (2e9 + 14) if join is join_probabilities else a + b - a * b
    np.testing.assert_array_equal(first.values, wanted.astype(np.float32))


def test_ids_beyond_32_bits_and_empty_rows() -> None:
    """Of three rows the second has nothing; entries that are 0 in both directions are left out."""
    ids = np.array([[10**12, 5, 7]])
    values = np.array([[0.25, 0.5, 0], [0, 0, 0], [0, 0, 0]], dtype=np.float32)
    received = Received(
        np.array([2, 0, 0]), np.array([3, 7, 10**12]), np.array([1, 0, 0.25], np.float32)
    )
    block = join_memberships(np.repeat(ids, 3, axis=0), values, received, 10**13)
    np.testing.assert_array_equal(block.offsets, [0, 2, 2, 3])
    np.testing.assert_array_equal(block.columns, [5, 10**12, 3])
    np.testing.assert_array_equal(block.values, [0.5, 0.4375, 1])


def test_tiny_probabilities_do_not_vanish_on_the_way() -> None:
    """A sum is divided in float64; only what is below float32 in the end is 0, and it stays."""
    ids, values = np.array([[0, 1]]), np.array([[1e-40, 1]], dtype=np.float32)
    graph = join_probabilities(ids, values, NONE, 10**6)
    np.testing.assert_allclose(graph.values, [0, 5e-7], rtol=1e-6)
    np.testing.assert_array_equal(graph.columns, [0, 1])


def test_rows_that_nobody_points_at() -> None:
    ids, values = _graph(3, 2, 0)
    graph = join_probabilities(ids, values, NONE, 3)
    np.testing.assert_allclose(_expand(graph, 3), _dense(ids, values) / 6, rtol=1e-6)


def test_rows_outside_the_block_are_refused() -> None:
    received = Received(np.array([7]), np.array([1]), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="7"):
        join_probabilities(*_graph(3, 2, 0), received, 9)

"""The points of every step: edges in order, rows with their part of P."""

import numpy as np
import pytest
from scipy import sparse

from pipeline import batches
from pipeline.batches import EdgeBatches, Edges, PointBatches
from pipeline.errors import ConfigError
from pipeline.kernels.symmetrize import SparseRows

N_EDGES = 3000


def all_edges() -> Edges:
    rng = np.random.default_rng(0)
    heads, tails = rng.integers(500, size=(2, N_EDGES))
    return Edges(heads, tails, rng.integers(500, size=(N_EDGES, 3)))


@pytest.mark.parametrize("negatives", [False, True])
def test_edges_come_in_order_whichever_step_is_asked_for(
    negatives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "EDGES_IN_MEMORY", 100)
    edges = all_edges()
    asked: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> Edges:
        asked.append((start, stop))
        found = [part[start:stop] for part in edges if part is not None]
        return Edges(*(found if negatives else found[:2]))

    draw = EdgeBatches(read, N_EDGES, 32)
    for step in (0, 1, 2, 3, 4, 40, 41, 2, 92):  # also back, as a resumed run may
        inside = slice(step * 32, (step + 1) * 32)
        found = draw(step)
        assert found.n_edges == 32
        assert (found.rows[:32] == edges.heads[inside]).all()
        assert (found.rows[32:64] == edges.tails[inside]).all()
        assert edges.negatives is not None
        expected = edges.negatives[inside].ravel() if negatives else np.empty(0)
        assert (found.rows[64:] == expected).all()
    assert max(stop - start for start, stop in asked) <= 100
    assert asked[-1][1] == N_EDGES


def graph(n_rows: int = 90) -> tuple[SparseRows, np.ndarray[tuple[int, int], np.dtype[np.float64]]]:
    rng = np.random.default_rng(1)
    dense = rng.random((n_rows, n_rows)) * (rng.random((n_rows, n_rows)) < 0.2)
    dense = dense + dense.T
    rows = sparse.csr_array(dense.astype(np.float32))
    return SparseRows(rows.indptr.astype(np.int64), rows.indices.astype(np.int64), rows.data), dense


def test_points_are_every_row_once_an_epoch_with_their_part_of_p() -> None:
    sparse_rows, dense = graph()
    draw = PointBatches(sparse_rows, 30, seed=4)
    for epoch in (0, 1):
        found = [draw(3 * epoch + number) for number in range(3)]
        assert sorted(np.concatenate([part.rows for part in found])) == list(range(90))
        for part in found:
            assert part.affinities is not None
            expected = dense[np.ix_(part.rows, part.rows)]
            np.testing.assert_allclose(part.affinities, expected, rtol=1e-6)
    assert not np.array_equal(draw(0).rows, draw(3).rows)
    assert np.array_equal(draw(4).rows, PointBatches(sparse_rows, 30, seed=4)(4).rows)


def test_more_points_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.batch is 91, the sample has 90 rows; lower it"):
        PointBatches(graph()[0], 91, seed=0)

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq

from pipeline.kernels.memberships import Memberships, find_memberships

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

GOLDEN = Path(__file__).parent.parent / "golden/affinities.npz"


def _find_slowly(squared: Floats) -> Doubles:
    """UMAP's definition, one row at a time, with a root finder."""
    distances = np.sqrt(squared).astype(np.float64)
    k = distances.size
    if not distances.any():
        return np.ones(k)
    excess = np.maximum(distances - distances[distances > 0][0], 0)
    scale = max(float(excess[-1]), sys.float_info.min)

    def overshoot(log_width: float) -> float:
        return float(np.exp(-excess / scale / np.exp(log_width)).sum() - np.log2(k + 1))

    width = 0.0
    if (excess == 0).sum() < np.log2(k + 1):
        root = brentq(overshoot, -120, 20)
        width = scale * math.exp(float(root))
    width = max(width, 1e-3 * distances.sum() / (k + 1))
    return np.asarray(np.exp(-excess / width))


def _rows(kind: str, n_rows: int, k: int) -> Floats:
    rng = np.random.default_rng(5)
    drawn: dict[str, Callable[[], NDArray[Any]]] = {
        "chi": lambda: rng.chisquare(8, size=(n_rows, k)),
        "uniform": lambda: rng.random((n_rows, k)),
        "narrow": lambda: 100 + rng.random((n_rows, k)),
        "lognormal": lambda: rng.lognormal(sigma=4, size=(n_rows, k)),
        "duplicates": lambda: rng.random((n_rows, k)) * (rng.random((n_rows, k)) < 0.7),
        "ties": lambda: rng.integers(1, 6, size=(n_rows, k)),
    }
    return np.sort(drawn[kind]().astype(np.float32), axis=1)


def _check_invariants(found: Memberships, distances: Floats) -> None:
    k = distances.shape[1]
    assert found.values.dtype == np.float32
    assert (found.values >= 0).all()
    assert (found.values <= 1).all()
    assert (np.diff(found.values, axis=1) <= 0).all()
    positive = np.where(distances > 0, distances, np.inf)
    nearest = (distances == 0) | (distances == positive.min(axis=1, keepdims=True))
    assert (found.values[nearest] == 1).all()
    np.testing.assert_allclose(found.values.sum(axis=1, dtype=float), found.sums, rtol=3e-6)
    np.testing.assert_allclose(found.sums[found.solved], np.log2(k + 1), rtol=1e-4)
    assert (found.sums[~found.solved] > np.log2(k + 1)).all()


def test_every_entry_is_that_of_umap_learn() -> None:
    with np.load(GOLDEN) as golden:
        distances, wanted = golden["distances"], golden["umap"]
        assert "umap-learn 0.5.12" in golden["versions"].tolist()
    found = find_memberships(distances)
    np.testing.assert_allclose(found.values, wanted, rtol=0, atol=1e-5)
    assert found.solved.sum() > 100
    assert (~found.solved).sum() > 10


@pytest.mark.parametrize("kind", ["chi", "uniform", "narrow", "lognormal", "duplicates", "ties"])
@pytest.mark.parametrize("k", [90, 45, 15, 5, 2])
def test_memberships_equal_a_slow_solver(kind: str, k: int) -> None:
    distances = _rows(kind, 40, k)
    found = find_memberships(distances)
    _check_invariants(found, distances)
    slow = np.stack([_find_slowly(row) for row in distances])
    np.testing.assert_allclose(found.values, slow, atol=5e-6)


def test_many_blocks_equal_single_rows() -> None:
    distances = _rows("chi", 4000, 90)
    found = find_memberships(distances)
    assert found.solved.all()
    for row in (0, 1, 1455, 1456, 3999):
        alone = find_memberships(distances[row : row + 1])
        np.testing.assert_allclose(alone.values[0], found.values[row], rtol=1e-5)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_row_has_the_sum_or_its_limit(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 40))
    magnitude = st.floats(-30, 30).map(lambda power: 10.0**power)
    values = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1), magnitude)
    rows = data.draw(st.lists(st.lists(values, min_size=k, max_size=k), min_size=1, max_size=4))
    distances = np.sort(np.array(rows, dtype=np.float32), axis=1)
    found = find_memberships(distances)
    _check_invariants(found, distances)
    slow = np.stack([_find_slowly(row) for row in distances])
    np.testing.assert_allclose(found.values, slow, atol=5e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15, 1e30])
def test_scale_does_not_matter(scale: float) -> None:
    distances = _rows("uniform", 20, 30)
    scaled = (distances.astype(np.float64) * scale).astype(np.float32)
    wanted = find_memberships(distances).values
    np.testing.assert_allclose(find_memberships(scaled).values, wanted, atol=1e-5)


def test_rows_of_duplicates_only_are_ones() -> None:
    found = find_memberships(np.zeros((2, 8), dtype=np.float32))
    assert (found.values == 1).all()
    assert not found.solved.any()


def test_equal_distances_are_ones() -> None:
    found = find_memberships(np.full((3, 8), [[1e-20], [2.5], [1e20]], dtype=np.float32))
    assert (found.values == 1).all()
    assert not found.solved.any()


def test_duplicates_count_with_the_nearest_other_row() -> None:
    """Two zeros and the first distance above 0 are 1; the rest share log2(8 + 1) - 3."""
    found = find_memberships(np.array([[0, 0, 4, 9, 16, 25, 36, 49]], dtype=np.float32))
    assert (found.values[0, :3] == 1).all()
    assert found.values[0, 3:].sum() == pytest.approx(np.log2(9) - 3, rel=1e-5)
    ratios = found.values[0, 4:] / found.values[0, 3:-1]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-5)  # d - rho is 1, 2, 3, ...
    assert found.solved.all()


def test_too_many_duplicates_leave_the_least_width() -> None:
    """Four ones are more than log2(7 + 1): the width is a thousandth of the mean, itself one."""
    row = np.array([[0, 0, 0, 1, 1.0001**2, 1.0002**2, 4]], dtype=np.float32)
    found = find_memberships(row)
    plain = np.sqrt(row[0])
    width = 1e-3 * plain.sum() / 8
    np.testing.assert_allclose(
        found.values[0], np.exp(-np.maximum(plain - 1, 0) / width), atol=1e-5
    )
    assert 0.6 < found.values[0, 5] < 0.8
    assert not found.solved[0]


def test_a_single_neighbor_is_wholly_a_member() -> None:
    found = find_memberships(np.array([[0], [3]], dtype=np.float32))
    assert found.values.tolist() == [[1], [1]]
    assert found.solved.all()


def test_input_is_unchanged_and_may_be_empty() -> None:
    distances = _rows("chi", 10, 12)
    before = distances.copy()
    find_memberships(distances)
    np.testing.assert_array_equal(distances, before)
    assert find_memberships(distances[:0]).values.shape == (0, 12)


@pytest.mark.parametrize("bad", [np.inf, np.nan, -1.0])
def test_distances_must_be_finite_and_sorted(bad: float) -> None:
    distances = _rows("chi", 3000, 90)
    distances[2345, -1] = bad
    with pytest.raises(ValueError, match="distances of row 2345 are not finite"):
        find_memberships(distances)

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq

from pipeline.kernels.affinity import Calibration, calibrate

Floats = NDArray[np.float32]

GOLDEN = Path(__file__).parent.parent / "golden/affinities.npz"


def _entropy(affinities: NDArray[np.float64]) -> NDArray[np.float64]:
    positive = np.where(affinities > 0, affinities, 1.0)
    return np.asarray(-(affinities * np.log(positive)).sum(axis=-1))


def _check_invariants(found: Calibration, perplexity: float) -> None:
    affinities = found.affinities.astype(np.float64)
    np.testing.assert_allclose(affinities.sum(axis=1), 1, atol=2e-6)
    assert found.affinities.dtype == np.float32
    achieved = np.exp(_entropy(affinities / affinities.sum(axis=1, keepdims=True)))
    np.testing.assert_allclose(achieved, found.perplexity, rtol=3e-6)
    np.testing.assert_allclose(achieved[found.solved], perplexity, rtol=3e-6)
    assert (np.diff(affinities, axis=1) <= 0).all()


def _solve_slowly(distances: Floats, perplexity: float) -> NDArray[np.float64]:
    excess = distances.astype(np.float64) - distances[0]
    scale = excess[-1]

    def affinities(log_beta: float) -> NDArray[np.float64]:
        weights = np.exp(-np.exp(log_beta) * excess / scale)
        return np.asarray(weights / weights.sum())

    root = brentq(lambda x: float(_entropy(affinities(x))) - np.log(perplexity), -20, 60)
    return affinities(float(root))


def _rows(kind: str, n_rows: int, k: int) -> Floats:
    rng = np.random.default_rng(11)
    drawn = {
        "chi": lambda: rng.chisquare(8, size=(n_rows, k)),
        "uniform": lambda: rng.random((n_rows, k)),
        "narrow": lambda: 100 + rng.random((n_rows, k)),
        "lognormal": lambda: rng.lognormal(sigma=4, size=(n_rows, k)),
    }[kind]()
    return np.sort(drawn.astype(np.float32), axis=1)


def test_every_entry_is_that_of_opentsne() -> None:
    with np.load(GOLDEN) as golden:
        distances, wanted, perplexity = (
            golden[name] for name in ("distances", "opentsne", "perplexity")
        )
        assert "openTSNE 1.0.4" in golden["versions"].tolist()
    found = calibrate(distances, float(perplexity))
    np.testing.assert_allclose(found.affinities, wanted, rtol=0, atol=1e-5)
    assert found.solved.sum() > 100
    assert (~found.solved).sum() >= 5


@pytest.mark.parametrize("kind", ["chi", "uniform", "narrow", "lognormal"])
@pytest.mark.parametrize(
    ("k", "perplexity"), [(90, 30.0), (15, 5.0), (45, 40.5), (10, 1.2), (3, 2)]
)
def test_affinities_equal_a_slow_solver(kind: str, k: int, perplexity: float) -> None:
    distances = _rows(kind, 40, k)
    found = calibrate(distances, perplexity)
    assert found.solved.all()
    _check_invariants(found, perplexity)
    slow = np.stack([_solve_slowly(row, perplexity) for row in distances])
    # near a tie for the least distance the entropy hardly moves, and beta is known less well
    np.testing.assert_allclose(found.affinities, slow, atol=2e-5)


def test_many_blocks_equal_single_rows() -> None:
    distances = _rows("chi", 4000, 90)
    found = calibrate(distances, 30.0)
    _check_invariants(found, 30.0)
    assert found.solved.all()
    for row in (0, 1, 1455, 1456, 3999):
        alone = calibrate(distances[row : row + 1], 30.0)
        np.testing.assert_allclose(alone.affinities[0], found.affinities[row], rtol=1e-5)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_row_has_the_perplexity_or_its_limit(data: st.DataObject) -> None:
    k = data.draw(st.integers(2, 40))
    perplexity = data.draw(st.floats(1.01, k - 0.01))
    magnitude = st.floats(-20, 20).map(lambda power: 10.0**power)
    values = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1), magnitude)
    rows = data.draw(st.lists(st.lists(values, min_size=k, max_size=k), min_size=1, max_size=4))
    distances = np.sort(np.array(rows, dtype=np.float32), axis=1)
    found = calibrate(distances, perplexity)
    _check_invariants(found, perplexity)
    n_least = (distances == distances[:, :1]).sum(axis=1)
    solvable = n_least < perplexity
    assert found.solved[solvable].all()
    limits = np.exp(_entropy(found.affinities[~solvable].astype(np.float64)))
    np.testing.assert_allclose(limits, n_least[~solvable], rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1e-10, 1e10, 1e20, 1e36])
def test_scale_does_not_matter(scale: float) -> None:
    distances = _rows("uniform", 20, 30)
    found = calibrate((distances.astype(np.float64) * scale).astype(np.float32), 10.0)
    assert found.solved.all()
    tolerance = 1e-3 if scale < 1e-38 else 1e-5  # subnormal distances have few digits
    np.testing.assert_allclose(
        found.affinities, calibrate(distances, 10.0).affinities, atol=tolerance
    )


def test_equal_distances_are_uniform_and_unsolved() -> None:
    found = calibrate(np.full((3, 8), [[0], [2.5], [1e20]], dtype=np.float32), 4.0)
    np.testing.assert_array_equal(found.affinities, np.full((3, 8), 0.125, dtype=np.float32))
    np.testing.assert_allclose(found.perplexity, 8)
    assert not found.solved.any()


def test_too_many_nearest_ties_share_everything() -> None:
    distances = np.array([[1, 1, 1, 1, 1, 2, 3, 4]], dtype=np.float32)
    found = calibrate(distances, 3.0)
    np.testing.assert_allclose(found.affinities, [[0.2] * 5 + [0] * 3])
    np.testing.assert_allclose(found.perplexity, 5)
    assert not found.solved[0]


def test_exactly_perplexity_ties_are_solved_by_the_limit() -> None:
    found = calibrate(np.array([[0, 0, 0, 5, 6]], dtype=np.float32), 3.0)
    np.testing.assert_allclose(found.affinities, [[1 / 3] * 3 + [0] * 2])
    assert found.solved[0]


def test_fewer_ties_than_perplexity_are_solved() -> None:
    distances = np.array(
        [[0] * 9 + [1e20] * 3, [0] * 9 + [1e-20, 1, 1e20], [0] * 9 + [1e-30, 1e-30, 1e30]],
        dtype=np.float32,
    )
    found = calibrate(distances, 10.0)
    assert found.solved.all()
    _check_invariants(found, 10.0)


def test_zeros_and_one_far_neighbor() -> None:
    distances = np.array([[0] * 11 + [1e20], [0] * 11 + [1e-20]], dtype=np.float32)
    found = calibrate(distances, 11.5)
    assert found.solved.all()
    _check_invariants(found, 11.5)


@pytest.mark.parametrize(
    ("groups", "perplexity"),
    [([(4, 0), (21, 7e-7), (23, 2e4)], 5.5756), ([(1, 0), (10, 3e-4), (14, 0.017)], 2.3506)],
)
def test_groups_at_distant_scales(groups: list[tuple[int, float]], perplexity: float) -> None:
    # the entropy is a staircase: steps without a bracket jump to and fro over a stair
    distances = np.repeat([far for _, far in groups], [size for size, _ in groups])
    spread = 1 + 1e-3 * np.random.default_rng(0).random((200, distances.size))
    found = calibrate(np.sort((distances * spread).astype(np.float32), axis=1), perplexity)
    assert found.solved.all()
    _check_invariants(found, perplexity)


def test_input_is_unchanged_and_may_be_empty() -> None:
    distances = _rows("chi", 10, 12)
    before = distances.copy()
    calibrate(distances, 4.0)
    np.testing.assert_array_equal(distances, before)
    assert calibrate(distances[:0], 4.0).affinities.shape == (0, 12)


@pytest.mark.parametrize("perplexity", [12.0, 30.0, 1.0, 0.0, float("nan")])
def test_impossible_perplexity_is_refused(perplexity: float) -> None:
    with pytest.raises(ValueError, match=f"perplexity {perplexity} with 12 neighbors per row"):
        calibrate(_rows("chi", 10, 12), perplexity)


@pytest.mark.parametrize("bad", [np.inf, np.nan, -1.0])
def test_distances_must_be_finite_and_sorted(bad: float) -> None:
    distances = _rows("chi", 3000, 90)
    distances[2345, -1] = bad
    with pytest.raises(ValueError, match="distances of row 2345 are not finite"):
        calibrate(distances, 4.0)

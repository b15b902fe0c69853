"""drift: near nothing where nothing has changed, high where rows are new, the same every time."""

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.kernels.drift import displacement, domain_auc, occupancy_shift


def tiles(n_rows: int, seed: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.random.default_rng(seed).multinomial(n_rows, shares.ravel()).reshape(shares.shape)


@pytest.fixture(scope="module")
def shares() -> NDArray[np.float64]:
    """A map with rows in a third of its 32 x 32 tiles, unevenly."""
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=(32, 32)) * (rng.random((32, 32)) < 0.33)
    return np.asarray(weights / weights.sum())


@pytest.mark.parametrize("n_rows", [200, 1000, 20_000])
def test_the_same_occupancy_is_no_shift_however_few_rows(
    n_rows: int, shares: NDArray[np.float64]
) -> None:
    old = tiles(50_000, 1, shares)
    found = [occupancy_shift(old, tiles(n_rows, seed, shares)) for seed in range(2, 12)]
    assert np.mean(found) < 0.03
    assert max(found) < 0.15


def test_rows_in_other_tiles_are_a_shift(shares: NDArray[np.float64]) -> None:
    old = tiles(50_000, 1, shares)
    assert occupancy_shift(old, tiles(1000, 2, shares[::-1, ::-1].copy())) > 0.6
    apart = np.where(shares > 0, 0.0, 1.0)
    assert occupancy_shift(old, tiles(1000, 2, apart / apart.sum())) == pytest.approx(1)
    half = tiles(500, 2, shares) + tiles(500, 3, apart / apart.sum())
    assert 0.3 < occupancy_shift(old, half) < 0.8


def test_occupancy_is_the_jensen_shannon_distance_where_samples_are_large() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.25, 0.5])
    middle = (p + q) / 2
    half = [float(np.sum(x[x > 0] * np.log2(x[x > 0] / middle[x > 0]))) / 2 for x in (p, q)]
    many = 10_000_000
    found = occupancy_shift((p * many).astype(int), (q * many).astype(int))
    assert found == pytest.approx(np.sqrt(sum(half)), abs=1e-4)


def test_occupancy_needs_rows() -> None:
    with pytest.raises(ValueError, match="0 old and 4 new rows; both must be there"):
        occupancy_shift(np.zeros(4, int), np.ones(4, int))


def test_the_classifier_tells_only_rows_that_differ() -> None:
    rng = np.random.default_rng(0)
    old, same = rng.normal(size=(2, 600, 10))
    assert domain_auc(old, same) < 0.58
    assert domain_auc(old, same + 0.5) > 0.8
    turned = same * [1, 1, 1, 1, 1, 1, 1, 1, 1, 3]  # the same middle, another spread
    assert domain_auc(old, turned) > 0.65
    assert domain_auc(old, same + 0.5) == domain_auc(old, same + 0.5)


def test_the_classifier_takes_few_rows_and_refuses_too_few() -> None:
    rng = np.random.default_rng(0)
    old = rng.normal(size=(300, 5))
    assert domain_auc(old, old[:20] + 9) > 0.9
    with pytest.raises(ValueError, match="300 old and 3 new rows; at least 6 of each"):
        domain_auc(old, old[:3])


def test_displacement_is_in_shares_of_the_diameter() -> None:
    old = np.random.default_rng(0).random((500, 2)).astype(np.float32)
    way = np.zeros((500, 2), np.float32)
    way[:50, 0] = 0.3  # a tenth moves far
    found = displacement(old, old + way, 2.0, 10)
    assert found.median == 0
    assert found.p95 == pytest.approx(0.15, rel=1e-5)
    assert 0.6 < found.overlap < 1
    assert displacement(old, old, 2.0, 10) == (0, 0, 1)
    assert displacement(old, old + np.float32(5), 2.0, 10).overlap > 0.95  # they moved together

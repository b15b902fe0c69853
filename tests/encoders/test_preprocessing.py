import numpy as np
import pytest
import torch

from encoders.preprocessing import Array, Preprocessing, PreprocessingConfig, fit_preprocessing

PLAIN = PreprocessingConfig()


def test_preprocessing_equals_numpy_over_several_blocks() -> None:
    rows = np.random.default_rng(0).normal(5, 3, (20_000, 3)).astype(np.float32)
    centre, scale = rows.mean(0, dtype=np.float64), rows.astype(np.float64)
    preprocessing = fit_preprocessing(rows, PLAIN)
    np.testing.assert_allclose(preprocessing.centre, centre, rtol=1e-6)
    assert preprocessing.centre.dtype == np.float32
    assert preprocessing.scale == pytest.approx(np.sqrt(np.mean((scale - centre) ** 2)), rel=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32])
def test_prepared_rows_have_mean_zero_and_unit_size(dtype: type) -> None:
    rows: Array = np.random.default_rng(0).integers(0, 100, (500, 6)).astype(dtype)
    prepared = fit_preprocessing(rows, PLAIN).apply(torch.from_numpy(rows)).double()
    assert prepared.mean(0).abs().max() < 1e-6
    assert prepared.square().mean().sqrt().item() == pytest.approx(1.0, abs=1e-6)


def test_large_offsets_do_not_spoil_the_scale() -> None:
    rows = (np.random.default_rng(0).integers(0, 2, (1000, 4)) + 1e6).astype(np.float32)
    assert fit_preprocessing(rows, PLAIN).scale == pytest.approx(0.5, rel=0.05)


def test_constant_rows_keep_their_scale() -> None:
    preprocessing = fit_preprocessing(np.full((10, 3), 7, np.uint8), PLAIN)
    assert (preprocessing.centre.tolist(), preprocessing.scale) == ([7.0, 7.0, 7.0], 1.0)


def test_normalized_rows_forget_their_length_and_zeros_stay() -> None:
    rows = torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]])
    preprocessing = Preprocessing(np.zeros(2, np.float32), 1.0, normalize=True)
    expected = torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.0, 0.0]])
    torch.testing.assert_close(preprocessing.apply(rows), expected)


def test_statistics_of_normalized_rows_are_taken_after_normalizing() -> None:
    rows = np.array([[3, 4], [30, 40]], np.uint8)
    preprocessing = fit_preprocessing(rows, PreprocessingConfig(normalize=True))
    np.testing.assert_allclose(preprocessing.centre, [0.6, 0.8], rtol=1e-6)


def test_no_rows_and_bad_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="no rows; at least one is needed"):
        fit_preprocessing(np.empty((0, 3), np.float32), PLAIN)
    with pytest.raises(ValueError, match="rows hold NaN or infinity"):
        fit_preprocessing(np.array([[1.0, np.inf]], np.float32), PLAIN)


def correlated(n_rows: int = 2000) -> Array:
    """Rows whose columns spread over three directions, one more than the next, off the origin."""
    rng = np.random.default_rng(3)
    directions, _ = np.linalg.qr(rng.normal(size=(10, 3)))
    rows: Array = rng.normal(size=(n_rows, 3)) * [9, 3, 1] @ directions.T + 50
    return rows.astype(np.float32)


def test_components_are_the_principal_ones_and_keep_the_size() -> None:
    rows = correlated()
    preprocessing = fit_preprocessing(rows, PreprocessingConfig(pca=2))
    prepared = preprocessing.apply(torch.from_numpy(rows)).double().numpy()
    assert prepared.shape == (2000, 2)
    assert np.abs(prepared.mean(0)).max() < 1e-3
    assert np.sqrt(np.mean(prepared**2)) == pytest.approx(1.0, rel=1e-3)
    left, right = prepared.T
    assert abs(np.corrcoef(left, right)[0, 1]) < 1e-3
    assert left.std() / right.std() == pytest.approx(3, rel=0.1)
    assert preprocessing.n_inputs == 10
    assert preprocessing.n_outputs == 2


def test_enough_components_keep_distances() -> None:
    rows = correlated(300)
    config = PreprocessingConfig(pca=4, scale=False)
    prepared = fit_preprocessing(rows, config).apply(torch.from_numpy(rows))
    wanted = torch.pdist(torch.from_numpy(rows).double())
    torch.testing.assert_close(torch.pdist(prepared.double()), wanted, rtol=1e-3, atol=1e-3)


def test_components_do_not_depend_on_the_order_of_rows_but_for_rounding() -> None:
    rows = correlated(500)
    one, other = (
        fit_preprocessing(part, PreprocessingConfig(pca=3)).components
        for part in (rows, np.ascontiguousarray(rows[::-1]))
    )
    assert one is not None
    assert other is not None
    np.testing.assert_allclose(one, other, atol=1e-4)


def test_steps_that_are_left_out_change_nothing() -> None:
    rows = correlated(50)
    config = PreprocessingConfig(centre=False, scale=False)
    prepared = fit_preprocessing(rows, config).apply(torch.from_numpy(rows))
    assert np.array_equal(prepared.numpy(), rows)


@pytest.mark.parametrize("pca", [10, 11])
def test_rows_of_no_more_columns_than_components_are_not_projected(pca: int) -> None:
    assert fit_preprocessing(correlated(50), PreprocessingConfig(pca=pca)).components is None


def test_no_components_are_refused() -> None:
    with pytest.raises(ValueError, match="pca is 0; at least 1 component is needed"):
        fit_preprocessing(correlated(50), PreprocessingConfig(pca=0))


def test_components_of_many_columns_equal_those_of_the_covariance() -> None:
    rng = np.random.default_rng(1)
    spread = np.diag(1 / np.arange(1, 81))
    rows = (rng.normal(size=(3000, 80)) @ spread @ rng.normal(size=(80, 80))).astype(np.float32)
    found = fit_preprocessing(rows, PreprocessingConfig(pca=5, scale=False)).components
    assert found is not None
    _, vectors = np.linalg.eigh(np.cov(rows.T))
    overlap = np.abs(np.einsum("ij,ij->j", vectors[:, ::-1][:, :5], found))
    assert overlap.min() > 0.999


def test_very_wide_rows_are_projected_in_little_time_and_memory() -> None:
    rows = np.random.default_rng(0).integers(0, 256, (300, 16_384), dtype=np.uint8)
    preprocessing = fit_preprocessing(rows, PreprocessingConfig(pca=100))
    assert preprocessing.components is not None
    assert preprocessing.components.shape == (16_384, 100)

"""The reference: novelty is even for rows like those trained on, high for others, and exact."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from encoders import reference as module
from encoders.artifact import EMBED_BATCH, ArtifactError, Encoder
from encoders.networks import NetworkConfig, build_network
from encoders.preprocessing import Array, PreprocessingConfig, fit_preprocessing
from encoders.reference import NEAREST, TILES, Reference, count_tiles, diameter, fit_reference

EXTENT = (-1.0, 1.0, -2.0, 2.0)
WIDTH = 20


def rows(n_rows: int, seed: int, width: int = WIDTH) -> Array:
    """Rows near a plane of six directions, in four clusters."""
    rng = np.random.default_rng(0)
    directions, centres = rng.normal(size=(6, width)), 4 * rng.normal(size=(4, 6))
    rng = np.random.default_rng([seed, n_rows])
    flat = centres[rng.integers(4, size=n_rows)] + rng.normal(size=(n_rows, 6))
    return (flat @ directions + 0.1 * rng.normal(size=(n_rows, width))).astype(np.float32)


def encoder(sample: Array, pca: int | None = None, **options: bool) -> Encoder:
    config = NetworkConfig(hidden=8, layers=0)
    preprocessing = fit_preprocessing(sample, PreprocessingConfig(pca=pca, **options))
    return Encoder(config, preprocessing, build_network(config, preprocessing.n_outputs).eval())


def make(sample: Array, pca: int | None = None, **options: bool) -> Reference:
    made = encoder(sample, pca, **options)
    return fit_reference(made, sample, made.embed(sample), EXTENT)


@pytest.mark.parametrize("n_rows", [6000, 400])  # rows apart from the reference; leave one out
@pytest.mark.parametrize("pca", [None, 8])
def test_novelty_is_even_for_rows_like_those_trained_on(n_rows: int, pca: int | None) -> None:
    found = make(rows(n_rows, 1), pca).score(rows(5000, 2))
    assert found.dtype == np.float32
    assert 0 <= found.min() <= found.max() < 1
    assert found.mean() == pytest.approx(0.5, abs=0.05)
    assert float((found > 0.9).mean()) == pytest.approx(0.1, abs=0.04)
    assert float((found > 0.99).mean()) < 0.025


@pytest.mark.parametrize("pca", [None, 8])
def test_other_rows_are_novel(pca: int | None) -> None:
    made = make(rows(4000, 1), pca)
    far = rows(500, 2) + 30
    assert (made.score(far) > 0.99).all()


def test_rows_off_the_plane_are_novel_although_their_projections_are_not() -> None:
    sample = rows(4000, 1)
    made = make(sample, pca=6)
    components = made.preprocessing.components
    assert components is not None
    off = np.random.default_rng(3).normal(size=(1, WIDTH)).astype(np.float32)
    off -= (off @ components) @ np.linalg.pinv(components)
    lifted = rows(500, 2) + 10 * off
    near, lifted_view = made.view(rows(500, 2)), made.view(lifted)
    assert np.abs(near - lifted_view)[:, :-1].max() < 1e-3
    assert (made.score(lifted) > 0.99).mean() > 0.99


def test_distances_are_those_of_an_exact_search() -> None:
    sample, new = rows(900, 1), rows(50, 2)
    made = make(sample, pca=8)
    apart = np.linalg.norm(made.view(new)[:, None] - made.rows[None], axis=2)
    exact = np.sort(apart, axis=1)[:, :NEAREST].mean(axis=1)
    assert np.allclose(made.measure(new), exact, rtol=1e-3, atol=1e-3)


def test_the_view_is_of_the_rows_whole_length() -> None:
    sample = rows(500, 1)
    made = make(sample, pca=8)
    components = made.preprocessing.components
    assert components is not None
    ready = made.preprocessing.standardize(torch.from_numpy(sample)).numpy()
    unit = np.linalg.norm(components[:, 0])
    lengths = np.linalg.norm(made.view(sample), axis=1)
    assert np.allclose(lengths, np.linalg.norm(ready, axis=1) * unit, rtol=1e-4)


@pytest.mark.parametrize("width", [WIDTH, 33])
def test_a_rows_novelty_does_not_depend_on_the_rows_beside_it(width: int) -> None:
    made = make(rows(3000, 1, width), pca=7)
    new = rows(EMBED_BATCH + 100, 2, width)
    whole = made.measure(new)
    order = np.random.default_rng(0).permutation(len(new))
    assert np.array_equal(made.measure(new[order]), whole[order])
    assert np.array_equal(made.measure(new[7:8]), whole[7:8])
    assert np.array_equal(made.score(new[:10]), made.score(new)[:10])
    assert made.score(new[:0]).shape == (0,)


def test_far_from_the_origin_digits_are_kept() -> None:
    sample, new = rows(3000, 1) + 3000, rows(1000, 2) + 3000
    found = make(sample, centre=False, scale=False).score(new)
    assert found.mean() == pytest.approx(0.5, abs=0.06)


def test_wide_rows_have_fewer_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFERENCE_VALUES", 100 * WIDTH)
    assert make(rows(3000, 1)).rows.shape == (100, WIDTH)


def test_places_are_counted_by_tile() -> None:
    xy = np.array([[-1, -2], [0.99, 1.99], [1, 2], [9, 9], [-9, 0]], np.float32)
    counts = count_tiles(xy, EXTENT)
    assert counts.shape == (TILES, TILES)
    assert counts[0, 0] == 1
    assert counts[-1, -1] == 3
    assert counts[TILES // 2, 0] == 1
    assert diameter((0, 3, 1, 5)) == 5


def test_a_reference_survives_being_saved() -> None:
    sample = rows(500, 1)
    made = encoder(sample, pca=8)
    before = fit_reference(made, sample, made.embed(sample), EXTENT)
    data = before.to_bytes()
    after = Reference.from_bytes(data, made)
    new = rows(100, 2)
    assert np.array_equal(after.score(new), before.score(new))
    assert np.array_equal(after.tiles, before.tiles)
    assert after.extent == EXTENT
    assert after.to_bytes() == data


def test_a_damaged_or_foreign_reference_is_refused() -> None:
    sample = rows(300, 1)
    made = encoder(sample)
    found = fit_reference(made, sample, made.embed(sample), EXTENT)
    data = found.to_bytes()
    with pytest.raises(ArtifactError, match=r"reference.safetensors is no reference"):
        Reference.from_bytes(data[:100], made)
    turned = bytearray(data)
    turned[-20] ^= 1
    with pytest.raises(ArtifactError, match="was changed or cut short; copy the artefact again"):
        Reference.from_bytes(bytes(turned), made)
    tensors = load_tensors(data)
    older = save_tensors(tensors | {"format": torch.tensor(0)})
    with pytest.raises(ArtifactError, match="has format 0, this version reads 1; use the version"):
        Reference.from_bytes(older, made)
    other = replace(found, encoder="0" * 64).to_bytes()
    with pytest.raises(ArtifactError, match="is of encoder 000000000000, this one is"):
        Reference.from_bytes(other, made)

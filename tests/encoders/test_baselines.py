import numpy as np
import torch

from encoders.baselines import fit_autoencoder, fit_embedding
from encoders.fit import FitConfig
from encoders.networks import NetworkConfig
from encoders.objectives import ObjectiveConfig
from encoders.preprocessing import Array, PreprocessingConfig, fit_preprocessing

NETWORK = NetworkConfig(hidden=32, layers=1)
CONFIG = FitConfig(ObjectiveConfig(clip=1e6), steps=400, clip_layer=1e6, exaggeration=1.0)


def plane(n_rows: int = 600) -> tuple[Array, Array]:
    """Rows that lie in a plane of eight dimensions, and where they lie in it."""
    rng = np.random.default_rng(0)
    places = rng.uniform(-1, 1, (n_rows, 2))
    rows: Array = places @ rng.normal(size=(2, 8))
    return rows.astype(np.float32), places.astype(np.float32)


def test_an_encoder_learns_a_given_embedding() -> None:
    rows, places = plane()
    preprocessing = fit_preprocessing(rows, PreprocessingConfig())
    network = fit_embedding(rows, places, preprocessing, NETWORK, CONFIG, batch=64)
    with torch.inference_mode():
        found = network(preprocessing.apply(torch.from_numpy(rows))).numpy()
    assert np.square(found - places).mean() < 0.05 * places.var()


def test_an_autoencoder_keeps_what_two_numbers_can_hold() -> None:
    rows, places = plane()
    preprocessing = fit_preprocessing(rows, PreprocessingConfig())
    network = fit_autoencoder(rows, preprocessing, NETWORK, CONFIG, batch=64)
    with torch.inference_mode():
        found = network(preprocessing.apply(torch.from_numpy(rows))).numpy()
    assert found.shape == (600, 2)
    # Positions in the plane follow from those of the code by a smooth function.
    design = np.column_stack([found, found**2, found[:, 0] * found[:, 1], np.ones(600)])
    left = places - design @ np.linalg.lstsq(design, places, rcond=None)[0]
    assert left.var() < 0.1 * places.var()

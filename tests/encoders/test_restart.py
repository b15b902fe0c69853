"""Training from an earlier encoder: the map stays, new clusters find places, lost planes return."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from encoders.artifact import Encoder
from encoders.fit import Drawn, FitConfig, Trained, fit
from encoders.networks import NetworkConfig, build_network
from encoders.objectives import build_objective
from encoders.preprocessing import Array, PreprocessingConfig
from encoders.reference import Reference, diameter, fit_reference
from encoders.restart import Start, off_plane, start_anew, start_from

ARCHITECTURE = NetworkConfig(kind="residual", hidden=32, layers=1)
CONFIG = FitConfig(steps=200, learning_rate=3e-3)
PER_CLUSTER, WIDTH, PLANE = 150, 24, 8
COMPONENTS = PreprocessingConfig(pca=PLANE)


def clusters(n_clusters: int, seed: int, off: int | None = None) -> Array:
    """Rows of clusters in a plane, one after the other; cluster `off` lies off the plane."""
    centres = np.zeros((n_clusters, WIDTH))
    centres[:, :PLANE] = 12 * np.random.default_rng(5).normal(size=(8, PLANE))[:n_clusters]
    if off is not None:
        centres[off] = 0
        centres[off, -1] = 40
    rng = np.random.default_rng(seed)
    made = np.repeat(centres, PER_CLUSTER, axis=0)
    made[:, :PLANE] += rng.normal(size=(len(made), PLANE))
    return (made + 0.05 * rng.normal(size=made.shape)).astype(np.float32)


def train(start: Start, rows: Array, config: FitConfig = CONFIG, seed: int = 0) -> Encoder:
    def draw(step: int) -> Drawn:
        rng = np.random.default_rng([1, step])
        heads = rng.integers(len(rows), size=128)
        tails = heads // PER_CLUSTER * PER_CLUSTER + rng.integers(PER_CLUSTER, size=128)
        return Drawn(np.concatenate([heads, tails]), 128)

    network = build_network(ARCHITECTURE, start.preprocessing.n_outputs, seed)
    if start.weights is not None:
        network.load_state_dict(start.weights)
    objective = build_objective(config.objective)
    fitted = fit(
        Trained(rows, start.preprocessing, network, objective, start.anchors), draw, config
    )
    return Encoder(ARCHITECTURE, start.preprocessing, fitted.network)


@cache
def earlier() -> tuple[Encoder, Reference]:
    """An encoder of four clusters."""
    rows = clusters(4, seed=0)
    made = train(start_anew(rows, COMPONENTS), rows)
    xy = made.embed(rows)
    low, high = xy.min(axis=0).tolist(), xy.max(axis=0).tolist()
    return made, fit_reference(made, rows, xy, (low[0], high[0], low[1], high[1]))


def again(rows: Array, pull: float | None = None) -> Encoder:
    start = start_from(*earlier(), rows, ARCHITECTURE, COMPONENTS)
    if pull is not None:
        assert start.anchors is not None
        start = start._replace(anchors=start.anchors._replace(pull=pull))
    return train(start, rows, replace(CONFIG, exaggerated_share=0.0))


def moved(new: Encoder, rows: Array) -> float:
    """The 95th percentile of the rows' ways, in shares of the map's diameter."""
    old, reference = earlier()
    ways = np.linalg.norm(new.embed(rows) - old.embed(rows), axis=1)
    return float(np.quantile(ways, 0.95)) / diameter(reference.extent)


def test_a_map_of_the_same_clusters_stays() -> None:
    rows = clusters(4, seed=1)
    start = start_from(*earlier(), rows, ARCHITECTURE, COMPONENTS)
    assert start.weights is not None
    assert start.preprocessing is earlier()[0].preprocessing
    assert moved(again(rows), rows) < 0.08
    anew = train(start_anew(rows, COMPONENTS), rows, seed=1)
    assert moved(anew, rows) > 0.2  # by itself it would not


def test_the_pull_holds_the_landmarks() -> None:
    rows = clusters(4, seed=1)
    assert moved(again(rows, pull=1000.0), rows) < moved(again(rows, pull=0.0), rows) / 2


def test_a_new_cluster_finds_a_place_of_its_own_and_the_others_stay() -> None:
    rows = clusters(5, seed=1)
    known, new = rows[: 4 * PER_CLUSTER], rows[4 * PER_CLUSTER :]
    made = again(rows)
    assert moved(made, known) < 0.08
    places, new_places = made.embed(known), made.embed(new)
    nearest = np.linalg.norm(places[:, None] - new_places[None], axis=2).min()
    assert nearest > 2 * np.linalg.norm(new_places - new_places.mean(axis=0), axis=1).max()


def test_novel_rows_are_free() -> None:
    rows = clusters(5, seed=1)
    anchors = start_from(*earlier(), rows, ARCHITECTURE, COMPONENTS).anchors
    assert anchors is not None
    free = np.asarray(np.isnan(anchors.places).any(axis=1))
    assert free[4 * PER_CLUSTER :].all()
    assert free[: 4 * PER_CLUSTER].mean() < 0.35


def test_a_cluster_that_the_components_do_not_see_makes_new_ones() -> None:
    rows = clusters(5, seed=1, off=4)
    old, reference = earlier()
    assert off_plane(reference, rows) == pytest.approx(0.2, abs=0.01)
    start = start_from(old, reference, rows, ARCHITECTURE, COMPONENTS)
    assert start.weights is None
    assert start.preprocessing is not old.preprocessing
    made = train(start, rows, replace(CONFIG, exaggerated_share=0.0))
    known, new = rows[: 4 * PER_CLUSTER], rows[4 * PER_CLUSTER :]
    assert moved(made, known) < 0.15  # the landmarks hold it alone
    apart = np.linalg.norm(made.embed(known)[:, None] - made.embed(new)[None], axis=2).min()
    assert apart > 1


def test_another_network_starts_from_the_landmarks() -> None:
    rows = clusters(4, seed=1)
    start = start_from(*earlier(), rows, replace(ARCHITECTURE, hidden=16), COMPONENTS)
    assert start.weights is None
    assert start.anchors is not None


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="rows have 7 columns, the published encoder takes 24"):
        start_from(*earlier(), np.zeros((5, 7), np.float32), ARCHITECTURE, COMPONENTS)

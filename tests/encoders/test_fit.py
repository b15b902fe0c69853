from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from encoders.fit import (
    COLUMNS,
    LAST_LEARNING_RATE,
    WARM_UP_STEPS,
    Array,
    DivergedError,
    Draw,
    FitConfig,
    Fitted,
    Preprocessing,
    exaggeration,
    fit,
    fit_preprocessing,
    learning_rate,
)
from encoders.networks import NetworkConfig

SMALL = FitConfig(network=NetworkConfig(hidden=16, layers=1), steps=20, batch=32)
CLUSTERS = 4


def clusters(n_rows: int = 400, width: int = 8) -> Array:
    """Rows around CLUSTERS far centres; row i belongs to cluster i % CLUSTERS."""
    rng = np.random.default_rng(0)
    centres = 20 * rng.normal(size=(CLUSTERS, width))
    rows = centres[np.arange(n_rows) % CLUSTERS] + rng.normal(size=(n_rows, width))
    return rows.astype(np.float32)


def drawer(n_rows: int, n_edges: int) -> Draw:
    """Edges between random rows of one cluster."""

    def draw(step: int) -> tuple[Array, Array]:
        rng = np.random.default_rng([7, step])
        heads = rng.integers(n_rows, size=n_edges)
        hops = CLUSTERS * rng.integers(1, n_rows // CLUSTERS, size=n_edges)
        return heads, (heads + hops) % n_rows

    return draw


def train(config: FitConfig = SMALL, rows: Array | None = None, **options: Any) -> Fitted:
    rows = clusters() if rows is None else rows
    preprocessing = fit_preprocessing(rows, normalize=False)
    return fit(rows, drawer(len(rows), config.batch // 2), config, preprocessing, **options)


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def test_map_pulls_clusters_apart() -> None:
    rows = clusters()
    network = train(replace(SMALL, steps=150, batch=128)).network
    with torch.inference_mode():
        y = network(fit_preprocessing(rows, normalize=False).apply(torch.from_numpy(rows)))
    groups = torch.stack([y[start::CLUSTERS] for start in range(CLUSTERS)])
    centres = groups.mean(1)
    inside = (groups - centres[:, None]).norm(dim=2).mean()
    between = torch.pdist(centres).min()
    assert between > 4 * inside


def test_telemetry_has_every_column_for_every_step() -> None:
    telemetry = train().telemetry
    assert tuple(telemetry) == COLUMNS
    assert telemetry["step"].tolist() == list(range(20))
    assert all(np.isfinite(column).all() for column in telemetry.values())
    assert (telemetry["pair_gradient"] > 0).all()
    assert (telemetry["layer_gradient"] > 0).all()


def test_report_gets_what_telemetry_keeps() -> None:
    reports: list[tuple[int, dict[str, float]]] = []
    telemetry = train(report=lambda step, measured: reports.append((step, measured))).telemetry
    assert [step for step, _ in reports] == list(range(20))
    assert [measured["loss"] for _, measured in reports] == telemetry["loss"].tolist()


def test_clips_act_and_say_so() -> None:
    telemetry = train(replace(SMALL, clip_pairwise=0.01, clip_layer=0.001)).telemetry
    for place, threshold in (("pair", 0.01), ("layer", 0.001)):
        assert (telemetry[f"{place}_gradient"] > threshold).all()
        assert (telemetry[f"{place}_gradient_after"] == threshold).all()
        assert (telemetry[f"{place}_clipped"] > 0).all()


def test_clips_that_never_act_change_nothing() -> None:
    loose = replace(SMALL, clip_pairwise=1e14, clip_layer=1e14)
    tight = replace(SMALL, clip_pairwise=0.01)
    telemetry = train(loose).telemetry
    assert not telemetry["pair_clipped"].any()
    assert (telemetry["pair_gradient"] == telemetry["pair_gradient_after"]).all()
    assert not same_weights(train(loose).network, train(tight).network)


def test_an_outlying_row_is_clipped_at_the_layers_and_does_no_harm() -> None:
    rows, draw = clusters(), drawer(400, 64)
    preprocessing = fit_preprocessing(rows, normalize=False)
    rows[3] *= 1e3
    telemetry = fit(rows, draw, replace(SMALL, batch=128, steps=60), preprocessing).telemetry
    met = np.array([3 in np.concatenate(draw(step)) for step in range(60)])
    assert telemetry["layer_clipped"][met].any()
    assert not telemetry["layer_clipped"][~met].any()
    assert telemetry["layer_gradient_after"].max() == SMALL.clip_layer


def test_a_row_too_far_for_float32_is_named_first() -> None:
    rows = clusters()
    preprocessing = fit_preprocessing(rows, normalize=False)
    rows[3] *= 1e25
    edges = np.arange(16), np.arange(16) + CLUSTERS * 10
    with pytest.raises(DivergedError, match=r"at step 0, caused by rows \[3, "):
        fit(rows, lambda _: edges, SMALL, preprocessing)


def test_seed_and_draws_decide_the_weights() -> None:
    assert same_weights(train().network, train().network)
    assert not same_weights(train().network, train(replace(SMALL, seed=1)).network)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16])
def test_narrow_rows_train_like_their_float32_copies(dtype: type) -> None:
    rows: Array = np.clip(np.round(clusters()), 0, 100).astype(dtype)
    rows.setflags(write=False)
    assert same_weights(train(rows=rows).network, train(rows=rows.astype(np.float32)).network)


@pytest.mark.parametrize(
    ("optimizer", "threads"), [("rmsprop", 1), ("adam", 1), ("sgd", 1), ("rmsprop", 2)]
)
def test_resumed_run_ends_in_the_same_bits(optimizer: str, threads: int) -> None:
    config = replace(SMALL, optimizer=optimizer, threads=threads, checkpoint_seconds=0.0, steps=6)
    blobs: list[bytes] = []
    whole = train(config, save=blobs.append)
    resumed = train(config, resume=blobs[2])
    assert len(blobs) == 6
    assert same_weights(whole.network, resumed.network)
    for name, column in whole.telemetry.items():
        assert np.array_equal(column, resumed.telemetry[name])


def test_finished_run_resumes_to_itself() -> None:
    blobs: list[bytes] = []
    whole = train(replace(SMALL, checkpoint_seconds=0.0), save=blobs.append)
    assert same_weights(whole.network, train(resume=blobs[-1]).network)


def test_no_checkpoint_before_its_time() -> None:
    blobs: list[bytes] = []
    train(replace(SMALL, checkpoint_seconds=1000.0), save=blobs.append)
    assert blobs == []


@pytest.mark.parametrize("change", [{"seed": 1}, {"learning_rate": 1e-4}, {"steps": 30}])
def test_checkpoint_of_other_settings_is_refused(change: dict[str, Any]) -> None:
    blobs: list[bytes] = []
    train(replace(SMALL, checkpoint_seconds=0.0), save=blobs.append)
    with pytest.raises(ValueError, match="made with other settings"):
        train(replace(SMALL, **change), resume=blobs[0])


def test_checkpoint_of_other_preprocessing_is_refused() -> None:
    blobs: list[bytes] = []
    train(replace(SMALL, checkpoint_seconds=0.0), save=blobs.append)
    with pytest.raises(ValueError, match="made with other settings"):
        train(rows=clusters() + 1, resume=blobs[0])


def test_threads_and_checkpoint_times_may_change_between_runs() -> None:
    blobs: list[bytes] = []
    train(replace(SMALL, checkpoint_seconds=0.0), save=blobs.append)
    train(replace(SMALL, threads=2, checkpoint_seconds=5.0), resume=blobs[-2])


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    train(replace(SMALL, threads=before + 1, steps=1))
    assert torch.get_num_threads() == before


def test_a_row_that_is_not_a_number_stops_the_run_and_is_named() -> None:
    rows, draw = clusters(), drawer(400, 16)
    preprocessing = fit_preprocessing(rows, normalize=False)
    earlier = np.concatenate([draw(0), draw(1), draw(2)]).ravel()
    bad = int(np.setdiff1d(np.concatenate(draw(3)), earlier)[0])
    rows[bad, 2] = np.nan
    seen: list[int] = []
    with pytest.raises(DivergedError, match=rf"at step 3, caused by rows \[{bad}\] \(1 of the"):
        fit(rows, draw, SMALL, preprocessing, report=lambda step, _: seen.append(step))
    assert seen == [0, 1, 2]


def test_a_learning_rate_that_explodes_stops_the_run() -> None:
    with pytest.raises(DivergedError, match=r"lower learning_rate \(1e\+30\)"):
        train(replace(SMALL, learning_rate=1e30, optimizer="sgd"))


def test_draws_of_the_wrong_size_are_refused() -> None:
    rows = clusters()
    with pytest.raises(ValueError, match=r"step 0 drew 5 heads and 5 tails; .* needs 16 of each"):
        fit(rows, drawer(400, 5), SMALL, fit_preprocessing(rows, normalize=False))


@pytest.mark.parametrize("row", [-1, 400])
def test_rows_outside_the_sample_are_refused(row: int) -> None:
    rows = clusters()
    edges = np.full(16, row), np.arange(16)
    with pytest.raises(ValueError, match="there are 400; draw edges of this sample"):
        fit(rows, lambda _: edges, SMALL, fit_preprocessing(rows, normalize=False))


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer 'lion' is unknown; use rmsprop, adam or sgd"):
        train(replace(SMALL, optimizer="lion"))


def test_exaggeration_lasts_for_its_share_of_the_steps() -> None:
    config = FitConfig(steps=10, exaggeration=4.0, exaggerated_share=0.3)
    assert [exaggeration(config, step) for step in range(10)] == [4.0] * 3 + [1.0] * 7


def test_preprocessing_equals_numpy_over_several_blocks() -> None:
    rows = np.random.default_rng(0).normal(5, 3, (20_000, 3)).astype(np.float32)
    centre, scale = rows.mean(0, dtype=np.float64), rows.astype(np.float64)
    preprocessing = fit_preprocessing(rows, normalize=False)
    np.testing.assert_allclose(preprocessing.centre, centre, rtol=1e-6)
    assert preprocessing.centre.dtype == np.float32
    assert preprocessing.scale == pytest.approx(np.sqrt(np.mean((scale - centre) ** 2)), rel=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32])
def test_prepared_rows_have_mean_zero_and_unit_size(dtype: type) -> None:
    rows: Array = np.random.default_rng(0).integers(0, 100, (500, 6)).astype(dtype)
    prepared = fit_preprocessing(rows, normalize=False).apply(torch.from_numpy(rows)).double()
    assert prepared.mean(0).abs().max() < 1e-6
    assert prepared.square().mean().sqrt().item() == pytest.approx(1.0, abs=1e-6)


def test_large_offsets_do_not_spoil_the_scale() -> None:
    rows = (np.random.default_rng(0).integers(0, 2, (1000, 4)) + 1e6).astype(np.float32)
    assert fit_preprocessing(rows, normalize=False).scale == pytest.approx(0.5, rel=0.05)


def test_constant_rows_keep_their_scale() -> None:
    preprocessing = fit_preprocessing(np.full((10, 3), 7, np.uint8), normalize=False)
    assert (preprocessing.centre.tolist(), preprocessing.scale) == ([7.0, 7.0, 7.0], 1.0)


def test_normalized_rows_forget_their_length_and_zeros_stay() -> None:
    rows = torch.tensor([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]])
    preprocessing = Preprocessing(np.zeros(2, np.float32), 1.0, normalize=True)
    expected = torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.0, 0.0]])
    torch.testing.assert_close(preprocessing.apply(rows), expected)


def test_statistics_of_normalized_rows_are_taken_after_normalizing() -> None:
    rows = np.array([[3, 4], [30, 40]], np.uint8)
    preprocessing = fit_preprocessing(rows, normalize=True)
    np.testing.assert_allclose(preprocessing.centre, [0.6, 0.8], rtol=1e-6)


def test_no_rows_and_bad_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="no rows; at least one is needed"):
        fit_preprocessing(np.empty((0, 3), np.float32), normalize=False)
    with pytest.raises(ValueError, match="rows hold NaN or infinity"):
        fit_preprocessing(np.array([[1.0, np.inf]], np.float32), normalize=False)


def test_learning_rate_rises_shortly_and_falls_along_a_cosine() -> None:
    config = FitConfig(steps=1001, learning_rate=1e-3)
    rates = [learning_rate(config, step) for step in range(1001)]
    assert rates[0] == pytest.approx(1e-3 / WARM_UP_STEPS, rel=0.01)
    assert np.argmax(rates) == WARM_UP_STEPS - 1
    assert rates[500] == pytest.approx(0.5e-3, rel=0.01)
    assert rates[-1] == pytest.approx(LAST_LEARNING_RATE, rel=0.1)

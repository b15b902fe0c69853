from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from encoders.fit import (
    COLUMNS,
    LAST_LEARNING_RATE,
    WARM_UP_STEPS,
    Anchors,
    DivergedError,
    Draw,
    Drawn,
    FitConfig,
    Fitted,
    Trained,
    exaggeration,
    fit,
    hold,
    learning_rate,
    shaken,
)
from encoders.networks import NetworkConfig, build_network
from encoders.objectives import ObjectiveConfig, build_objective
from encoders.preprocessing import Array, Preprocessing, PreprocessingConfig, fit_preprocessing

SMALL = FitConfig(steps=20)
N_EDGES = 16
CLUSTERS = 4


def clusters(n_rows: int = 400, width: int = 8) -> Array:
    """Rows around CLUSTERS far centres; row i belongs to cluster i % CLUSTERS."""
    rng = np.random.default_rng(0)
    centres = 20 * rng.normal(size=(CLUSTERS, width))
    rows = centres[np.arange(n_rows) % CLUSTERS] + rng.normal(size=(n_rows, width))
    return rows.astype(np.float32)


def drawer(n_rows: int, n_edges: int = N_EDGES) -> Draw:
    """Edges between random rows of one cluster."""

    def draw(step: int) -> Drawn:
        rng = np.random.default_rng([7, step])
        heads = rng.integers(n_rows, size=n_edges)
        hops = CLUSTERS * rng.integers(1, n_rows // CLUSTERS, size=n_edges)
        return Drawn(np.concatenate([heads, (heads + hops) % n_rows]), n_edges)

    return draw


def prepare(rows: Array) -> Preprocessing:
    return fit_preprocessing(rows, PreprocessingConfig())


def trained(rows: Array, preprocessing: Preprocessing, config: FitConfig = SMALL) -> Trained:
    network = build_network(NetworkConfig(hidden=16, layers=1), rows.shape[1], config.seed)
    return Trained(rows, preprocessing, network, build_objective(config.objective))


def train(
    config: FitConfig = SMALL, rows: Array | None = None, n_edges: int = N_EDGES, **options: Any
) -> Fitted:
    rows = clusters() if rows is None else rows
    draw = drawer(len(rows), n_edges)
    return fit(trained(rows, prepare(rows), config), draw, config, **options)


def clipped(threshold: float) -> ObjectiveConfig:
    return ObjectiveConfig(clip=threshold)


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def test_map_pulls_clusters_apart() -> None:
    rows = clusters()
    network = train(replace(SMALL, steps=150), n_edges=64).network
    with torch.inference_mode():
        y = network(prepare(rows).apply(torch.from_numpy(rows)))
    groups = torch.stack([y[start::CLUSTERS] for start in range(CLUSTERS)])
    centres = groups.mean(1)
    inside = (groups - centres[:, None]).norm(dim=2).mean()
    between = torch.pdist(centres).min()
    assert between > 4 * inside


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam", "sgd"])
def test_weights_that_are_not_to_be_trained_stay(optimizer: Any) -> None:
    rows = clusters()
    given = trained(rows, prepare(rows))
    frozen = next(given.network.parameters()).requires_grad_(False)
    before = [weight.detach().clone() for weight in given.network.parameters()]
    fit(given, drawer(len(rows)), replace(SMALL, optimizer=optimizer))
    moved = [
        not torch.equal(now, then)
        for now, then in zip(given.network.parameters(), before, strict=True)
    ]
    assert not frozen.requires_grad
    assert moved == [False] + [True] * (len(moved) - 1)


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
    telemetry = train(replace(SMALL, objective=clipped(0.01), clip_layer=0.001)).telemetry
    for place, threshold in (("pair", 0.01), ("layer", 0.001)):
        assert (telemetry[f"{place}_gradient"] > threshold).all()
        assert (telemetry[f"{place}_gradient_after"] == threshold).all()
        assert (telemetry[f"{place}_clipped"] > 0).all()


def test_clips_that_never_act_change_nothing() -> None:
    loose = replace(SMALL, objective=clipped(1e14), clip_layer=1e14)
    tight = replace(SMALL, objective=clipped(0.01))
    telemetry = train(loose).telemetry
    assert not telemetry["pair_clipped"].any()
    assert (telemetry["pair_gradient"] == telemetry["pair_gradient_after"]).all()
    assert not same_weights(train(loose).network, train(tight).network)


def test_an_outlying_row_is_clipped_at_the_layers_and_does_no_harm() -> None:
    rows, draw = clusters(), drawer(400, 64)
    preprocessing = prepare(rows)
    rows[3] *= 1e3
    config = replace(SMALL, steps=60, clip_layer=0.6, exaggerated_share=1.0)
    telemetry = fit(trained(rows, preprocessing, config), draw, config).telemetry
    met = np.array([3 in draw(step).rows for step in range(60)])
    assert telemetry["layer_clipped"][met].any()
    assert not telemetry["layer_clipped"][~met].any()
    assert telemetry["layer_gradient_after"].max() == 0.6


def test_a_row_too_far_for_float32_is_named_first() -> None:
    rows = clusters()
    preprocessing = prepare(rows)
    rows[3] *= 1e25
    edges = Drawn(np.concatenate([np.arange(16), np.arange(16) + CLUSTERS * 10]), 16)
    with pytest.raises(DivergedError, match=r"at step 0, caused by rows \[3, "):
        fit(trained(rows, preprocessing), lambda _: edges, SMALL)


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
    changes: dict[str, Any] = {"optimizer": optimizer, "threads": threads, "steps": 6}
    config = replace(SMALL, checkpoint_seconds=0.0, **changes)
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


@pytest.mark.parametrize("kind", ["tsne", "largevis", "umap"])
def test_threads_only_move_last_bits(kind: Any) -> None:
    config = replace(SMALL, objective=ObjectiveConfig(kind), optimizer="sgd", steps=5)
    untrained = trained(clusters(), prepare(clusters())).network
    start, alone, shared = (
        torch.nn.utils.parameters_to_vector(network.parameters()).detach()
        for network in (untrained, train(config).network, train(replace(config, threads=3)).network)
    )
    assert (shared - alone).norm() < 0.02 * (alone - start).norm()


@pytest.mark.parametrize(("layer", "sizes"), [("Tanh", {16}), ("Dropout", {32})])
def test_threads_share_a_batch_only_where_rows_are_placed_apart(
    layer: str, sizes: set[int]
) -> None:
    seen: set[int] = set()
    network = torch.nn.Sequential(torch.nn.Linear(8, 2), getattr(torch.nn, layer)())
    network.register_forward_pre_hook(lambda _, points: seen.add(len(points[0])))
    rows = clusters()
    objective = build_objective(SMALL.objective)
    fit(
        Trained(rows, prepare(rows), network, objective),
        drawer(len(rows)),
        replace(SMALL, threads=2, steps=2),
    )
    assert seen == sizes


def test_a_row_that_is_not_a_number_stops_the_run_and_is_named() -> None:
    rows, draw = clusters(), drawer(400, 16)
    preprocessing = prepare(rows)
    earlier = np.concatenate([draw(step).rows for step in range(3)])
    bad = int(np.setdiff1d(draw(3).rows, earlier)[0])
    rows[bad, 2] = np.nan
    seen: list[int] = []
    with pytest.raises(DivergedError, match=rf"at step 3, caused by rows \[{bad}\] \(1 of the"):
        fit(trained(rows, preprocessing), draw, SMALL, report=lambda step, _: seen.append(step))
    assert seen == [0, 1, 2]


def test_a_learning_rate_that_explodes_stops_the_run() -> None:
    with pytest.raises(DivergedError, match=r"lower learning_rate \(1e\+30\)"):
        train(replace(SMALL, learning_rate=1e30, optimizer="sgd"))


def test_draws_of_the_wrong_size_are_refused() -> None:
    rows = clusters()
    with pytest.raises(ValueError, match=r"step 0 drew 5 points for 3 edges; .* two for every"):
        fit(trained(rows, prepare(rows)), lambda _: Drawn(np.arange(5), 3), SMALL)


@pytest.mark.parametrize("row", [-1, 400])
def test_rows_outside_the_sample_are_refused(row: int) -> None:
    rows = clusters()
    edges = Drawn(np.append(np.full(16, row), np.arange(16)), 16)
    with pytest.raises(ValueError, match="there are 400; draw rows of this sample"):
        fit(trained(rows, prepare(rows)), lambda _: edges, SMALL)


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer 'lion' is unknown; use rmsprop, adam or sgd"):
        train(replace(SMALL, optimizer="lion"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_columns", "share"), [(300, 0.5), (100, 0.5), (25, 0.25)])
def test_noise_moves_points_by_a_share_of_the_edges_length(n_columns: int, share: float) -> None:
    points = torch.randn(2 * 200 + 50, n_columns, generator=torch.Generator().manual_seed(0))
    config = FitConfig(noise=0.5)
    moved = shaken(points, 200, config, 7)
    way = torch.linalg.vector_norm(moved - points, dim=1)
    length = torch.linalg.vector_norm(points[:200] - points[200:400], dim=1)
    assert (way.mean() / length.mean()).item() == pytest.approx(share, rel=0.03)
    assert torch.equal(shaken(points, 200, config, 7), moved)  # or a resumed run would differ
    assert not torch.equal(shaken(points, 200, config, 8), moved)
    assert shaken(points, 200, replace(config, noise=0.0), 7) is points
    assert shaken(points, 0, config, 7) is points


def test_noise_does_not_tell_partners_or_negatives() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, across, negatives = torch.randn(3, 500, 300, generator=generator)
    lengths = torch.rand(500, 1, generator=generator) ** 4  # a few are much longer than the rest
    points = torch.cat([heads, heads + lengths * across, negatives])
    noise = shaken(points, 500, FitConfig(noise=0.5), 7) - points
    sizes = torch.linalg.vector_norm(noise, dim=1).view(3, 500)
    shared = torch.corrcoef(torch.cat([sizes, lengths.T]))
    assert (shared - torch.eye(4)).abs().max().item() < 0.15
    assert torch.allclose(sizes.mean(1), sizes.mean(), rtol=0.1)


def test_noise_does_not_carry_what_is_not_a_number_to_other_rows() -> None:
    points = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    points[3], points[25] = torch.nan, torch.inf
    moved = shaken(points, 20, FitConfig(noise=0.5), 7)
    lost = ~moved.isfinite().all(1)
    assert lost.nonzero()[:, 0].tolist() == [3, 25]


def test_exaggeration_lasts_for_its_share_of_the_steps() -> None:
    config = FitConfig(steps=10, exaggeration=4.0, exaggerated_share=0.3)
    assert [exaggeration(config, step) for step in range(10)] == [4.0] * 3 + [1.0] * 7


def test_learning_rate_rises_shortly_and_falls_along_a_cosine() -> None:
    config = FitConfig(steps=1001, learning_rate=1e-3)
    rates = [learning_rate(config, step) for step in range(1001)]
    assert rates[0] == pytest.approx(1e-3 / WARM_UP_STEPS, rel=0.01)
    assert np.argmax(rates) == WARM_UP_STEPS - 1
    assert rates[500] == pytest.approx(0.5e-3, rel=0.01)
    assert rates[-1] == pytest.approx(LAST_LEARNING_RATE, rel=0.1)


def test_learning_rate_falls_along_a_line_or_not_at_all() -> None:
    linear = FitConfig(steps=1001, learning_rate=1e-3, schedule="linear")
    assert learning_rate(linear, 750) == pytest.approx(0.25e-3, rel=0.01)
    constant = replace(linear, schedule="constant")
    assert learning_rate(constant, 1000) == pytest.approx(1e-3)


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule 'steps' is unknown; use cosine, linear or"):
        train(replace(SMALL, schedule="steps"))  # type: ignore[arg-type]


def test_holding_is_the_gradient_of_squared_distances() -> None:
    places = np.array([[0, 0], [3, 1], [np.nan, np.nan]], np.float32)
    anchors = Anchors(places, size=5.0, pull=10.0)
    rows = np.array([1, 2, 0, 1])
    y = torch.tensor([[1.0, 2], [9, 9], [4, -1], [3, 1]], requires_grad=True)
    held = [0, 2, 3]
    away = (y[held] - torch.from_numpy(places[rows[held]])).square().sum(1)
    (10 * away.sum() / 5**2 / len(y)).backward()
    assert y.grad is not None
    found = hold(y.detach(), rows, anchors)
    assert torch.allclose(found, y.grad)
    assert found[1].tolist() == [0, 0]  # it is free
    assert not hold(y.detach(), rows, None).any()


def test_a_run_with_other_anchors_does_not_take_the_checkpoint() -> None:
    rows, saved = clusters(), list[bytes]()
    config = replace(SMALL, checkpoint_seconds=0.0)
    held = trained(rows, prepare(rows), config)._replace(
        anchors=Anchors(np.zeros((len(rows), 2), np.float32), 10.0, 1.0)
    )
    draw = drawer(len(rows))
    whole = fit(held, draw, config, save=saved.append)
    middle = saved[len(saved) // 2]
    resumed = trained(rows, prepare(rows), config)._replace(anchors=held.anchors)
    assert same_weights(fit(resumed, draw, config, resume=middle).network, whole.network)
    with pytest.raises(ValueError, match="checkpoint was made with other settings"):
        fit(trained(rows, prepare(rows), config), draw, config, resume=middle)

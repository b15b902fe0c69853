"""LargeVis, UMAP and the paper's t-SNE batch: closed gradients against autograd and differences."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import curve_fit

from encoders.objectives import (
    CAUCHY,
    Batch,
    Curve,
    Objective,
    ObjectiveConfig,
    build_objective,
    fit_curve,
    tsne_points,
)

N_EDGES = 6
EXAGGERATION = 3.0
ROWS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 2, 8, 0, 9])  # two rows stand twice
LARGEVIS = ObjectiveConfig("largevis", clip=math.inf, gamma=7.0)
UMAP = ObjectiveConfig("umap", clip=math.inf)
CONFIGS = [LARGEVIS, UMAP, replace(LARGEVIS, epsilon=0.1), replace(UMAP, min_dist=0.5, spread=2.0)]


def positions(n: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return spread * torch.randn(n, 2, dtype=torch.float64, generator=generator)


def curve_of(config: ObjectiveConfig) -> Curve:
    return fit_curve(config.min_dist, config.spread) if config.kind == "umap" else CAUCHY


def weight(d2: torch.Tensor, curve: Curve) -> torch.Tensor:
    return 1 / (1 + curve.a * d2**curve.b)


def attraction(one: torch.Tensor, other: torch.Tensor, config: ObjectiveConfig) -> torch.Tensor:
    # The kernel of t-SNE and LargeVis has no pole; UMAP's slope has one, which epsilon removes.
    shift = config.epsilon if config.kind == "umap" else 0.0
    return -weight((one - other).square().sum() + shift, curve_of(config)).log()


def repulsion(one: torch.Tensor, other: torch.Tensor, config: ObjectiveConfig) -> torch.Tensor:
    w = weight((one - other).square().sum() + config.epsilon, curve_of(config))
    return -config.gamma * (1 - w).log()


def in_batch(y: torch.Tensor, config: ObjectiveConfig) -> torch.Tensor:
    """The loss of `pairs_in_batch`, point by point as its definition reads."""
    n = len(y)
    terms = []
    for i in range(n):
        term = EXAGGERATION * attraction(y[i], y[(i + n // 2) % n], config)
        for k in range(n):
            if ROWS[k] != ROWS[i]:
                term = term + config.negatives / (n - 1) * repulsion(y[i], y[k], config)
        terms.append(term)
    return torch.stack(terms).mean()


def with_negatives(y: torch.Tensor, config: ObjectiveConfig) -> torch.Tensor:
    """The loss of `pairs_with_negatives`, edge by edge as its definition reads."""
    terms = []
    for e in range(N_EDGES):
        term = EXAGGERATION * attraction(y[e], y[N_EDGES + e], config)
        for m in range(config.negatives):
            negative = y[2 * N_EDGES + e * config.negatives + m]
            term = term + repulsion(y[e], negative, config)
        terms.append(term)
    return torch.stack(terms).mean()


def batch_of(config: ObjectiveConfig) -> tuple[Batch, int]:
    if config.batches == "edges":
        return Batch(ROWS, N_EDGES), 2 * N_EDGES
    n_points = N_EDGES * (2 + config.negatives)
    return Batch(torch.arange(n_points), N_EDGES), n_points


def both_kinds() -> list[tuple[ObjectiveConfig, Callable[..., torch.Tensor]]]:
    drawn = [replace(config, batches="negatives", negatives=3) for config in CONFIGS]
    return [(c, in_batch) for c in CONFIGS] + [(c, with_negatives) for c in drawn]


@pytest.mark.parametrize(("config", "oracle"), both_kinds())
@pytest.mark.parametrize("spread", [0.05, 1.0, 30.0])
@pytest.mark.usefixtures("_blocks")
def test_loss_and_gradient_equal_autograd(
    config: ObjectiveConfig, oracle: Callable[..., torch.Tensor], spread: float
) -> None:
    batch, n_points = batch_of(config)
    leaf = (positions(n_points, spread) + 2).requires_grad_()
    wanted = oracle(leaf, config)
    (gradient,) = torch.autograd.grad(wanted, leaf)
    found = build_objective(config)(leaf.detach(), batch, EXAGGERATION)
    assert found.loss == pytest.approx(wanted.item(), rel=1e-9)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-7, atol=1e-9)
    assert found.share == 0


def differences(objective: Objective, y: torch.Tensor, batch: Batch, e: float) -> torch.Tensor:
    """The gradient by differences of the loss."""
    found = torch.zeros_like(y).view(-1)
    for index in range(y.numel()):
        nudge = torch.zeros_like(y).view(-1)
        nudge[index] = 1e-6
        above, below = (objective(y + s * nudge.view_as(y), batch, e).loss for s in (1, -1))
        found[index] = (above - below) / 2e-6
    return found.view_as(y)


@pytest.mark.parametrize(("config", "_oracle"), both_kinds())
def test_gradient_equals_finite_differences(
    config: ObjectiveConfig, _oracle: Callable[..., torch.Tensor]
) -> None:
    batch, n_points = batch_of(config)
    y, objective = positions(n_points), build_objective(config)
    expected = differences(objective, y, batch, EXAGGERATION)
    torch.testing.assert_close(
        objective(y, batch, EXAGGERATION).gradient, expected, rtol=1e-5, atol=1e-6
    )


def affinities(n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    P = torch.rand(n, n, dtype=torch.float64, generator=generator)
    P[P < 0.5] = 0
    return (P + P.T).fill_diagonal_(0) / 1000


def test_points_minimise_the_divergence_of_the_papers_batch() -> None:
    y, P = positions(12), affinities(12)
    leaf = y.clone().requires_grad_()
    W = (1 / (1 + torch.cdist(leaf, leaf).square())).fill_diagonal_(0)
    share, Q = P / P.sum(), W / W.sum()
    known = P > 0
    wanted = (share[known] * (share[known] / Q[known]).log()).sum()
    # cdist has no derivative at 0, on the diagonal.
    found = tsne_points(y, P, 1.0)
    assert found.loss == pytest.approx(wanted.item(), rel=1e-9)
    objective = build_objective(ObjectiveConfig(batches="points", clip=math.inf))
    batch = Batch(torch.arange(12), affinities=P)
    torch.testing.assert_close(
        found.gradient, differences(objective, y, batch, 1.0), rtol=1e-5, atol=1e-7
    )


def test_exaggeration_of_points_multiplies_p_in_the_papers_gradient() -> None:
    y, P = positions(12), affinities(12)
    W = (1 / (1 + torch.cdist(y, y).square())).fill_diagonal_(0)
    C = (EXAGGERATION * P / P.sum() - W / W.sum()) * W
    wanted = 4 * (C[:, :, None] * (y[:, None] - y[None])).sum(1)
    torch.testing.assert_close(tsne_points(y, P, EXAGGERATION).gradient, wanted)


def test_points_without_a_pair_of_neighbors_are_refused() -> None:
    with pytest.raises(ValueError, match="none of the 12 rows of a batch are neighbors"):
        tsne_points(positions(12), torch.zeros(12, 12, dtype=torch.float64), 1.0)


@pytest.mark.parametrize("kind", ["largevis", "umap"])
@pytest.mark.parametrize("batches", ["edges", "negatives"])
def test_the_clip_saves_points_that_meet(kind: str, batches: str) -> None:
    config = ObjectiveConfig(kind, batches, epsilon=0.0, clip=4.0)  # type: ignore[arg-type]
    batch, n_points = batch_of(config)
    y = positions(n_points)
    y[-1] = y[N_EDGES - 1]  # a negative on its head
    found = build_objective(config)(y, batch, 1.0)
    assert found.share > 0
    assert found.largest == math.inf
    assert found.gradient.isfinite().all()


def test_epsilon_bounds_what_points_that_meet_do() -> None:
    batch, n_points = batch_of(UMAP)
    y = positions(n_points)
    y[-1] = y[0]
    found = build_objective(UMAP)(y, batch, 1.0)
    assert math.isfinite(found.loss)
    assert found.gradient.isfinite().all()


@pytest.mark.parametrize(
    ("min_dist", "spread"),
    [(0.1, 1.0), (0.0, 1.0), (0.99, 1.0), (0.5, 2.0), (0.1, 5.0), (2.0, 1.0)],
)
def test_curve_is_umaps(min_dist: float, spread: float) -> None:
    d = np.linspace(0, 3 * spread, 300)[1:]  # scipy divides by 0 at 0
    wanted = np.where(d < min_dist, 1.0, np.exp(-(d - min_dist) / spread))
    (a, b), _ = curve_fit(lambda d, a, b: 1 / (1 + a * d ** (2 * b)), d, wanted)
    assert fit_curve(min_dist, spread) == pytest.approx((a, b), rel=1e-4)


def test_curve_of_the_defaults() -> None:
    assert fit_curve(0.1, 1.0) == pytest.approx((1.577, 0.895), abs=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        ObjectiveConfig("tsne", "negatives"),
        ObjectiveConfig("umap", "points"),
        ObjectiveConfig("largevis", "points"),
    ],
)
def test_kinds_that_do_not_go_together_are_refused(config: ObjectiveConfig) -> None:
    with pytest.raises(ValueError, match="tsne takes edges or points, largevis and umap take"):
        build_objective(config)


def test_min_dist_beyond_the_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="min_dist 3 with spread 1; min_dist must be from 0"):
        fit_curve(3.0, 1.0)

"""Objectives on one batch of map positions: the loss, its gradient in closed form, and the clip.

A batch comes in one of three kinds:
edges      heads and tails of edges; each end is attracted by the other, repelled by the batch
negatives  heads, tails and each head's negatives, which alone repel it: the papers of LargeVis and
           UMAP
points     rows and their affinities to one another: the paper's t-SNE, for small samples

The pairwise clip acts where a gradient can grow without bound. In LargeVis and UMAP that is a
pair's dL/dd2, infinite where two points meet; in t-SNE every pair is bounded, but not the sum over
the many pairs of a hub, so there it is dL/dy. Both are in the unit of one point's own loss.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from encoders import pairs
from encoders.team import parts, side_by_side

Kind = Literal["tsne", "largevis", "umap"]
BatchKind = Literal["edges", "negatives", "points"]

BLOCK_POINTS = 256  # that are compared with all others at once: few enough for the cache


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised.

    negatives: how many times a point's repulsion counts against one attraction (largevis, umap).
    gamma: its weight. epsilon: added to d2 in what repels, so that it stays finite. min_dist and
    spread: the distance below which points may touch, and the scale, of umap's curve.
    """

    kind: Kind = "tsne"
    batches: BatchKind = "edges"
    clip: float = 16.0
    negatives: int = 5
    gamma: float = 1.0
    epsilon: float = 1e-3
    min_dist: float = 0.1
    spread: float = 1.0


class Batch(NamedTuple):
    """The points of one step by row number, (p,) int64; the parts are laid out by kind.

    edges: B heads, B tails. negatives: B heads, B tails, then m negatives of the first head, ...
    points: b rows; affinities, (b, b), are theirs.
    """

    rows: torch.Tensor
    n_edges: int = 0
    affinities: torch.Tensor | None = None


class Clipped(NamedTuple):
    """A clipped gradient, its largest magnitude before the clip, and the share of entries cut."""

    gradient: torch.Tensor
    largest: float
    share: float


class PairLoss(NamedTuple):
    """A batch's loss, its clipped gradient with respect to the positions, and what was clipped."""

    loss: float
    gradient: torch.Tensor
    largest: float
    share: float


class Block(NamedTuple):
    """Some points of a batch against all of them.

    distances: (n, b), squared. same: indices into them of pairs that are of one row.
    """

    part: slice
    distances: torch.Tensor
    same: tuple[torch.Tensor, torch.Tensor]


Copies = tuple[torch.Tensor, torch.Tensor]  # pairs of points that are of one row, left and right

# Positions (p, 2), their batch, the exaggeration of the attraction.
Objective = Callable[[torch.Tensor, Batch, float], PairLoss]


class Curve(NamedTuple):
    """w = 1 / (1 + a d^2b)."""

    a: float
    b: float


CAUCHY = Curve(1.0, 1.0)  # t-SNE's and LargeVis's


def build_objective(config: ObjectiveConfig) -> Objective:
    """The objective of `config`."""
    if config.kind == "tsne" and config.batches == "edges":
        return lambda y, batch, e: tsne_edges(y, batch.rows, e, config.clip)
    if config.kind == "tsne" and config.batches == "points":
        return lambda y, batch, e: tsne_points(y, _affinities(batch), e, config.clip)
    if config.kind not in ("largevis", "umap") or config.batches not in ("edges", "negatives"):
        raise ValueError(
            f"objective: {config.kind} with batches of {config.batches}; tsne takes edges or "
            "points, largevis and umap take edges or negatives"
        )
    curve = fit_curve(config.min_dist, config.spread) if config.kind == "umap" else CAUCHY
    attract_repel = pairs_in_batch if config.batches == "edges" else pairs_with_negatives
    return lambda y, batch, e: attract_repel(y, batch, e, curve, config)


def _affinities(batch: Batch) -> torch.Tensor:
    assert batch.affinities is not None
    return batch.affinities


def tsne_edges(
    y: torch.Tensor, rows: torch.Tensor, exaggeration: float, threshold: float = math.inf
) -> PairLoss:
    """The row-normalised t-SNE loss of B edges drawn by P, and its gradient.

    y: (2B, 2) positions, heads then tails: point i is paired with point i+B.
    rows: (2B,) the row numbers of the points. A row that ends several edges stands in the batch
    several times; its copies do not repel one another, because S_i sums over other rows. (A copy
    has w=1 wherever it lies, so it would only dampen the row's true repulsion; on a lake smaller
    than the batch most of S_i would be copies.)

    L = mean_i[ -e log w_ij + log S_i ] with j the partner of i, w = 1/(1+|y_i-y_j|^2),
    S_i = sum of w_ik over points k of other rows, e the exaggeration.
    """
    y = _centred(y)
    S, repulsion = repel_compiled(y, rows) if y.device.type == "cpu" else repel_in_blocks(y, rows)
    step = y - y.roll(len(y) // 2, 0)
    w = 1 / (1 + step.square().sum(1, keepdim=True))  # of the drawn edges
    loss = (S.log() - exaggeration * w.log()).mean()
    # Every edge counts twice, once from either end.
    cut = clip(4 * exaggeration * w * step - 2 * repulsion, threshold)
    return PairLoss(float(loss), cut.gradient / len(y), cut.largest, cut.share)


def repel_compiled(y: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """S, (b, 1), and the pushes on the points, (b, 2), for positions in the CPU's memory."""
    S, repulsion = pairs.repel(y.numpy(), rows.numpy())
    return torch.from_numpy(S), torch.from_numpy(repulsion)


def repel_in_blocks(y: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for positions on any device."""
    ones_and_y = torch.cat([torch.ones_like(y[:, :1]), y], 1).T.contiguous()  # (3, b)
    S = y.new_empty(len(y), 1)
    # d log S_i / dy pulls on i by s_i R_ik and on k by the same, s = 1/S and R = w^2, so point i
    # collects sum_k R_ik (s_i + s_k)(y_i - y_k): the sums of R_ik and R_ik y_k, plain and by s_k.
    plain, weighted = torch.empty_like(ones_and_y), torch.zeros_like(ones_and_y)
    for part, D, same in _blocks(y, _copies(rows), slice(0, len(y))):
        W = D.add_(1).reciprocal_()
        W[same] = 0
        S[part] = W.sum(1, keepdim=True)
        R = W.square_()
        plain[:, part] = ones_and_y @ R.T
        weighted.addmm_(ones_and_y[:, part] / S[part, 0], R)
    sums = (plain.T / S) + weighted.T
    return S, y * sums[:, :1] - sums[:, 1:]


def tsne_points(
    y: torch.Tensor, affinities: torch.Tensor, exaggeration: float, threshold: float = math.inf
) -> PairLoss:
    """The paper's mini-batch: KL(P || Q) of b rows, both normalised within the batch.

    y: (b, 2). affinities: (b, b), symmetric, zero diagonal. The gradient is the paper's
    4 sum_j (e p_ij - q_ij) w_ij (y_i - y_j); e, the exaggeration, multiplies P there alone.
    """
    total = affinities.sum()
    if not total > 0:
        raise ValueError(
            f"objective: none of the {len(y)} rows of a batch are neighbors of one another; "
            "raise batch, or train on batches of edges"
        )
    P = affinities / total
    y = _centred(y)
    W = _squared_distances(y, y).add_(1).reciprocal_().fill_diagonal_(0)
    Q = W / W.sum()
    known = P > 0
    loss = (P[known] * (P[known] / Q[known].clamp_min(1e-30)).log()).sum()
    C = (exaggeration * P - Q).mul_(W)
    # A point's own loss is b times the mean's.
    cut = clip(4 * len(y) * (C.sum(1, keepdim=True) * y - C @ y), threshold)
    return PairLoss(float(loss), cut.gradient / len(y), cut.largest, cut.share)


def pairs_in_batch(
    y: torch.Tensor, batch: Batch, exaggeration: float, curve: Curve, config: ObjectiveConfig
) -> PairLoss:
    """LargeVis and UMAP on B edges whose 2B end points are one another's negatives.

    L = mean_i[ -e log w_ij - m gamma / (2B - 1) sum_k log(1 - w_ik) ] with j the partner of i, k
    the points of other rows, m the number of negatives: what m give on average, with less noise.
    """
    b = len(y)
    y = _centred(y)
    weight = config.negatives * config.gamma / (b - 1)
    copies = _copies(batch.rows)

    def repel(part: slice) -> PairLoss:
        """The sum of the part's costs, the pushes on its points, and what of them was clipped."""
        pushes, cost, largest, n_clipped = [], 0.0, 0.0, 0.0
        for block, D, same in _blocks(y, copies, part):
            push, costs = _repel(D, curve, config.epsilon)
            push[same] = costs[same] = 0
            cost += float(costs.sum())
            # A pair stands in the mean of both its points; so does an edge.
            pushed = clip(push.mul_(2 * weight), config.clip)
            C = pushed.gradient
            pushes.append(C.sum(1, keepdim=True) * y[block] - C @ y)
            largest = max(largest, pushed.largest)
            n_clipped += pushed.share * C.numel()
        return PairLoss(cost, torch.cat(pushes), largest, n_clipped)

    costs, pushes, largest, n_clipped = zip(*side_by_side(repel, parts(b)), strict=True)
    step = y - y.roll(b // 2, 0)
    pull, gain = _attract(step.square().sum(1, keepdim=True), curve, config.epsilon)
    pulled = clip(pull.mul_(2 * exaggeration), config.clip)
    loss = float((exaggeration * gain).mean()) + weight * sum(costs) / b
    gradient = 2 * (pulled.gradient * step - torch.cat(pushes))
    share = (sum(n_clipped) + pulled.share * b) / (b * b + b)
    return PairLoss(loss, gradient / b, max(*largest, pulled.largest), share)


def pairs_with_negatives(
    y: torch.Tensor, batch: Batch, exaggeration: float, curve: Curve, config: ObjectiveConfig
) -> PairLoss:
    """LargeVis and UMAP on B edges, each head with the m negatives drawn for it.

    L = mean_e[ -e log w_ht - gamma sum_n log(1 - w_hn) ].
    """
    n_edges = batch.n_edges
    y = _centred(y)
    heads, tails = y[:n_edges], y[n_edges : 2 * n_edges]
    negatives = y[2 * n_edges :].view(n_edges, -1, y.shape[1])
    toward, away = heads - tails, heads[:, None] - negatives
    pull, gain = _attract(toward.square().sum(1, keepdim=True), curve, config.epsilon)
    push, cost = _repel(away.square().sum(2, keepdim=True), curve, config.epsilon)
    pulled = clip(pull.mul_(exaggeration), config.clip)
    pushed = clip(push.mul_(config.gamma), config.clip)
    loss = (exaggeration * gain.sum() + config.gamma * cost.sum()) / n_edges
    attraction, repulsion = 2 * pulled.gradient * toward, 2 * pushed.gradient * away
    parts = [attraction - repulsion.sum(1), -attraction, repulsion.reshape(-1, y.shape[1])]
    n_pairs = pull.numel() + push.numel()
    share = (pulled.share * pull.numel() + pushed.share * push.numel()) / n_pairs
    gradient = torch.cat(parts) / n_edges
    return PairLoss(float(loss), gradient, max(pulled.largest, pushed.largest), share)


def _attract(D: torch.Tensor, curve: Curve, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """d(-log w)/dd2 and -log w at squared distances D."""
    if curve == CAUCHY:
        return 1 / (1 + D), (1 + D).log()
    shifted = D + epsilon  # b may be below 1: the slope is infinite at 0
    powered = curve.a * shifted**curve.b
    slope = curve.a * curve.b * shifted ** (curve.b - 1) / (1 + powered)
    return slope, (1 + powered).log()


def _repel(D: torch.Tensor, curve: Curve, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """-d(-log(1 - w))/dd2, which is positive, and -log(1 - w), at squared distances D + epsilon."""
    shifted = D + epsilon
    powered = shifted if curve == CAUCHY else curve.a * shifted**curve.b
    return curve.b / (shifted * (1 + powered)), torch.log1p(1 / powered)


def fit_curve(min_dist: float, spread: float) -> Curve:
    """The a and b whose w is nearest to 1 up to min_dist, then exp(-(d - min_dist) / spread)."""
    if not 0 <= min_dist < 3 * spread:
        raise ValueError(
            f"objective: min_dist {min_dist:g} with spread {spread:g}; "
            "min_dist must be from 0 to 3 times the spread"
        )
    d = np.linspace(0, 3 * spread, 300)
    wanted = np.where(d < min_dist, 1.0, np.exp(-(d - min_dist) / spread))
    d, wanted = d[1:], wanted[1:]  # at 0 every curve is 1
    log_a, b = -2 * math.log(spread), 1.0
    for _ in range(100):  # Gauss and Newton, in log a and b
        powered = np.exp(log_a + 2 * b * np.log(d))
        w = 1 / (1 + powered)
        slopes = -(powered * w**2)[:, np.newaxis] * np.column_stack(
            [np.ones_like(d), 2 * np.log(d)]
        )
        change, *_ = np.linalg.lstsq(slopes, wanted - w, rcond=None)
        change *= min(1.0, 0.5 / np.abs(change).max()) if change.any() else 1.0
        log_a, b = log_a + float(change[0]), b + float(change[1])
    return Curve(math.exp(log_a), b)


def _centred(y: torch.Tensor) -> torch.Tensor:
    """The positions about their median.

    Losses only see differences; small coordinates keep products precise in float32. Not the mean:
    one point 1e12 away would take it along, and the gradients of all others would be rounding.
    """
    return y - y.median(0).values


def _blocks(y: torch.Tensor, copies: Copies, points: slice) -> Iterator[Block]:
    """Pairs of some points with all, so many at once that what is computed stays in the cache."""
    left, right = copies
    for start in range(points.start, points.stop, BLOCK_POINTS):
        part = slice(start, min(start + BLOCK_POINTS, points.stop))
        itself = torch.arange(part.start, part.stop, device=y.device)
        inside = (left >= part.start) & (left < part.stop)
        same = torch.cat([itself, left[inside]]) - start, torch.cat([itself, right[inside]])
        yield Block(part, _squared_distances(y[part], y), same)


def _squared_distances(some: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(n, b) squared distances of n points from b.

    Differences, not |a|^2+|b|^2-2ab: that form loses close pairs to cancellation in float32.
    """
    D = (some[:, :1] - y[:, 0]).square_()
    across = some[:, 1:] - y[:, 1]
    return D.addcmul_(across, across)


def _copies(rows: torch.Tensor) -> Copies:
    """The points that are of one row, pair by pair, of rows that stand in the batch twice."""
    _, number, count = torch.unique(rows, return_inverse=True, return_counts=True)
    repeated = (count[number] > 1).nonzero()[:, 0]
    left, right = (number[repeated, None] == number[repeated]).nonzero(as_tuple=True)
    return repeated[left], repeated[right]


def clip(gradient: torch.Tensor, threshold: float) -> Clipped:
    """The gradient with every entry cut to [-threshold, threshold].

    An infinite entry is cut like any large one; NaN stays NaN, so that the caller sees it.
    """
    low, high = gradient.aminmax()
    largest = max(-float(low), float(high))
    if largest <= threshold:
        return Clipped(gradient, largest, 0.0)
    share = float((gradient.abs() > threshold).sum()) / gradient.numel()
    return Clipped(gradient.clamp(-threshold, threshold), largest, share)

"""Objectives on one batch of map positions: the loss, its gradient in closed form, and the clip."""

from typing import NamedTuple

import torch


class PairLoss(NamedTuple):
    """A batch's loss and its gradient with respect to the positions, shaped like them."""

    loss: float
    gradient: torch.Tensor


class Clipped(NamedTuple):
    """A clipped gradient, its largest magnitude before the clip, and the share of entries cut."""

    gradient: torch.Tensor
    largest: float
    share: float


def tsne_edges(y: torch.Tensor, rows: torch.Tensor, exaggeration: float) -> PairLoss:
    """The row-normalised t-SNE loss of B edges drawn by P, and its gradient.

    y: (2B, 2) positions, heads then tails: point i is paired with point i+B.
    rows: (2B,) the row numbers of the points. A row that ends several edges stands in the batch
    several times; its copies do not repel one another, because S_i sums over other rows. (A copy
    has w=1 wherever it lies, so it would only dampen the row's true repulsion; on a lake smaller
    than the batch most of S_i would be copies.)

    L = mean_i[ -e log w_ij + log S_i ] with j the partner of i, w = 1/(1+|y_i-y_j|^2),
    S_i = sum of w_ik over points k of other rows, e the exaggeration.
    """
    b = len(y)
    # L only sees differences; small coordinates keep R @ Y precise in float32. Not the mean: one
    # point 1e12 away would take it along, and the gradients of all others would be rounding errors.
    y = y - y.median(0).values
    W = _weights(y, rows)  # (b, b)
    S = W.sum(1, keepdim=True)
    step = y - y.roll(b // 2, 0)
    w = 1 / (1 + step.square().sum(1, keepdim=True))  # of the drawn edges
    loss = (S.log() - exaggeration * w.log()).mean()
    # d log S_i / dy pulls on i by s_i R_ik and on k by the same, so row i collects
    # sum_k R_ik (s_i + s_k)(y_i - y_k): one product of R with [1, Y, s, sY].
    s = 1 / S
    R = W.square_()
    sums = R @ torch.cat([torch.ones_like(s), y, s, s * y], 1)
    repulsion = y * (s * sums[:, :1] + sums[:, 3:4]) - (s * sums[:, 1:3] + sums[:, 4:])
    # Every edge counts twice, once from either end.
    return PairLoss(float(loss), (4 * exaggeration * w * step - 2 * repulsion) / b)


def _weights(y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(b, b) weights 1/(1+d^2) between points of different rows, 0 between points of one row.

    Differences, not |a|^2+|b|^2-2ab: that form loses close pairs to cancellation in float32.
    """
    W = (y[:, :1] - y[:, 0]).square_()
    across = y[:, 1:] - y[:, 1]
    W.addcmul_(across, across).add_(1).reciprocal_().fill_diagonal_(0)
    # Only rows that stand in the batch twice are compared: a (b, b) mask costs 1.5 ms at b=1024.
    _, number, count = torch.unique(rows, return_inverse=True, return_counts=True)
    repeated = (count[number] > 1).nonzero()[:, 0]
    left, right = (number[repeated, None] == number[repeated]).nonzero(as_tuple=True)
    W[repeated[left], repeated[right]] = 0
    return W


def clip(gradient: torch.Tensor, threshold: float) -> Clipped:
    """The gradient with every entry cut to [-threshold, threshold].

    An infinite entry is cut like any large one; NaN stays NaN, so that the caller sees it.
    """
    size = gradient.abs()
    largest = float(size.max())
    if largest <= threshold:
        return Clipped(gradient, largest, 0.0)
    share = float((size > threshold).sum()) / gradient.numel()
    return Clipped(gradient.clamp(-threshold, threshold), largest, share)

import math

import pytest
import torch

from encoders.objectives import clip, repel_compiled, repel_in_blocks, tsne_edges


def oracle(y: torch.Tensor, rows: torch.Tensor, exaggeration: float) -> torch.Tensor:
    """The loss, point by point and term by term as its definition reads."""
    b = len(y)
    terms = []
    for i in range(b):
        weights = [1 / (1 + (y[i] - y[k]).square().sum()) for k in range(b)]
        others = [weights[k] for k in range(b) if rows[k] != rows[i]]
        terms.append(-exaggeration * weights[(i + b // 2) % b].log() + sum(others).log())  # type: ignore[union-attr]
    return torch.stack(terms).mean()


def autograd(y: torch.Tensor, rows: torch.Tensor, exaggeration: float) -> torch.Tensor:
    leaf = y.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(oracle(leaf, rows, exaggeration), leaf)
    return gradient


def positions(n: int, spread: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(n, 2, dtype=torch.float64, generator=generator)


DISTINCT = torch.arange(24)
REPEATED = torch.tensor(
    [0, 1, 2, 2, 4, 5, 0, 7, 8, 9, 10, 2, 12, 0, 14, 15, 16, 9, 18, 5, 20, 1, 4, 8]
)


@pytest.mark.parametrize("rows", [DISTINCT, REPEATED])
@pytest.mark.parametrize("spread", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("exaggeration", [1.0, 4.0])
def test_loss_and_gradient_equal_autograd(
    rows: torch.Tensor, spread: float, exaggeration: float
) -> None:
    y = positions(24, spread) + 3.0
    loss, gradient, largest, _ = tsne_edges(y, rows, exaggeration)
    assert largest == pytest.approx(24 * gradient.abs().max().item())
    assert loss == pytest.approx(oracle(y, rows, exaggeration).item(), abs=1e-10)
    torch.testing.assert_close(gradient, autograd(y, rows, exaggeration), rtol=0, atol=1e-10)


@pytest.mark.parametrize("rows", [DISTINCT, REPEATED])
@pytest.mark.parametrize("spread", [0.01, 1.0, 100.0])
@pytest.mark.usefixtures("_blocks")
def test_other_devices_push_like_the_cpu(rows: torch.Tensor, spread: float) -> None:
    y = positions(24, spread)
    y[7] = 1e6
    exact = repel_compiled(y, rows)
    torch.testing.assert_close(repel_in_blocks(y, rows), exact, rtol=1e-9, atol=1e-10)
    for found in (repel_compiled(y.float(), rows), repel_in_blocks(y.float(), rows)):
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_gradient_equals_finite_differences() -> None:
    y, step = positions(24, 2.0), 1e-6
    gradient = tsne_edges(y, REPEATED, 4.0).gradient
    for index in range(y.numel()):
        nudge = torch.zeros_like(y).view(-1)
        nudge[index] = step
        above, below = (
            tsne_edges(y + sign * nudge.view_as(y), REPEATED, 4.0).loss for sign in (1, -1)
        )
        expected = (above - below) / (2 * step)
        assert gradient.view(-1)[index].item() == pytest.approx(expected, abs=1e-7)


def test_gradient_is_the_same_far_from_the_origin_in_float32() -> None:
    y = (positions(256, 3.0) + 1024).float()
    exact = tsne_edges(y.double(), torch.arange(256), 4.0).gradient
    gradient = tsne_edges(y, torch.arange(256), 4.0).gradient.double()
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-7)


def test_one_point_far_away_leaves_the_others_their_precision() -> None:
    y = positions(256, 3.0).float()
    y[7] = 1e12
    exact = tsne_edges(y.double(), torch.arange(256), 4.0).gradient
    gradient = tsne_edges(y, torch.arange(256), 4.0).gradient.double()
    torch.testing.assert_close(gradient, exact, rtol=0, atol=1e-7)


def test_coincident_points_of_different_rows_repel_with_weight_one_and_no_force() -> None:
    loss, gradient, *_ = tsne_edges(torch.zeros(8, 2), torch.arange(8), 4.0)
    assert loss == pytest.approx(math.log(7))
    assert not gradient.any()


def test_copies_of_a_row_do_not_repel_one_another() -> None:
    y = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    loss = tsne_edges(y, torch.tensor([5, 5, 6, 7]), 0.0).loss
    expected = [0.5 + 0.2, 0.5 + 0.2, 0.5 + 0.5 + 0.5, 0.2 + 0.2 + 0.5]
    assert loss == pytest.approx(sum(map(math.log, expected)) / 4, abs=1e-6)


def test_arguments_are_left_as_they_were() -> None:
    y, rows = positions(24, 1.0), REPEATED.clone()
    kept = y.clone()
    tsne_edges(y, rows, 4.0)
    assert torch.equal(y, kept)
    assert torch.equal(rows, REPEATED)


def test_gradients_of_a_batch_add_up_to_nothing() -> None:
    gradient = tsne_edges(positions(24, 5.0), REPEATED, 4.0).gradient
    torch.testing.assert_close(gradient.sum(0), torch.zeros(2, dtype=torch.float64))


def test_a_lost_point_makes_the_loss_not_a_number() -> None:
    y = positions(24, 1.0)
    y[3, 0] = math.nan
    assert math.isnan(tsne_edges(y, DISTINCT, 4.0).loss)


def test_clip_cuts_entries_and_says_how_many() -> None:
    gradient, largest, share = clip(torch.tensor([[0.5, -3.0], [2.0, 1.0]]), 1.0)
    assert gradient.tolist() == [[0.5, -1.0], [1.0, 1.0]]
    assert (largest, share) == (3.0, 0.5)


def test_clip_leaves_small_gradients_alone() -> None:
    before = torch.tensor([0.5, -1.0])
    assert clip(before, 1.0) == (before, 1.0, 0.0)


def test_clip_cuts_infinity() -> None:
    gradient, largest, share = clip(torch.tensor([math.inf, -math.inf, 0.0, 0.0]), 2.0)
    assert gradient.tolist() == [2.0, -2.0, 0.0, 0.0]
    assert (largest, share) == (math.inf, 0.5)


def test_clip_does_not_hide_nan() -> None:
    gradient, largest, share = clip(torch.tensor([math.nan, 3.0]), 1.0)
    assert math.isnan(gradient[0])
    assert gradient[1] == 1.0
    assert math.isnan(largest)
    assert share == 0.5

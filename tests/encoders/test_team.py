import threading
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from encoders import pairs
from encoders.networks import NetworkConfig, build_network, places_rows_apart
from encoders.team import ahead, parts, side_by_side, team


@pytest.mark.parametrize(("length", "sizes"), [(7, [2, 2, 3]), (2, [1, 1]), (1, [1])])
def test_parts_hold_every_point_once(length: int, sizes: list[int]) -> None:
    with team(3):
        found = parts(length)
    assert [part.stop - part.start for part in found] == sizes
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(length))


def test_without_a_team_there_is_one_part_in_the_callers_thread() -> None:
    assert parts(7) == [slice(0, 7)]
    here = threading.get_ident()
    assert side_by_side(lambda _: threading.get_ident(), [1, 2]) == [here, here]


def test_results_stand_in_the_order_of_the_parts() -> None:
    with team(3):
        assert side_by_side(lambda one, other: one - other, [5, 7, 9], [1, 2, 3]) == [4, 5, 6]


def test_parts_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=20)
    with team(3):
        assert sorted(side_by_side(lambda _: meeting.wait(), range(3))) == [0, 1, 2]


def test_torch_has_one_thread_in_each_part_and_all_afterwards() -> None:
    torch.set_num_threads(3)
    with team(2):
        assert side_by_side(lambda _: torch.get_num_threads(), range(2)) == [1, 1]
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("part", [0, 1])
def test_the_error_of_a_part_is_raised(part: int) -> None:
    def work(number: int) -> None:
        if number == part:
            raise ValueError(f"part {number}")

    with pytest.raises(ValueError, match=f"part {part}"), team(2):
        side_by_side(work, range(2))
    assert parts(2) == [slice(0, 2)]


def test_work_ahead_runs_while_the_caller_does_other_things() -> None:
    meeting = threading.Barrier(2, timeout=20)
    with team(2):
        coming = ahead(lambda number: (meeting.wait(), number), 7)
        meeting.wait()
        assert coming()[1] == 7


@pytest.mark.parametrize("size", [None, 1])
def test_without_others_work_ahead_is_done_when_asked_for(size: int | None) -> None:
    with team(size) if size else nullcontext():
        coming = ahead(threading.get_ident)
        assert coming() == threading.get_ident()


def test_the_error_of_work_ahead_is_raised_where_it_is_asked_for() -> None:
    with team(2):
        coming = ahead(int, "seven")
        with pytest.raises(ValueError, match="seven"):
            coming()


def test_pushes_are_the_same_bits_in_any_team() -> None:
    y = np.random.default_rng(0).normal(size=(101, 2)).astype(np.float32)
    rows = np.arange(101) % 90
    alone = pairs.repel(y, rows)
    with team(3):
        shared = pairs.repel(y, rows)
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["mlp", "residual", "cnn"])
def test_batches_of_our_networks_may_be_cut(kind: str) -> None:
    assert places_rows_apart(build_network(NetworkConfig(kind, 16, 1, (4, 4)), 16))


@pytest.mark.parametrize("layer", [lambda: torch.nn.BatchNorm1d(2), torch.nn.Dropout])
def test_batches_are_whole_where_rows_or_threads_would_meet(
    layer: Callable[[], torch.nn.Module],
) -> None:
    assert not places_rows_apart(torch.nn.Sequential(torch.nn.Linear(3, 2), layer()))

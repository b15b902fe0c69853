from collections.abc import Iterator

import pytest
import torch

from encoders import objectives


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of torch wait in a loop for one another, which takes seconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[objectives.BLOCK_POINTS, 7], ids="{}_points_a_block".format)
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few points are one block; blocks of seven leave a rest, and copies of a row in two blocks."""
    monkeypatch.setattr(objectives, "BLOCK_POINTS", request.param)

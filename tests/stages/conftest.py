"""Fixtures of the stage tests: one finished run for all, and blocks small enough for several."""

from collections.abc import Iterator

import pytest

from tests.data import Finished, finish_run, small_blocks


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finish_run(tmp_path_factory)


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield

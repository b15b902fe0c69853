"""Runners and stores for every test; one cluster of two worker processes serves them all."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from obstore.store import MemoryStore

from jobs.cluster import open_runner
from pipeline import stores
from pipeline.config import ClusterConfig
from pipeline.runner import Runner, SerialRunner
from pipeline.stores import Folder

# As the command line sets it: waiting threads that spin stall each other on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# How long an example takes says more about the machine than about the code.
settings.register_profile("lakemap", deadline=None)
settings.load_profile("lakemap")

RETRIES = 2


@pytest.fixture(scope="session")
def dask_runner() -> Iterator[Runner]:
    """A runner on two worker processes, which live as long as the tests."""
    config = ClusterConfig(workers=2, retries=RETRIES)
    with open_runner(config, lambda _: None) as runner:
        yield runner


@pytest.fixture
def serial_runner() -> Runner:
    return SerialRunner(task_bytes=1 << 30, retries=RETRIES)


@pytest.fixture(params=["serial", "dask"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """Each runner in turn: what a test says of one must hold for the other."""
    found: Runner = request.getfixturevalue(f"{request.param}_runner")
    return found


@pytest.fixture(params=["path", "url", "memory"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Folder:
    """An empty folder in each kind of store."""
    if request.param == "path":
        return Folder(str(tmp_path / "a folder, é"))
    if request.param == "url":
        return Folder(f"file://{tmp_path}/folder")
    memory = MemoryStore()
    monkeypatch.setattr(stores, "_open_store", lambda _: memory)
    return Folder("memory://bucket/deep/folder")

"""Runners and stores for every test; one cluster of two worker processes serves them all."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import settings

from jobs.cluster import open_runner
from pipeline.cluster_config import ClusterConfig
from pipeline.remote import connect
from pipeline.runner import Runner, SerialRunner
from pipeline.stores import Folder
from tests.s3 import BUCKET, OWNER, S3Server, run_server

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


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all tests."""
    with run_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """An empty folder in a bucket, reached with the owner's keys from the environment."""
    for name, value in s3_server.environment(OWNER).items():
        monkeypatch.setenv(name, value)
    connect.cache_clear()
    yield Folder(f"s3://{BUCKET}/{uuid4().hex}/a folder, é")
    connect.cache_clear()


@pytest.fixture(params=["path", "url", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty folder in each kind of store."""
    if request.param == "path":
        return Folder(str(tmp_path / "a folder, é"))
    if request.param == "url":
        return Folder(f"file://{tmp_path}/folder")
    found: Folder = request.getfixturevalue("bucket")
    return found

"""Workers of a real scheduler that vanish and join while tasks are under way."""

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client

from jobs import crew, flights
from jobs.cluster import find_offer, open_runner
from jobs.sites import local, site
from jobs.sites.site import Demand
from pipeline.cluster_config import ClusterConfig
from pipeline.errors import ClusterError
from pipeline.manifest import Commit
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report, Runner, Write
from tests.faults import Script, ignore_report, make_commit
from tests.processes import Farm, run_farm
from tests.test_cluster import wait_for


@pytest.fixture
def farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Farm]:
    monkeypatch.setattr(crew, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(flights, "LOOK_SECONDS", 0.1)
    with run_farm(tmp_path / "farm") as farm:
        yield farm


@pytest.fixture
def watcher(farm: Farm) -> Iterator[Client]:
    """Looks at the workers that the scheduler knows."""
    with Client(farm.address) as client:
        yield client


def config(farm: Farm, wait_seconds: float = 60) -> ClusterConfig:
    return ClusterConfig(kind="scheduler", address=farm.address, wait_seconds=wait_seconds)


@dataclass(frozen=True)
class NapTask:
    """Counts itself, sleeps a little, names its process."""

    script: Script
    seconds: float = 0.1

    def __call__(self, part: Partition, _: Report) -> Write:
        self.script.act(part.index)
        time.sleep(self.seconds)
        return partial(make_commit, part, metrics={"pid": os.getpid()})


def start(runner: Runner, task: NapTask, n_parts: int) -> Iterator[Commit]:
    return runner.map("toy", task, split_rows(n_parts, 1), ignore_report)


def pids(commits: list[Commit]) -> set[int]:
    return {commit.record.metrics["pid"] for commit in commits}


def test_a_run_goes_on_without_the_workers_that_vanish(
    farm: Farm, watcher: Client, tmp_path: Path
) -> None:
    first, second = farm.add_worker(), farm.add_worker()
    with open_runner(config(farm), lambda _: None) as runner:
        watcher.wait_for_workers(2)
        commits = start(runner, NapTask(Script(tmp_path)), 40)
        found = [next(commits) for _ in range(8)]
        first.kill()
        found += [next(commits) for _ in range(8)]
        second.kill()
        third = farm.add_worker()  # nobody is there for about a second
        found += commits
        assert runner.n_workers == 1
    assert sorted(commit.record.partition.index for commit in found) == list(range(40))
    assert pids(found) == {first.pid, second.pid, third.pid}


def test_workers_that_join_later_are_given_work(
    farm: Farm, watcher: Client, tmp_path: Path
) -> None:
    first = farm.add_worker()
    script = Script(tmp_path)
    with open_runner(config(farm), lambda _: None) as runner:
        commits = start(runner, NapTask(script), 60)
        found = [next(commits)]
        others = [farm.add_worker() for _ in range(2)]
        watcher.wait_for_workers(3)
        found += commits
        assert runner.n_workers == 3
    assert pids(found) == {first.pid, *(worker.pid for worker in others)}
    assert script.attempts() == dict.fromkeys(range(60), 1)


@dataclass(frozen=True)
class MeetTask:
    """Ends only when four have begun, which takes four workers."""

    script: Script

    def __call__(self, part: Partition, _: Report) -> Write:
        self.script.act(part.index)
        wait_for(lambda: len(self.script.attempts()) >= 4)
        return partial(make_commit, part)


def test_long_tasks_do_not_keep_others_from_workers_that_join(farm: Farm, tmp_path: Path) -> None:
    farm.add_worker()
    script = Script(tmp_path)
    with open_runner(config(farm), lambda _: None) as runner, ThreadPoolExecutor(1) as pool:
        commits = runner.map("toy", MeetTask(script), split_rows(6, 1), ignore_report)
        done = pool.submit(list, commits)
        wait_for(lambda: len(script.attempts()) == 1)
        for _ in range(3):
            farm.add_worker()
        assert len(done.result(60)) == 6
    assert script.attempts() == dict.fromkeys(range(6), 1)


def test_the_first_worker_is_waited_for(
    farm: Farm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(crew, "SAY_SECONDS", 0.2)
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO, "lakemap"):
        waiting = pool.submit(_run_few, farm, Script(tmp_path))
        wait_for(lambda: "waiting for a worker (" in caplog.text)
        assert not waiting.done()
        farm.add_worker()
        assert waiting.result(60) == 3


def _run_few(farm: Farm, script: Script) -> int:
    with open_runner(config(farm), lambda _: None) as runner:
        return len(list(start(runner, NapTask(script), 3)))


def test_a_run_does_not_wait_for_ever(farm: Farm, watcher: Client, tmp_path: Path) -> None:
    match = rf"^no worker came in \d+ s; start some for the scheduler at {farm.address}, run again$"
    with pytest.raises(ClusterError, match=match), open_runner(config(farm, 0.5), lambda _: None):
        pass
    with pytest.raises(ClusterError, match=match.replace(r"\d+", "0")):
        find_offer(config(farm))
    worker = farm.add_worker()
    watcher.wait_for_workers(1)
    with open_runner(config(farm, 0.5), lambda _: None) as runner:
        commits = start(runner, NapTask(Script(tmp_path)), 20)
        next(commits)
        worker.kill()
        with pytest.raises(ClusterError, match=match):
            list(commits)


def test_a_scheduler_that_dies_ends_the_run(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "CONNECT_SECONDS", 2)
    farm.add_worker()
    with open_runner(config(farm), lambda _: None) as runner:
        commits = start(runner, NapTask(Script(tmp_path)), 100)
        next(commits)
        farm.scheduler.kill()
        with pytest.raises(
            ClusterError, match=r"^the connection to the scheduler was lost"
        ) as caught:
            list(commits)
    assert len(str(caught.value).splitlines()) == 1


def test_training_gets_the_worker_with_the_gpu(farm: Farm, watcher: Client, tmp_path: Path) -> None:
    farm.add_worker()
    equipped = farm.add_worker("--resources", "GPU=1")
    with open_runner(config(farm), lambda _: None) as runner:
        watcher.wait_for_workers(2)
        time.sleep(0.2)  # for the next look
        for _ in range(3):
            task = NapTask(Script(tmp_path), seconds=0)
            commits = runner.map("train", task, split_rows(1, 1), ignore_report, whole_machine=True)
            assert pids(list(commits)) == {equipped.pid}
    assert find_offer(config(farm)).device == "a GPU worker"


def test_a_worker_with_other_software_is_refused(farm: Farm, tmp_path: Path) -> None:
    metadata = tmp_path / "older/lakemap-0.0.9.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: lakemap\nVersion: 0.0.9\n")
    farm.add_worker()
    with open_runner(config(farm), lambda _: None) as runner:
        commits = start(runner, NapTask(Script(tmp_path)), 200)
        next(commits)
        path = f"{metadata.parent.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        farm.add_worker(environment={"PYTHONPATH": path})
        match = r"^worker tcp://\S+ has lakemap 0.0.9, the driver \S+; install the same there"
        with pytest.raises(ClusterError, match=match):
            list(commits)


def test_demand_grows_at_once_and_shrinks_when_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(site, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    demand = Demand(2, 10)
    assert demand.n_workers == 2
    assert [demand.follow(n) for n in (0, 5, 100, 4)] == [2, 5, 10, 10]
    clock[0] = 59
    assert [demand.follow(n) for n in (3, 50)] == [10, 10]
    clock[0] = 118
    assert demand.follow(1) == 10
    clock[0] = 120
    assert [demand.follow(n) for n in (1, 7)] == [2, 7]


class Told:
    """Stands for a client whose scheduler and worker have versions that cannot be had here."""

    def __init__(self, scheduler: dict[str, str | None], worker: dict[str, str | None]) -> None:
        self._changes = {"scheduler": scheduler, "worker": worker, "client": {}}

    def get_versions(self, packages: list[str]) -> dict[str, Any]:
        assert packages == ["lakemap"]
        same: dict[str, str | None] = {
            "python": "3.11.7.final.0",
            "dask": "1",
            "distributed": "1",
            "lakemap": "1",
        }
        found = {who: {"packages": same | self._changes[who]} for who in self._changes}
        return {**found, "workers": {"tcp://h:1": found.pop("worker")}}


@pytest.mark.parametrize(
    ("scheduler", "worker", "line"),
    [
        ({}, {}, None),
        ({"lakemap": None}, {"python": "3.11.2.final.0"}, None),
        ({"dask": "2"}, {}, "the scheduler has dask 2, the driver 1; install the same there and"),
        ({}, {"lakemap": None}, "worker tcp://h:1 has lakemap not at all, the driver 1; install"),
        ({}, {"python": "3.12.1.final.0"}, "worker tcp://h:1 has Python 3.12, the driver 3.11; i"),
    ],
)
def test_which_software_must_agree(
    scheduler: dict[str, str | None], worker: dict[str, str | None], line: str | None
) -> None:
    client: Any = Told(scheduler, worker)
    if line is None:
        crew.check_versions(client)
        return
    with pytest.raises(ClusterError, match=f"^{line}"):
        crew.check_versions(client)

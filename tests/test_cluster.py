import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster
from distributed.system import MEMORY_LIMIT
from pydantic import ByteSize

from jobs.cluster import DaskRunner, find_offer, open_runner
from jobs.sites.local import core_count
from jobs.sites.site import Site
from pipeline.cluster_config import ClusterConfig
from pipeline.errors import ClusterError
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report, Runner, SerialRunner, Write
from tests.conftest import RETRIES
from tests.faults import DIE, OK, RAISE, Script, ignore_report, make_commit
from tests.test_runner import run_all, run_both_stages

PATIENCE_SECONDS = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds; it must, some day."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True)
class HangingTask:
    """The first attempt at partition 0 leaves its process id and waits to be killed."""

    script: Script

    def __call__(self, part: Partition, _: Report) -> Write:
        attempt = self.script.act(part.index)
        if (part.index, attempt) == (0, 1):
            (self.script.folder / "pid.part").write_text(str(os.getpid()))
            (self.script.folder / "pid.part").rename(self.script.folder / "pid")
            time.sleep(PATIENCE_SECONDS)
        return partial(make_commit, part, metrics={"attempt": attempt})


@dataclass(frozen=True)
class PidTask:
    """Names the process it runs in."""

    def __call__(self, part: Partition, _: Report) -> Write:
        return partial(make_commit, part, metrics={"pid": os.getpid()})


def worker_pids(runner: Runner) -> set[int]:
    commits = runner.map("pids", PidTask(), split_rows(40, 1), ignore_report)
    return {commit.record.metrics["pid"] for commit in commits}


def test_a_worker_that_dies_is_replaced_and_its_task_repeated(
    dask_runner: Runner, tmp_path: Path
) -> None:
    script = Script(tmp_path).write({3: [DIE, OK]})
    found = run_all(dask_runner, script)
    assert found[3] == 2
    assert sorted(found) == list(range(10))


def test_a_task_that_kills_every_worker_is_given_up(dask_runner: Runner, tmp_path: Path) -> None:
    script = Script(tmp_path).write({0: [DIE] * 9})
    match = rf"^toy: partition 0: its worker died {RETRIES + 1} times; give workers more memory"
    with pytest.raises(ClusterError, match=match):
        run_all(dask_runner, script, split_rows(3, 3))
    assert script.attempts() == {0: RETRIES + 1}


def test_a_task_whose_worker_is_killed_is_done_elsewhere(
    dask_runner: Runner, tmp_path: Path
) -> None:
    script = Script(tmp_path)
    commits = dask_runner.map("toy", HangingTask(script), split_rows(10, 1), ignore_report)
    found = [next(commits)]  # the other worker goes on while this one hangs
    wait_for((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    found += commits
    assert sorted(commit.record.partition.index for commit in found) == list(range(10))
    assert script.attempts()[0] == 2
    assert not is_alive(pid)


def test_a_worker_that_is_slow_to_come_back_is_waited_for(tmp_path: Path) -> None:
    script = Script(tmp_path).write({1: [DIE, DIE, OK]})
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "100ms"}),
        open_runner(ClusterConfig(workers=1), lambda _: None) as runner,
    ):
        assert sorted(run_all(runner, script, split_rows(4, 1))) == [0, 1, 2, 3]
    assert script.attempts()[1] == 3


def test_one_worker_writes_the_same_bytes(serial_runner: Runner, tmp_path: Path) -> None:
    announced: list[str] = []
    config = ClusterConfig(workers=1, memory=ByteSize(1 << 30), retries=0)
    with open_runner(config, announced.append) as runner:
        assert (runner.n_workers, runner.task_bytes, runner.train_bytes) == (1, 1 << 30, 1 << 30)
        found = run_both_stages(runner, tmp_path / "one")
        workers = worker_pids(runner)
        assert len(workers - {os.getpid()}) == 1
    assert found == run_both_stages(serial_runner, tmp_path / "two")
    assert announced[0].startswith("http://127.0.0.1:")
    assert not [pid for pid in workers if is_alive(pid)]


def test_a_failing_run_leaves_no_worker_behind() -> None:
    pids: set[int] = set()

    def fail() -> None:
        with open_runner(ClusterConfig(workers=1), lambda _: None) as runner:
            pids.update(worker_pids(runner))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        fail()
    assert len(pids) == 1
    assert not [pid for pid in pids if is_alive(pid)]


def test_a_serial_job_needs_no_cluster() -> None:
    config = ClusterConfig(kind="serial", memory=ByteSize(7 << 20))
    with open_runner(config, pytest.fail) as runner:
        assert isinstance(runner, SerialRunner)
        assert (runner.n_workers, runner.task_bytes, runner.train_bytes) == (1, 7 << 20, 7 << 20)


@pytest.fixture
def threads() -> Iterator[LocalCluster]:
    """A scheduler with one worker in this process, of three threads and a GPU."""
    with LocalCluster(
        n_workers=1,
        threads_per_worker=3,
        processes=False,
        memory_limit=3 << 30,
        resources={"GPU": 1},
        dashboard_address="127.0.0.1:0",
    ) as found:
        yield found


def test_a_scheduler_gives_what_its_workers_give(threads: LocalCluster, tmp_path: Path) -> None:
    config = ClusterConfig(kind="scheduler", address=threads.scheduler_address)
    assert find_offer(config) == (3, 1 << 30, 3 << 30, "a GPU worker")
    with open_runner(config, lambda _: None) as runner:
        assert (runner.n_workers, runner.task_bytes, runner.train_bytes) == (3, 1 << 30, 3 << 30)
        assert sorted(run_all(runner, Script(tmp_path))) == list(range(10))
        assert worker_pids(runner) == {os.getpid()}
    assert len(threads.workers) == 1  # a cluster that others opened stays open


def test_nothing_of_finished_work_stays_on_workers(threads: LocalCluster, tmp_path: Path) -> None:
    script = Script(tmp_path).write({2: [RAISE]})
    with Client(threads) as client:
        assert (
            len(run_all(DaskRunner(Site(client, "look"), retries=1, wait_seconds=5), script)) == 10
        )
        wait_for(lambda: not client.futures)


def test_a_task_of_the_whole_machine_asks_for_the_gpu(
    threads: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    with Client(threads) as client:
        submit = client.submit

        def watch(*args: object, **options: object) -> object:
            asked.append(options["resources"])
            return submit(*args, **options)

        monkeypatch.setattr(client, "submit", watch)
        runner = DaskRunner(Site(client, "look"), retries=0, wait_seconds=5)
        for whole_machine in (False, True):
            task = PidTask()
            list(
                runner.map(
                    "toy", task, split_rows(1, 1), ignore_report, whole_machine=whole_machine
                )
            )
    assert asked == [None, {"GPU": 1}]


def test_local_workers_share_cores_and_memory() -> None:
    assert find_offer(ClusterConfig())[:2] == (core_count(), MEMORY_LIMIT // core_count())
    assert find_offer(ClusterConfig(workers=4))[:3] == (4, MEMORY_LIMIT // 4, MEMORY_LIMIT // 4)
    assert find_offer(ClusterConfig(workers=4, memory=ByteSize(5 << 20)))[:2] == (4, 5 << 20)
    assert find_offer(ClusterConfig(kind="serial", workers=4))[0] == 1
    assert find_offer(ClusterConfig()).device in ("CPU", "GPU")

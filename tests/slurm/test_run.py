"""Whole runs through a real SLURM; `make test-slurm` installs it where it can."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from jobs import crew
from jobs.cluster import open_runner
from jobs.sites import site, slurm
from pipeline.cluster_config import ClusterConfig, GpuConfig, SlurmConfig
from pipeline.partitions import split_rows
from tests.data import LABELLED, Lake, make_blobs, results, run_process, write_job, write_parquet
from tests.faults import Script, ignore_report
from tests.processes import make_certificates
from tests.slurm.farm import Farm, run_farm
from tests.test_cluster import HangingTask, wait_for
from tests.test_crew import NapTask, pids

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PATIENCE_SECONDS = 120.0
WORKERS = {"kind": "slurm", "workers": 2, "memory": "3GiB"}
PLACE = {"queue": "main", "interface": "lo", "walltime": "00:10:00"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def farm(folder: Path) -> Iterator[Farm]:
    with run_farm(folder / "farm") as farm:
        yield farm


@pytest.fixture(scope="module")
def lake(folder: Path) -> Lake:
    return write_parquet(folder / "lake", *make_blobs(2000), n_files=10, held_out_every=8)


class Driver:
    """The command line as a process that finds the farm."""

    def __init__(self, farm: Farm, job: Path, **environment: str) -> None:
        self._log = job.with_suffix(".stderr")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jobs.cli", "run", str(job)],
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**farm.environment, "OMP_WAIT_POLICY": "PASSIVE", **environment},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None, f"ended: {self.said}"
            assert time.monotonic() < deadline, f"waited in vain: {self.said}"
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)


@pytest.fixture
def start(
    farm: Farm, lake: Lake, folder: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., tuple[Driver, Path]]]:
    """Starts a run with these settings of the cluster; the driver and its output folder."""
    drivers: list[Driver] = []

    def begin(cluster: Mapping[str, Any], **environment: str) -> tuple[Driver, Path]:
        place = folder / request.node.name
        place.mkdir(exist_ok=True)
        output = folder / "maps"  # the name is part of what a run is made of
        if output.exists():
            output.rename(folder / f"maps-{time.monotonic_ns()}")
        job = _write(place, lake, output, cluster)
        drivers.append(Driver(farm, job, **environment))
        return drivers[-1], output

    yield begin
    for driver in drivers:
        if driver.process.poll() is None:
            os.killpg(driver.process.pid, signal.SIGKILL)
            driver.process.wait()


def _write(place: Path, lake: Lake, output: Path, cluster: Mapping[str, Any]) -> Path:
    return write_job(
        place / "job.yaml",
        lake.path,
        output,
        input=LABELLED,
        edges={"samples": None},
        train={"steps": 100, "batch": 128},
        cluster=cluster,
    )


def running(farm: Farm, name: str) -> list[str]:
    return [job.number for job in farm.jobs() if (job.name, job.state) == (name, "RUNNING")]


@pytest.fixture(scope="module")
def expected(folder: Path, lake: Lake) -> dict[str, str]:
    """What a run in one process leaves."""
    output = folder / "maps"
    (folder / "serial").mkdir()
    ran = run_process("run", _write(folder / "serial", lake, output, {"kind": "serial"}))
    assert ran.code == 0, ran.err
    return results(output)


def test_a_run_survives_a_cancelled_worker_and_trains_on_the_gpu_pool(
    farm: Farm,
    folder: Path,
    expected: dict[str, str],
    start: Callable[..., tuple[Driver, Path]],
) -> None:
    tls = asdict(make_certificates(folder / "certificates"))
    gpu = {"memory": "3GiB", "queue": "gpu"}
    marked = {**PLACE, "prologue": ["export LAKEMAP_MARK=prologue"], "directives": ["--nice=7"]}
    driver, output = start(
        {**WORKERS, "slurm": marked, "gpu": gpu, "tls": tls},
        DASK_DISTRIBUTED__DEPLOY__LOST_WORKER_TIMEOUT="1s",
    )
    driver.wait_for(lambda: list(output.glob("stores/ingest/*/commits/*")))
    victim = running(farm, "lakemap")[0]
    farm.call("scancel", victim)
    driver.wait_for(lambda: len({*running(farm, "lakemap")} - {victim}) == 2)  # replaced
    driver.wait_for(lambda: list(output.glob("stores/train/*/plan.json")))
    driver.wait_for(lambda: running(farm, "lakemap-gpu"))
    assert [job.node for job in farm.jobs() if job.name == "lakemap-gpu"] == ["n3"]
    driver.wait_for(lambda: list(output.glob("stores/train/*/manifest.json")))
    driver.wait_for(lambda: not running(farm, "lakemap-gpu"))  # released before the run ends
    assert driver.end() == 0, driver.said
    assert wait_until_empty(farm)
    assert results(output) == expected
    assert "Traceback" not in driver.said
    assert "PRIVATE KEY" not in driver.said


def wait_until_empty(farm: Farm) -> bool:
    deadline = time.monotonic() + 20
    while farm.jobs():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_workers_come_and_go_with_the_work(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", farm.environment["SLURM_CONF"])
    monkeypatch.setattr(site, "SHRINK_SECONDS", 1.0)
    monkeypatch.setattr(crew, "REFILL_SECONDS", 0.2)
    config = ClusterConfig(
        kind="slurm", workers=2, min_workers=1, memory=ByteSize(1 << 30),
        slurm=SlurmConfig("main", interface="lo", logs=f"{tmp_path}/logs"),
    )  # fmt: skip
    with open_runner(config, lambda _: None) as runner:
        assert len(farm.jobs()) == 1
        commits = runner.map("toy", NapTask(Script(tmp_path)), split_rows(100, 1), ignore_report)
        n_processes = len(pids(list(commits)))
        assert n_processes == 2
        script = Script(tmp_path / "long")
        commits = runner.map("toy", NapTask(script, 10), split_rows(1, 1), ignore_report)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(list, commits)
            deadline = time.monotonic() + 9
            while len(farm.jobs()) > 1:
                assert time.monotonic() < deadline, "no worker was given back"
                time.sleep(0.1)
            assert len(done.result(60)) == 1
        assert script.attempts() == {0: 1}  # the worker that was busy is the one that stayed
    assert wait_until_empty(farm)


def test_a_worker_lost_in_training_is_replaced(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", farm.environment["SLURM_CONF"])
    monkeypatch.setattr(crew, "REFILL_SECONDS", 0.2)
    monkeypatch.setattr(slurm, "ASK_SECONDS", 0.2)
    config = ClusterConfig(
        kind="slurm", workers=1, memory=ByteSize(1 << 30),
        gpu=GpuConfig(ByteSize(1 << 30), 1, "gpu"),
        slurm=SlurmConfig("main", interface="lo", logs=f"{tmp_path}/logs"),
    )  # fmt: skip
    script = Script(tmp_path)
    with (
        open_runner(config, lambda _: None) as runner,
        ThreadPoolExecutor(1) as pool,
    ):
        assert [job.name for job in farm.jobs()] == ["lakemap"]  # none for training yet
        parts = split_rows(1, 1)
        commits = runner.map("train", HangingTask(script), parts, ignore_report, whole_machine=True)
        done = pool.submit(list, commits)
        wait_for((tmp_path / "pid").exists)
        victims = running(farm, "lakemap-gpu")
        farm.call("scancel", *victims)
        assert [commit.record.metrics["attempt"] for commit in done.result(60)] == [2]
        wait_for(lambda: [job.name for job in farm.jobs()] == ["lakemap"])  # and none any more
    assert len(victims) == 1
    assert wait_until_empty(farm)


def test_a_run_that_is_stopped_leaves_no_job(
    farm: Farm, start: Callable[..., tuple[Driver, Path]]
) -> None:
    driver, _ = start({**WORKERS, "slurm": {**PLACE, "directives": ["--begin=now+3600"]}})
    driver.wait_for(lambda: len(farm.jobs()) == 2)  # which wait; nobody comes
    driver.process.send_signal(signal.SIGTERM)
    assert driver.end() == 130, driver.said
    assert driver.said.splitlines()[-1].endswith("the same command goes on from here")
    assert wait_until_empty(farm)


def test_where_no_worker_comes_one_line_says_where_to_look(
    farm: Farm, start: Callable[..., tuple[Driver, Path]]
) -> None:
    place = {**PLACE, "directives": ["--begin=now+3600"]}
    driver, _ = start({**WORKERS, "slurm": place, "wait_seconds": 2})
    assert driver.end() == 4
    last = driver.said.splitlines()[-1]
    assert last.startswith("lakemap: no worker came in 2 s; squeue --me shows the jobs, their logs")
    assert wait_until_empty(farm)


def test_what_slurm_refuses_is_told(farm: Farm, start: Callable[..., tuple[Driver, Path]]) -> None:
    driver, _ = start({**WORKERS, "slurm": {**PLACE, "queue": "nowhere"}})
    assert driver.end() == 4
    last = driver.said.splitlines()[-1]
    assert "invalid partition specified: nowhere" in last.lower()
    assert last.endswith("check cluster.slurm")
    assert "Traceback" not in driver.said
    assert "waiting for a worker" not in driver.said


def test_the_batch_script_runs_a_driver_that_submits_workers(
    farm: Farm, lake: Lake, folder: Path
) -> None:
    place = folder / "batch"
    place.mkdir()
    job = _write(place, lake, place / "maps", {**WORKERS, "slurm": PLACE})
    script = Path(__file__).parents[2] / "deploy/slurm/lakemap.sbatch"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**farm.environment, "PATH": path, "PYTHONPATH": str(Path.cwd())}
    command = ["sbatch", "--parsable", "--partition=gpu", f"--chdir={place}", str(script), str(job)]
    number = subprocess.check_output(command, env=environment, text=True).strip()
    wait_for(lambda: number not in {job.number for job in farm.jobs()})
    said = (place / f"lakemap-driver-{number}.log").read_text()
    assert "ExitCode=0:0" in farm.call("scontrol", "show", "job", number), said
    assert (place / "maps/CURRENT").exists()
    assert "2,000 rows mapped" in said
    assert wait_until_empty(farm)

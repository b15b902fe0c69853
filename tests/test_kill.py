"""A run whose driver or workers are killed: nothing done is done again, and the bytes are the same.

The scene is one lake and one job; each test runs the job in a fresh output folder of the same
name, because the name is part of what a run is made of.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.data import ENVIRONMENT, LABELLED, make_blobs, results, tree, write_job, write_parquet

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 120.0


class Scene(NamedTuple):
    """The job file, its output folder, and what an undisturbed run leaves there."""

    job: Path
    output: Path
    expected: dict[str, str]


DRIVERS: list["Driver"] = []


class Driver:
    """The command line in a session of its own, with two workers."""

    def __init__(self, job: Path) -> None:
        self._log = job.parent / "stderr"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jobs.cli", "run", str(job)],
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                env=ENVIRONMENT,
            )
        DRIVERS.append(self)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def family(self) -> dict[int, str]:
        """Command lines of all living processes of the session, by number."""
        return {pid: line for pid, (session, line) in processes() if session == self.process.pid}

    def workers(self) -> list[int]:
        """The worker processes."""
        return [pid for pid, line in self.family().items() if "spawn_main" in line]

    def wait_for(self, output: Path, pattern: str, n_files: int = 1) -> None:
        """Return as soon as the output folder has that many files of the pattern."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(list(output.glob(pattern))) < n_files:
            assert self.process.poll() is None, f"ended before {pattern}: {self.said}"
            assert time.monotonic() < deadline, f"no {n_files} of {pattern}: {self.said}"
            time.sleep(0.002)

    def end(self) -> int:
        """The exit code, once the process and its whole session are gone."""
        code = self.process.wait(PATIENCE_SECONDS)
        deadline = time.monotonic() + 30
        while self.family():
            assert time.monotonic() < deadline, f"left behind: {self.family()}"
            time.sleep(0.05)
        return code


def processes() -> Iterator[tuple[int, tuple[int, str]]]:
    """Session and command line of every living process."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            line = (place / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has just ended
            continue
        if fields[0] != "Z":
            yield int(place.name), (int(fields[3]), line)


@pytest.fixture(scope="module", autouse=True)
def _no_survivors() -> Iterator[None]:
    yield
    for driver in DRIVERS:
        if driver.process.poll() is None:
            os.killpg(driver.process.pid, signal.SIGKILL)
            driver.process.wait()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("kill")
    lake = write_parquet(folder / "lake", *make_blobs(2000), n_files=10, n_bad=10, held_out_every=8)
    output = folder / "maps"
    job = write_job(
        folder / "job.yaml",
        lake.path,
        output,
        input=LABELLED,
        edges={"samples": None},
        train={"steps": 200, "batch": 128},
        cluster={"kind": "local", "workers": 2},
    )
    driver = Driver(job)
    assert driver.end() == 0, driver.said
    return Scene(job, output, results(output))


@pytest.fixture
def scene(undisturbed: Scene) -> Scene:
    """The scene with no output there."""
    if undisturbed.output.exists():
        undisturbed.output.rename(undisturbed.output.with_name(f"maps-{time.monotonic_ns()}"))
    return undisturbed


def commits(output: Path) -> dict[str, tuple[int, int]]:
    found = tree(output / "stores")
    return {name: entry for name, entry in found.items() if "/commits/" in name}


# A file that appears at the moment to strike, and how many of them.
MOMENTS = [
    ("stores/ingest/*/commits/*", 3),
    ("stores/search/*/commits/*", 1),
    ("stores/train/*/plan.json", 1),
    ("stores/embed/*/commits/*", 4),
]


def test_a_driver_killed_again_and_again_loses_nothing_committed(scene: Scene) -> None:
    kept: dict[str, tuple[int, int]] = {}
    for pattern, n_files in MOMENTS:
        driver = Driver(scene.job)
        driver.wait_for(scene.output, pattern, n_files)
        driver.process.kill()
        assert driver.end() == -signal.SIGKILL  # and no worker stays behind
        now = commits(scene.output)
        assert now.items() >= kept.items()
        assert len(now) > len(kept)
        kept = now
    driver = Driver(scene.job)
    assert driver.end() == 0, driver.said
    assert commits(scene.output).items() >= kept.items()
    assert results(scene.output) == scene.expected


def test_a_run_that_is_stopped_and_loses_its_workers(scene: Scene) -> None:
    for number, pattern in (
        (signal.SIGINT, "stores/ingest/*/commits/*"),
        (signal.SIGTERM, "stores/search/*/commits/*"),
    ):
        driver = Driver(scene.job)
        driver.wait_for(scene.output, pattern)
        if number == signal.SIGINT:
            os.killpg(driver.process.pid, number)  # as a terminal does
        else:
            driver.process.send_signal(number)  # as a scheduler does
        assert driver.end() == 130, driver.said
        assert "Traceback" not in driver.said
        last = driver.said.splitlines()[-1]
        assert last.endswith("the same command goes on from here")
    kept = commits(scene.output)

    driver = Driver(scene.job)
    driver.wait_for(scene.output, "stores/train/*/plan.json")
    victims = driver.workers()
    assert len(victims) == 2
    for victim in victims:  # one of them trains
        os.kill(victim, signal.SIGKILL)
    assert driver.end() == 0, driver.said
    assert "ingest: done before, nothing to do" in driver.said
    assert commits(scene.output).items() >= kept.items()
    assert results(scene.output) == scene.expected

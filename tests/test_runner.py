"""The contract of a runner, kept by the serial one and by the one on two worker processes."""

import pickle
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from jobs import flights
from jobs.cluster import open_runner
from jobs.flights import TASKS_PER_WORKER
from pipeline.cluster_config import ClusterConfig
from pipeline.errors import GateError, InputError, StageError, StoreError
from pipeline.manifest import Commit, Effort
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report, Runner, SerialRunner, Write, failed
from pipeline.stage import run_stage
from pipeline.stores import Folder
from tests.conftest import RETRIES
from tests.faults import (
    DOUBLE,
    ERRORS,
    HANG,
    OK,
    RAISE,
    TOY,
    Notes,
    Script,
    ScriptedTask,
    ignore_report,
    make_commit,
    make_job,
)

PARTS = split_rows(30, 3)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def run_all(runner: Runner, script: Script, parts: Iterable[Partition] = PARTS) -> dict[int, int]:
    """The attempt that succeeded, by partition; each is yielded once."""
    commits = list(runner.map("toy", ScriptedTask(script), parts, ignore_report))
    found = {c.record.partition.index: c.record.metrics["attempt"] for c in commits}
    assert len(found) == len(commits)
    return found


def test_every_partition_is_done_once(runner: Runner, script: Script) -> None:
    assert run_all(runner, script) == dict.fromkeys(range(10), 1)
    assert script.attempts() == dict.fromkeys(range(10), 1)


def test_commits_come_back_whole(runner: Runner, script: Script) -> None:
    commits = list(runner.map("toy", ScriptedTask(script), PARTS[:3], ignore_report))
    assert sorted((c.record.partition for c in commits), key=lambda p: p.index) == PARTS[:3]


def test_nothing_to_do_is_nothing_done(runner: Runner, script: Script) -> None:
    assert run_all(runner, script, []) == {}


def test_failures_are_tried_again_and_counted(runner: Runner, script: Script) -> None:
    script.write({1: [RAISE], 4: [RAISE, RAISE, OK], 9: ["store", RAISE]})
    expected = dict.fromkeys(range(10), 1) | {1: 2, 4: 3, 9: 3}
    assert run_all(runner, script) == expected
    assert script.attempts() == expected


def test_the_last_attempt_names_stage_partition_and_cause(runner: Runner, script: Script) -> None:
    script.write({4: [RAISE] * 9})
    line = "toy: partition 4 (rows 12..15) failed 3 times: ValueError: scripted"
    with pytest.raises(StageError, match=f"^{re.escape(line)}$") as caught:
        run_all(runner, script)
    assert isinstance(caught.value.__cause__, ValueError)
    assert script.attempts()[4] == RETRIES + 1


def test_our_own_errors_keep_their_kind(runner: Runner, script: Script) -> None:
    script.write({4: ["store"] * 9})
    line = f"toy: partition 4 (rows 12..15): {ERRORS['store']}"
    with pytest.raises(StoreError, match=f"^{re.escape(line)}$"):
        run_all(runner, script)
    assert script.attempts()[4] == RETRIES + 1


@pytest.mark.parametrize("word", ["config", "input", "gate"])
def test_what_no_retry_can_help_is_not_retried(runner: Runner, script: Script, word: str) -> None:
    script.write({4: [word]})
    error = ERRORS[word]
    with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
        run_all(runner, script)
    assert script.attempts()[4] == 1


def test_a_runner_can_be_used_after_a_failure(runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="row 7 is wrong"):
        run_all(runner, Script(tmp_path / "first").write({0: ["input"]}))
    assert run_all(runner, Script(tmp_path / "second")) == dict.fromkeys(range(10), 1)


def test_only_a_window_of_tasks_is_on_its_way(runner: Runner, script: Script) -> None:
    taken: list[int] = []

    def lazily() -> Iterator[Partition]:
        for part in split_rows(40, 1):
            taken.append(part.index)
            yield part

    window = 1 if isinstance(runner, SerialRunner) else TASKS_PER_WORKER * runner.n_workers
    ahead = [
        len(taken) - n_done
        for n_done, _ in enumerate(
            runner.map("toy", ScriptedTask(script), lazily(), ignore_report), start=1
        )
    ]
    assert max(ahead) <= window
    assert ahead[0] == (0 if isinstance(runner, SerialRunner) else window)
    assert sorted(taken) == list(range(40))


def test_a_retry_takes_no_further_place(runner: Runner, script: Script) -> None:
    script.write({index: [RAISE] for index in range(0, 40, 2)})
    taken: list[int] = []

    def lazily() -> Iterator[Partition]:
        for part in split_rows(40, 1):
            taken.append(part.index)
            yield part

    done = 0
    for _ in runner.map("toy", ScriptedTask(script), lazily(), ignore_report):
        done += 1
        assert len(taken) - done <= TASKS_PER_WORKER * runner.n_workers
    assert done == 40


def test_who_stops_listening_stops_the_work(runner: Runner, tmp_path: Path) -> None:
    script = Script(tmp_path / "first")
    commits = runner.map("toy", ScriptedTask(script), split_rows(200, 1), ignore_report)
    assert len(list(islice(commits, 3))) == 3
    commits.close()  # type: ignore[attr-defined]  # every runner's map is a generator
    assert len(run_all(runner, Script(tmp_path / "second"))) == 10
    assert sum(script.attempts().values()) <= 3 + TASKS_PER_WORKER * runner.n_workers


def test_a_straggler_is_started_once_more_elsewhere(
    dask_runner: Runner, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "LATE_SECONDS", 1.0)
    script.write({4: [HANG]})
    commits = list(dask_runner.map("toy", ScriptedTask(script), PARTS, ignore_report))
    attempts = {c.record.partition.index: c.record.metrics["attempt"] for c in commits}
    assert len(commits) == len(PARTS)
    assert attempts == {part.index: 2 if part.index == 4 else 1 for part in PARTS}
    assert script.attempts() == attempts  # and only once more


def test_tasks_as_slow_as_all_others_are_not_late(
    dask_runner: Runner, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "LATE_SECONDS", 0.0)
    list(dask_runner.map("toy", SlowTask(script), PARTS, ignore_report))
    assert script.attempts() == {part.index: 1 for part in PARTS}


def test_progress_arrives(runner: Runner, script: Script) -> None:
    heard: list[tuple[float, str]] = []
    list(runner.map("toy", ScriptedTask(script), PARTS, lambda *said: heard.append(said)))
    assert sorted(heard) == [(0.5, f"partition {index}") for index in range(10)]


def test_a_task_of_the_whole_machine_is_done_too(runner: Runner, script: Script) -> None:
    commits = runner.map("toy", ScriptedTask(script), PARTS[:1], ignore_report, whole_machine=True)
    assert [commit.record.partition for commit in commits] == PARTS[:1]


def test_a_runner_says_what_it_offers(runner: Runner) -> None:
    assert runner.n_workers == (1 if isinstance(runner, SerialRunner) else 2)
    assert runner.train_bytes >= runner.task_bytes > 100 << 20


@dataclass(frozen=True)
class QuickTask(ScriptedTask):
    """Says that it took a millisecond."""

    def __call__(self, part: Partition, report: Report) -> Write:
        write = super().__call__(part, report)
        return lambda: replace(write(), effort=Effort(0.001, 1 << 20))


def test_quick_partitions_travel_together_and_fail_alone(
    dask_runner: Runner, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "REMEMBERED", 4)
    monkeypatch.setattr(flights, "MOST_TOGETHER", 7)
    sent: list[int] = []
    send = flights.Flights.send

    def count(self: flights.Flights, parts: flights.Parts, *rest: Any) -> None:
        sent.append(len(parts))
        send(self, parts, *rest)

    monkeypatch.setattr(flights.Flights, "send", count)
    script.write({50: [RAISE] * (RETRIES + 1)})
    parts = split_rows(100, 1)
    commits = list(dask_runner.map("toy", QuickTask(script), parts, ignore_report))
    assert sorted(c.record.partition.index for c in commits) == list(range(100))
    assert max(sent) == 7
    assert script.attempts()[50] == RETRIES + 2  # together with others, then alone


@dataclass(frozen=True)
class SlowTask:
    """A task that takes its time and says so in its commit."""

    script: Script

    def __call__(self, part: Partition, _: Report) -> Write:
        self.script.act(part.index)
        time.sleep(0.4)
        return lambda: replace(make_commit(part), effort=Effort(1.0, 0))


@dataclass(frozen=True)
class SlowWriter:
    """The first partition is only written once the second has been computed."""

    script: Script

    def __call__(self, part: Partition, _: Report) -> Write:
        self.script.act(part.index)

        def write() -> Commit:
            deadline = time.monotonic() + 20
            while part.index == 0 and 1 not in self.script.attempts():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return make_commit(part)

        return write


def test_a_worker_computes_while_another_partition_is_written(
    script: Script,
) -> None:
    with open_runner(ClusterConfig(workers=1), lambda _: None) as runner:
        commits = list(runner.map("toy", SlowWriter(script), split_rows(2, 1), ignore_report))
    assert len(commits) == 2


def read_all(root: Path) -> dict[str, bytes]:
    """Every object of every store but what differs from run to run: timings and commits."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted((root / "stores").rglob("*"))
        if path.is_file() and path.name != "timing.json" and path.parent.name != "commits"
    }


def run_both_stages(runner: Runner, root: Path) -> dict[str, bytes]:
    job, place = make_job(root, n_rows=30, seed=3), Folder(str(root))
    toy = run_stage(TOY, {}, place, job, runner, Notes())
    run_stage(DOUBLE, {"toy": toy}, place, job, runner, Notes())
    return read_all(root)


def test_every_runner_writes_the_same_bytes(
    runner: Runner, serial_runner: Runner, tmp_path: Path
) -> None:
    Script(tmp_path / "one/scripts/toy").write({2: [RAISE], 5: [RAISE, RAISE]})
    found = run_both_stages(runner, tmp_path / "one")
    assert found == run_both_stages(serial_runner, tmp_path / "two")
    assert len([name for name in found if name.endswith("manifest.json")]) == 2


@pytest.mark.parametrize("error", ERRORS.values(), ids=list(ERRORS))
def test_errors_survive_pickling(error: Exception) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found)) == (type(error), str(error))


def test_the_final_error_keeps_the_exit_code() -> None:
    part = Partition(2, 5, 9)
    error = failed("train", part, 3, GateError("too low"))
    assert (type(error), error.exit_code) == (GateError, 3)
    assert str(error) == "train: partition 2 (rows 5..9): too low"
    other = failed("train", part, 3, OSError())
    assert str(other) == "train: partition 2 (rows 5..9) failed 3 times: OSError: "

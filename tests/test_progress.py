import io
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jobs import progress
from jobs.progress import BarObserver, LogObserver, make_observer, summary
from pipeline.manifest import Manifest, Timing
from pipeline.partitions import Partition
from pipeline.runner import SerialRunner
from pipeline.stage import Observer, run_stage
from pipeline.stores import Folder
from tests.faults import TOY, make_commit, make_job

TIMING = Timing(wall_seconds=2.0, task_seconds=3.0, peak_bytes=700 << 20)
MANIFEST = Manifest(
    stage="toy",
    version=1,
    fingerprint="0a1b",
    inputs={},
    settings={},
    facts={},
    metrics={"recall": 0.98765, "accuracy": None, "mass": 1.0},
    n_rows=123_456,
    records=[],
)
SUMMARY = "toy: 123,456 rows in 2.0 s (61,728 rows/s, peak 700 MiB, recall 0.9877)"
COMMIT = make_commit(Partition(0, 0, 1000))


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_finished_stage_in_one_line() -> None:
    assert summary("toy", MANIFEST, TIMING, skipped=False) == SUMMARY
    assert summary("toy", MANIFEST, TIMING, skipped=True) == "toy: done before, nothing to do"
    at_once = replace(TIMING, wall_seconds=0.0)
    assert "rows in 0.0 s" in summary("toy", MANIFEST, at_once, skipped=False)


def test_a_log_has_a_line_at_start_and_end(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    caplog.set_level(logging.INFO, "lakemap")
    with LogObserver() as observer:
        observer.stage_started("toy", 5, 0, 123_456)
        observer.part_done("toy", COMMIT)
        observer.task_progress("toy", 0.5, "step 10")
        observer.stage_finished("toy", MANIFEST, TIMING, skipped=False)
        observer.stage_started("other", 5, 3, 10)
    assert caplog.messages == [
        "toy: 5 partitions, 123,456 rows",
        SUMMARY,
        "other: 5 partitions, 10 rows, 3 already committed",
    ]


def test_a_log_has_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    caplog.set_level(logging.INFO, "lakemap")
    observer = LogObserver()
    observer.stage_started("toy", 50, 20, 10)
    for _ in range(25):
        clock.seconds += 1
        observer.part_done("toy", COMMIT)
    clock.seconds += 10
    observer.task_progress("toy", 0.567, "step 10, loss 0.3")
    observer.task_progress("toy", 0.568, "step 11, loss 0.3")
    assert caplog.messages[1:] == [
        "toy: 30 of 50 partitions",
        "toy: 40 of 50 partitions",
        "toy: 57%, step 10, loss 0.3",
    ]


def test_bars_show_partitions_and_speed(terminal: Console, clock: Clock) -> None:
    with BarObserver(terminal) as observer:
        observer.stage_started("toy", 5, 2, 5000)
        clock.seconds += 2
        observer.part_done("toy", COMMIT)
        observer._progress.refresh()
        text = shown(terminal)
        assert "toy" in text
        assert "3/5" in text
        assert "500 rows/s" in text
        observer.task_progress("toy", 0.25, "step 10, loss 0.3")
        observer._progress.refresh()
        assert "25/100" in shown(terminal)
        assert "step 10, loss 0.3" in shown(terminal)
        observer.stage_finished("toy", MANIFEST, TIMING, skipped=False)
    assert f"  {SUMMARY}\n" in shown(terminal)


def test_a_new_stage_has_a_new_bar(terminal: Console, clock: Clock) -> None:
    with BarObserver(terminal) as observer:
        observer.stage_started("train", 1, 0, 5000)
        observer.task_progress("train", 0.75, "loss 0.3")
        observer.stage_finished("train", MANIFEST, TIMING, skipped=False)
        observer.stage_started("embed", 7, 0, 5000)
        (task,) = observer._progress.tasks
        assert (task.description, task.completed, task.total) == ("embed", 0, 7)
        assert (task.visible, task.fields["note"]) == (True, "")


def test_bars_are_gone_after_an_error(terminal: Console) -> None:
    def fail() -> None:
        with BarObserver(terminal) as observer:
            observer.stage_started("toy", 5, 2, 5000)
            raise ValueError("from inside")

    with pytest.raises(ValueError, match="from inside"):
        fail()
    assert shown(terminal).endswith("\x1b[2K")  # the line is erased
    assert "\x1b[?25h" in shown(terminal)  # the cursor is back


def test_bars_where_someone_watches_lines_where_not(terminal: Console) -> None:
    assert isinstance(make_observer(terminal), BarObserver)
    assert isinstance(make_observer(Console(file=io.StringIO())), LogObserver)


def test_both_follow_a_real_stage(
    tmp_path: Path, terminal: Console, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lakemap")
    observers: list[Observer] = [LogObserver(), BarObserver(terminal)]
    for number, observer in enumerate(observers):
        root = tmp_path / str(number)
        run_stage(TOY, {}, Folder(str(root)), make_job(root), SerialRunner(1 << 30), observer)
    assert caplog.messages[0] == "toy: 5 partitions, 20 rows"
    assert caplog.messages[1].startswith("toy: 20 rows in ")
    assert "  toy: 20 rows in " in shown(terminal)

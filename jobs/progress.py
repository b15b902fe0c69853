"""How a run shows itself: bars on a terminal, log lines elsewhere."""

import logging
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from pipeline.manifest import Commit, Manifest, Timing

log = logging.getLogger("lakemap")

SECONDS_BETWEEN_LINES = 10.0


class LogObserver:
    """One line when a stage starts and ends, and every ten seconds in between."""

    def __init__(self) -> None:
        self._done = 0
        self._n_parts = 0
        self._said = 0.0

    def stage_started(self, name: str, n_parts: int, n_done: int, n_rows: int) -> None:
        """Say how much there is to do."""
        self._done, self._n_parts, self._said = n_done, n_parts, time.monotonic()
        resumed = f", {n_done} already committed" if n_done else ""
        log.info("%s: %d partitions, %s rows%s", name, n_parts, f"{n_rows:,}", resumed)

    def part_done(self, name: str, commit: Commit) -> None:  # noqa: ARG002 - the protocol's
        """Count, and say so from time to time."""
        self._done += 1
        self._say(f"{name}: {self._done} of {self._n_parts} partitions")

    def task_progress(self, name: str, share: float, note: str) -> None:
        """Say what the task says, from time to time."""
        self._say(f"{name}: {share:.0%}, {note}")

    def stage_finished(self, name: str, manifest: Manifest, timing: Timing, skipped: bool) -> None:
        """Say what the stage did."""
        log.info("%s", summary(name, manifest, timing, skipped))

    def _say(self, text: str) -> None:
        if time.monotonic() - self._said >= SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            log.info("%s", text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class BarObserver:
    """One progress bar per stage, with rows per second and time left."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<11}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._console = console
        self._task = self._progress.add_task("", visible=False, note="")
        self._rows = 0
        self._started = 0.0

    def stage_started(self, name: str, n_parts: int, n_done: int, n_rows: int) -> None:
        """Show a new bar."""
        del n_rows
        self._rows, self._started = 0, time.monotonic()
        self._progress.reset(
            self._task, total=n_parts, completed=n_done, description=name, visible=True, note=""
        )

    def part_done(self, name: str, commit: Commit) -> None:  # noqa: ARG002 - the protocol's
        """Move the bar on."""
        self._rows += commit.record.n_rows
        speed = self._rows / max(time.monotonic() - self._started, 1e-9)
        self._progress.update(self._task, advance=1, note=f"{speed:,.0f} rows/s")

    def task_progress(self, name: str, share: float, note: str) -> None:  # noqa: ARG002
        """Move the bar of a long task; its parts are per cent."""
        self._progress.update(self._task, total=100, completed=int(100 * share), note=note)

    def stage_finished(self, name: str, manifest: Manifest, timing: Timing, skipped: bool) -> None:
        """Leave a line where the bar was."""
        self._progress.update(self._task, visible=False)
        self._console.print(f"  {summary(name, manifest, timing, skipped)}", highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


def summary(name: str, manifest: Manifest, timing: Timing, skipped: bool) -> str:
    """One line on a finished stage."""
    if skipped:
        return f"{name}: done before, nothing to do"
    speed = manifest.n_rows / max(timing.wall_seconds, 1e-9)
    figures = {
        key: value
        for key, value in manifest.metrics.items()
        if key in ("recall", "accuracy", "trustworthiness", "n_bad", "loss") and value is not None
    }
    measured = "".join(f", {key} {value:.4g}" for key, value in figures.items())
    return (
        f"{name}: {manifest.n_rows:,} rows in {timing.wall_seconds:.1f} s "
        f"({speed:,.0f} rows/s, peak {timing.peak_bytes / (1 << 20):,.0f} MiB{measured})"
    )


def make_observer(console: Console) -> LogObserver | BarObserver:
    """Bars where someone watches, lines where not."""
    return BarObserver(console) if console.is_terminal else LogObserver()

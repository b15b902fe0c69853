"""How a run shows itself: bars on a terminal, log lines elsewhere."""

import logging
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from jobs.logs import fields
from pipeline.manifest import Commit, Manifest, Timing

log = logging.getLogger("lakemap")

SECONDS_BETWEEN_LINES = 10.0


class LogObserver:
    """One line when a stage starts and ends, and every ten seconds in between."""

    def __init__(self) -> None:
        self._done = 0
        self._n_parts = 0
        self._rows = 0
        self._started = 0.0
        self._said = 0.0

    def stage_started(self, name: str, n_parts: int, n_done: int, n_rows: int) -> None:
        """Say how much there is to do."""
        self._done, self._n_parts, self._rows = n_done, n_parts, 0
        self._started = self._said = time.monotonic()
        resumed = f", {n_done} already committed" if n_done else ""
        event = fields(
            "stage_started", stage=name, partitions=n_parts, partitions_done=n_done, rows=n_rows
        )
        log.info("%s: %d partitions, %s rows%s", name, n_parts, f"{n_rows:,}", resumed, extra=event)

    def part_done(self, name: str, commit: Commit) -> None:
        """Count, and say so from time to time."""
        self._done += 1
        self._rows += commit.record.n_rows
        self._say(
            name,
            f"{self._done} of {self._n_parts} partitions",
            partitions=self._n_parts,
            partitions_done=self._done,
            rows=self._rows,
        )

    def task_progress(self, name: str, share: float, note: str) -> None:
        """Say what the task says, from time to time."""
        self._say(name, f"{share:.0%}, {note}", share=share, note=note)

    def stage_finished(self, name: str, manifest: Manifest, timing: Timing, skipped: bool) -> None:
        """Say what the stage did."""
        event = fields(
            "stage_skipped" if skipped else "stage_finished",
            stage=name,
            partitions=len(manifest.records),
            rows=manifest.n_rows,
            seconds=timing.wall_seconds,
            task_seconds=timing.task_seconds,
            peak_bytes=timing.peak_bytes,
            **_figures(manifest),
        )
        log.info("%s", summary(name, manifest, timing, skipped), extra=event)

    def _say(self, name: str, text: str, **values: Any) -> None:
        now = time.monotonic()
        if now - self._said >= SECONDS_BETWEEN_LINES:
            self._said = now
            event = fields("stage_progress", stage=name, seconds=now - self._started, **values)
            log.info("%s: %s", name, text, extra=event)

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
    measured = "".join(f", {key} {value:.4g}" for key, value in _figures(manifest).items())
    return (
        f"{name}: {manifest.n_rows:,} rows in {timing.wall_seconds:.1f} s "
        f"({speed:,.0f} rows/s, peak {timing.peak_bytes / (1 << 20):,.0f} MiB{measured})"
    )


def _figures(manifest: Manifest) -> dict[str, float]:
    """What a stage measured, as far as it goes into a line."""
    shown = ("recall", "accuracy", "trustworthiness", "n_bad", "loss")
    found = manifest.metrics.items()
    return {key: value for key, value in found if key in shown and value is not None}


def make_observer(console: Console) -> LogObserver | BarObserver:
    """Bars where someone watches, lines where not."""
    return BarObserver(console) if console.is_terminal else LogObserver()

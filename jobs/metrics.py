"""Figures for operators: the text file that node exporter's textfile collector reads.

One file per job. What a command did not find out stays as an earlier one left it: a run that fails
keeps the time of the last success and the figures of the published map.
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
from prometheus_client.parser import text_string_to_metric_families

from pipeline.config import Job
from pipeline.errors import ConfigError
from pipeline.manifest import Commit, Manifest, Timing
from pipeline.stage import Observer

log = logging.getLogger("lakemap")

# Not `job`: that label is Prometheus' own, which renames ours to exported_job.
LABEL = "map"
PREFIX = "lakemap_"
COMMAND = {
    "last_success_timestamp_seconds": "When a run last ended well, published or with nothing to do",
    "last_failure_timestamp_seconds": "When a command last ended with another exit code than 0",
    "last_exit_code": "How the last command ended; 3: a gate refused",
    "last_run_seconds": "How long the last command took",
}
MAP = {
    "rows_read": "Rows of the lake",
    "rows_mapped": "Rows on the published map",
    "rows_quarantined": "Bad rows, which are not on it",
    "rows_trained": "Rows the encoder was trained on",
    "recall": "Share of the true neighbours that the graph holds",
    "accuracy": "Labels guessed right from a row's nearest rows on the map",
    "trustworthiness": "Map neighbours that are neighbours in the lake",
    "continuity": "Lake neighbours that are neighbours on the map",
    "neighbor_recall": "Share of a row's nearest rows that are also nearest on the map",
    "novel_share": "Share of new rows that lie far from all training rows",
    "occupancy_shift": "How far new rows fill the map otherwise than old ones",
    "domain_auc": "How well a classifier tells new rows from old ones; 0.5: not at all",
    "displacement_median": "How far rows have moved on the map, as a share of its diameter",
    "displacement_p95": "The same for the row that moved further than 95% of the others",
}
STAGE_SECONDS = "stage_seconds"


@dataclass
class Figures:
    """What the text file holds: figures by name, seconds by stage."""

    values: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Record:
    """What a command found out so far; an observer can be hung in."""

    seconds: dict[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Any] | None = None

    def watch(self, observer: Observer) -> "Watch":
        """The observer, with an eye on how long stages take."""
        return Watch(self.seconds, observer)

    def succeeded(self, metrics: Mapping[str, Any]) -> None:
        """The map with these figures is published, just now or since an earlier run."""
        self.metrics = metrics


@dataclass(frozen=True)
class Watch:
    """An observer that notes every stage's seconds and hands on what it is told."""

    seconds: dict[str, float]
    inner: Observer

    def stage_started(self, name: str, n_parts: int, n_done: int, n_rows: int) -> None:
        """Hand it on."""
        self.inner.stage_started(name, n_parts, n_done, n_rows)

    def part_done(self, name: str, commit: Commit) -> None:
        """Hand it on."""
        self.inner.part_done(name, commit)

    def task_progress(self, name: str, share: float, note: str) -> None:
        """Hand it on."""
        self.inner.task_progress(name, share, note)

    def stage_finished(self, name: str, manifest: Manifest, timing: Timing, skipped: bool) -> None:
        """Note the seconds, also those of an earlier run."""
        self.seconds[name] = timing.wall_seconds
        self.inner.stage_finished(name, manifest, timing, skipped)


@contextmanager
def recorded(job: Job) -> Iterator[Record]:
    """A record to fill; when the body ends, however it ends, it goes to the job's text file."""
    record = Record()
    if job.metrics.textfile is None:
        yield record
        return
    path, started, code = Path(job.metrics.textfile), time.time(), 0
    _check_place(path)
    try:
        yield record
    except BaseException as error:
        code = exit_code(error)
        raise
    finally:
        _update(path, job.name, record, code, started)


def exit_code(error: BaseException) -> int:
    """The exit code that the error leads to."""
    fallback = 130 if isinstance(error, KeyboardInterrupt) else 1
    return int(getattr(error, "exit_code", fallback))


def _check_place(path: Path) -> None:
    """Refuse, before any work, a folder in which the file cannot be written."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"metrics.textfile {path}: {path.parent} is not a folder that can be written to; "
            "make it, or name another file"
        )


def _update(path: Path, name: str, record: Record, code: int, started: float) -> None:
    """Lay the record over what the file holds; a run does not fail because of its figures."""
    try:
        figures = read_figures(path)
        _add(figures, record, code, started, time.time())
        write_figures(path, name, figures)
    except OSError as error:
        log.warning("metrics.textfile %s: cannot be written (%s)", path, error)


def _add(figures: Figures, record: Record, code: int, started: float, now: float) -> None:
    figures.seconds |= record.seconds
    figures.values |= {"last_exit_code": code, "last_run_seconds": now - started}
    if code:
        figures.values["last_failure_timestamp_seconds"] = now
    elif record.metrics is not None:  # the published map's figures, none of an earlier one
        figures.values = {key: v for key, v in figures.values.items() if key not in MAP}
        figures.values |= {key: record.metrics[key] for key in MAP if _measured(record, key)}
        figures.values["last_success_timestamp_seconds"] = now


def _measured(record: Record, key: str) -> bool:
    value = (record.metrics or {}).get(key)
    return isinstance(value, int | float) and math.isfinite(value)


def read_figures(path: Path) -> Figures:
    """What the text file holds; nothing if it is not there or not such a file."""
    found = Figures()
    try:
        families = list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return found
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.removeprefix(PREFIX)
        if name == STAGE_SECONDS and "stage" in sample.labels:
            found.seconds[sample.labels["stage"]] = sample.value
        elif name in COMMAND | MAP:
            found.values[name] = sample.value
    return found


def write_figures(path: Path, name: str, figures: Figures) -> None:
    """Replace the text file in one step, so that nobody reads half of it."""
    registry = CollectorRegistry()
    for key, meaning in (COMMAND | MAP).items():
        if key in figures.values:
            gauge = Gauge(PREFIX + key, meaning, [LABEL], registry=registry)
            gauge.labels(name).set(figures.values[key])
    meaning = "How long a stage took when it was last at work"
    gauge = Gauge(PREFIX + STAGE_SECONDS, meaning, [LABEL, "stage"], registry=registry)
    for stage, seconds in figures.seconds.items():
        gauge.labels(name, stage).set(seconds)
    write_to_textfile(str(path), registry)

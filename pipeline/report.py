"""The report of a run: one HTML page that needs no other file, no network and no script."""

import math
from base64 import b64encode
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATE = Path(__file__).parent / "stages" / "report.html"
ABSENT = "-"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True)
class StageRow:
    """What one stage did; `seconds` is summed over its tasks."""

    name: str
    n_parts: int
    n_rows: int
    seconds: float
    wall_seconds: float
    rows_per_second: float
    peak_bytes: int
    store: str


@dataclass(frozen=True)
class Metric:
    """A measured quality, with what it means in one plain line; None is not measured."""

    name: str
    value: float | None
    meaning: str
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Gate:
    """What a job demands of a metric before it publishes, and what was found."""

    name: str
    needed: float
    found: float | None
    passed: bool
    at_most: bool = False


@dataclass(frozen=True)
class RowCount:
    """Where the rows went: read = mapped + quarantined."""

    read: int
    mapped: int
    quarantined: int
    trained: int
    held_out: int


@dataclass(frozen=True)
class Score:
    """A measure of drift, with what it means; None is not measured, or no threshold."""

    name: str
    value: float | None
    warn: float | None
    retrain: float | None
    meaning: str


@dataclass(frozen=True)
class Drift:
    """How new a refresh's rows were; `curve` is SVG text of all refreshes."""

    verdict: str
    scores: tuple[Score, ...]
    curve: str


@dataclass(frozen=True)
class Report:
    """Everything the page says. `picture` is a PNG, `curves` SVG text; the rest is untrusted."""

    name: str
    run_id: str
    created: str
    picture: bytes
    stages: tuple[StageRow, ...]
    metrics: tuple[Metric, ...]
    gates: tuple[Gate, ...]
    rows: RowCount
    quarantine: tuple[tuple[str, int], ...]
    quarantine_examples: tuple[tuple[str, int, str, str], ...]
    warnings: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    job: str
    versions: tuple[tuple[str, str], ...]
    curves: str = ""  # of a run that has trained
    changes: tuple[tuple[str, int, int], ...] = ()  # of a refresh: what, files, rows
    drift: Drift | None = None
    moved: bytes | None = None  # a PNG of the map before and after a retraining
    trained_in: str = ""  # the run that measured the metrics, if it was not this one


def render_report(report: Report) -> str:
    """The page as HTML text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        # Names of files and labels come from the lake, and may hold markup.
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": format_count,
        "number": format_number,
        "bytes": format_bytes,
        "seconds": format_seconds,
    }
    return environment.get_template(TEMPLATE.name).render(
        report=report,
        picture=b64encode(report.picture).decode(),
        moved=b64encode(report.moved or b"").decode(),
        n_refused=sum(not gate.passed for gate in report.gates),
        longest=max((stage.wall_seconds for stage in report.stages), default=0) or 1,
    )


def format_count(count: float) -> str:
    """A whole number with thousands separated, for instance 1,234,567."""
    return f"{count:,.0f}"


def format_number(value: float | None) -> str:
    """A measured number in four digits or more; a dash if it is not there."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def format_bytes(n_bytes: float) -> str:
    """A size in binary units, for instance 1.2 GiB."""
    if n_bytes <= 0:
        return ABSENT
    power = min(int(math.log2(n_bytes) // 10), len(UNITS) - 1)
    return f"{n_bytes / 1024**power:.{1 if power else 0}f} {UNITS[power]}"


def format_seconds(seconds: float) -> str:
    """A duration in two units at most, for instance 2 h 05 min."""
    if seconds < 0.0005:
        return ABSENT
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"

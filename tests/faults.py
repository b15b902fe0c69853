"""Tasks that fail by script, a toy stage made of them, and ways to damage stored objects."""

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.config import InputConfig, Job, SampleConfig
from pipeline.errors import ConfigError, GateError, InputError, StoreError
from pipeline.manifest import Commit, Effort, Manifest, Part, Plan, Record, Timing
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report, Write
from pipeline.stage import Context, Estimate, Shape, Stage

OK, RAISE, DIE, HANG = "ok", "raise", "die", "hang"
HANG_SECONDS = 8.0
ERRORS: dict[str, Exception] = {
    RAISE: ValueError("scripted\nsecond line"),
    "config": ConfigError("toy: setting 7 is wrong; correct it"),
    "input": InputError("lake: row 7 is wrong; correct it"),
    "gate": GateError("recall 0.1 is below the gate 0.9"),
    "store": StoreError("store: object 7 is damaged"),
}


@dataclass(frozen=True)
class Script:
    """What happens to each partition at each attempt; attempts are counted in files."""

    folder: Path

    def write(self, outcomes: Mapping[int, Sequence[str]]) -> "Script":
        """This script, with the outcomes of partitions that are not to succeed at once."""
        for index, words in outcomes.items():
            self._table(index).parent.mkdir(parents=True, exist_ok=True)
            self._table(index).write_text(" ".join(words))
        return self

    def act(self, index: int) -> int:
        """The number of this attempt, from 1, unless the script says that it fails."""
        attempt = self._count(index)
        table = self._table(index)
        words = table.read_text().split() if table.exists() else []
        word = words[attempt - 1] if attempt <= len(words) else OK
        if word == DIE:
            os._exit(1)
        if word == HANG:
            time.sleep(HANG_SECONDS)
        elif word != OK:
            raise ERRORS[word]
        return attempt

    def attempts(self) -> dict[int, int]:
        """How often each partition was begun."""
        names = [path.name for path in self.folder.glob("*.begun")]
        return dict(sorted(Counter(int(name.split("-")[0]) for name in names).items()))

    def _table(self, index: int) -> Path:
        return self.folder / f"{index}.script"

    def _count(self, index: int) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            try:
                (self.folder / f"{index}-{attempt}.begun").touch(exist_ok=False)
            except FileExistsError:
                continue
            return attempt
        raise AssertionError("a thousand attempts")


@dataclass(frozen=True)
class ScriptedTask:
    """A runner's task that follows a script and says so half-way."""

    script: Script

    def __call__(self, part: Partition, report: Report) -> Write:
        """A commit that names the attempt."""
        attempt = self.script.act(part.index)
        report(0.5, f"partition {part.index}")
        return partial(make_commit, part, metrics={"attempt": attempt})


def make_record(part: Partition, **changes: Any) -> Record:
    """A record of the partition without any object."""
    values: dict[str, Any] = {
        "partition": part,
        "n_rows": part.n_rows,
        "key": f"data/{part.index:06d}-0123456789abcdef",
        "objects": {},
        "crcs": {},
        "sha256": "0" * 64,
        "metrics": {},
    }
    return Record(**(values | changes))


def make_commit(part: Partition, **changes: Any) -> Commit:
    """A commit of the partition without any object."""
    return Commit(make_record(part, **changes), Effort(0.25, 1 << 20), "writer")


def make_job(root: Path, n_rows: int = 20, seed: int = 0) -> Job:
    """A job whose toy stage has that many rows."""
    return Job(InputConfig(str(root)), str(root), sample=SampleConfig(n_rows, seed))


@dataclass(frozen=True)
class ToySettings:
    """What the toy stage's result depends on."""

    n_rows: int
    seed: int


def toy_script(context: Context[Any]) -> Script:
    """The script beside the stores."""
    root, _, rest = context.folder.url.partition("/stores/")
    return Script(Path(root) / "scripts" / rest.split("/")[0])


def toy_settings(job: Job) -> ToySettings:
    """The part of a job that the toy stage looks at."""
    return ToySettings(job.sample.rows, job.sample.seed)


def toy_estimate(job: Job, shape: Shape) -> Estimate:
    """Next to nothing."""
    return Estimate(-(-job.sample.rows // 4), 1 << 20, shape.row_bytes * job.sample.rows)


def toy_prepare(context: Context[ToySettings]) -> Plan:
    """Partitions of at most four rows."""
    (toy_script(context).folder / "prepared").mkdir(parents=True, exist_ok=True)
    return Plan(split_rows(context.settings.n_rows, 4), {"offset": 0.5})


def toy_part(context: Context[ToySettings], part: Partition, report: Report) -> Part:
    """Random rows, shifted by the plan's offset, as array, table and file."""
    toy_script(context).act(part.index)
    report(0.5, f"partition {part.index}")
    rng = np.random.default_rng([context.settings.seed, part.index])
    values = rng.random((part.n_rows, 3), dtype=np.float32) + context.facts["offset"]
    return Part(
        part.n_rows,
        {"values": values},
        {"ids": pa.table({"id": np.arange(part.start, part.stop)})},
        {"note.txt": f"rows {part.start}..{part.stop}".encode()},
        {"sum": float(values.sum())},
    )


def toy_finish(context: Context[ToySettings], records: list[Record]) -> dict[str, Any]:
    """The sum over all partitions."""
    return {"sum": sum(record.metrics["sum"] for record in records), **context.facts}


TOY = Stage("toy", 1, (), toy_settings, toy_estimate, toy_prepare, toy_part, toy_finish)


def double_part(context: Context[ToySettings], part: Partition, _: Report) -> Part:
    """Twice the toy stage's rows."""
    toy_script(context).act(part.index)
    values = context.read("toy").rows("values", part.start, part.stop)
    return Part(part.n_rows, {"values": 2 * values})


def double_prepare(context: Context[ToySettings]) -> Plan:
    """Partitions that do not line up with the toy stage's."""
    return Plan(split_rows(context.read("toy").n_rows, 7))


DOUBLE = Stage("double", 1, ("toy",), toy_settings, toy_estimate, double_prepare, double_part)


class Notes:
    """An observer that remembers what it was told."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int, int, int]] = []
        self.done: list[int] = []
        self.progress: list[tuple[str, float, str]] = []
        self.finished: list[tuple[str, Manifest, Timing, bool]] = []

    def stage_started(self, name: str, n_parts: int, n_done: int, n_rows: int) -> None:
        """Remember the beginning."""
        self.started.append((name, n_parts, n_done, n_rows))

    def part_done(self, name: str, commit: Commit) -> None:  # noqa: ARG002 - the protocol's
        """Remember the partition."""
        self.done.append(commit.record.partition.index)

    def task_progress(self, name: str, share: float, note: str) -> None:
        """Remember the share."""
        self.progress.append((name, share, note))

    def stage_finished(self, name: str, manifest: Manifest, timing: Timing, skipped: bool) -> None:
        """Remember the end."""
        self.finished.append((name, manifest, timing, skipped))


def ignore_report(share: float, note: str) -> None:
    """Take no notice of progress."""


def truncate(path: Path) -> None:
    """Take away the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    """Take away every byte."""
    path.write_bytes(b"")


def flip_bit(path: Path) -> None:
    """Turn one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def remove(path: Path) -> None:
    """Take the object away."""
    path.unlink()


DAMAGES: tuple[Callable[[Path], None], ...] = (truncate, empty, flip_bit, remove)

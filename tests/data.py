"""Seeded rows with known neighbours, small lakes of them, and the whole flow run on one."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zarr
from numpy.typing import NDArray

from jobs import cli, flow
from pipeline import training
from pipeline.config import Job
from pipeline.job_file import build_job
from pipeline.lake import take_snapshot
from pipeline.manifest import Commit, Manifest, Store, Timing, find_store, open_store
from pipeline.runner import SerialRunner
from pipeline.stage import Stage, StoreRef, locate, run_stage
from pipeline.stages import cells, edges, evaluate, neighbors, sample
from pipeline.stages.ingest import lake_source
from pipeline.stores import Folder

WIDTH = 64  # at the smallest input.partition_bytes 256 rows are a partition
N_BLOBS = 5
FIRST_ID = 10_000

# Small enough for a run in two seconds, and every kind of partition comes several times.
SETTINGS: dict[str, Any] = {
    "input": {"vector": "embedding", "id": "item", "partition_bytes": 1 << 16},
    "sample": {"rows": 500},
    "neighbors": {"k": 15, "recall_queries": 100},
    "affinity": {"perplexity": 5},
    "edges": {"samples": 3000},
    "train": {"steps": 30, "batch": 64, "encoder": {"hidden": 32, "layers": 1}},
    "evaluate": {"rows": 120, "reference_rows": 300, "k": 5, "trustworthiness_k": 6},
    "gates": {"recall": 0.9, "trustworthiness": 0.6},
    "cluster": {"kind": "serial"},
}


class Blobs(NamedTuple):
    """Rows around a few centres: a row's nearest rows are all of its own blob."""

    vectors: NDArray[np.float32]  # (n, width)
    labels: NDArray[np.int64]  # (n,), the blob


def make_blobs(n_rows: int, width: int = WIDTH, seed: int = 0, n_blobs: int = N_BLOBS) -> Blobs:
    """Blobs of standard deviation 1, their centres many times that apart."""
    rng = np.random.default_rng([seed, n_rows, width])
    centres = rng.normal(scale=10, size=(n_blobs, width))
    labels = rng.integers(n_blobs, size=n_rows)
    return Blobs((centres[labels] + rng.normal(size=(n_rows, width))).astype(np.float32), labels)


class Bad(NamedTuple):
    """A vector that cannot be mapped, and what the quarantine must say of it."""

    vector: list[float] | None
    reason: str


BAD_VECTORS = (
    Bad(None, "null vector"),
    Bad([np.nan] + [0.0] * (WIDTH - 1), "not finite: nan at position 0"),
    Bad([0.0] * (WIDTH - 1) + [np.inf], f"not finite: inf at position {WIDTH - 1}"),
    Bad([1.0] * (WIDTH - 1), f"width {WIDTH - 1}, expected {WIDTH}"),
    Bad([1.0] * (WIDTH + 1), f"width {WIDTH + 1}, expected {WIDTH}"),
)


@dataclass(frozen=True)
class Lake:
    """What was written to the lake at `path`, row by row; bad rows by number, with the reason."""

    path: Path
    vectors: NDArray[Any]
    labels: NDArray[np.int64]
    held_out: NDArray[np.bool_]
    bad: Mapping[int, str]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The item number of every row."""
        return np.arange(len(self.vectors)) + FIRST_ID

    @property
    def good(self) -> NDArray[np.int64]:
        """Numbers of the rows that can be mapped."""
        return np.setdiff1d(np.arange(len(self.vectors)), list(self.bad))


def write_parquet(
    path: Path,
    vectors: NDArray[Any],
    labels: NDArray[Any] | None = None,
    n_files: int = 4,
    n_bad: int = 0,
    held_out_every: int = 0,
) -> Lake:
    """A lake of Parquet files; one row in held_out_every is held out, n_bad rows are spread."""
    n_rows = len(vectors)
    labels = np.zeros(n_rows, np.int64) if labels is None else labels
    rows = np.arange(n_rows)
    held_out = (rows % held_out_every == 0) if held_out_every else np.zeros(n_rows, bool)
    places = (np.arange(n_bad) * 2 + 1) * n_rows // max(1, 2 * n_bad)
    kinds = {int(row): BAD_VECTORS[i % len(BAD_VECTORS)] for i, row in enumerate(places)}
    lists = [kinds[row].vector if row in kinds else vectors[row].tolist() for row in range(n_rows)]
    kind = pa.from_numpy_dtype(vectors.dtype)
    lake = Lake(path, vectors, labels, held_out, {row: bad.reason for row, bad in kinds.items()})
    table = pa.table(
        {
            "item": lake.ids,
            "embedding": pa.array(lists, pa.list_(kind)),
            "blob": labels,
            "test": held_out,
        }
    )
    path.mkdir(parents=True)
    for index, (start, stop) in enumerate(pairwise(cut(n_rows, n_files))):
        pq.write_table(table.slice(start, stop - start), path / f"part-{index}.parquet")
    return lake


def cut(n_rows: int, n_parts: int) -> list[int]:
    """Bounds of n_parts nearly equal parts."""
    return [n_rows * part // n_parts for part in range(n_parts + 1)]


def write_zarr(path: Path, blobs: Blobs, version: Literal[2, 3]) -> Lake:
    """A Zarr group with the arrays `embedding`, `item` and `blob`."""
    n_rows = len(blobs.vectors)
    lake = Lake(path, blobs.vectors, blobs.labels, np.zeros(n_rows, bool), {})
    group = zarr.open_group(path, mode="w", zarr_format=version)
    arrays: dict[str, NDArray[Any]] = {
        "embedding": blobs.vectors,
        "item": lake.ids,
        "blob": blobs.labels,
    }
    for name, values in arrays.items():
        group.create_array(name, data=values, chunks=(100, *values.shape[1:]))
    return lake


def make_settings(
    lake: Path | str, output: Path | str, **sections: Mapping[str, Any]
) -> dict[str, Any]:
    """A job file's contents: SETTINGS with the sections laid over them, key by key."""
    merged = {name: dict(section) for name, section in SETTINGS.items()}
    for name, section in sections.items():
        merged[name] = {**merged.get(name, {}), **section}
    merged["input"]["path"] = str(lake)
    return merged | {"output": str(output), "name": "blobs"}


def make_job(lake: Path, output: Path, **sections: Mapping[str, Any]) -> Job:
    """The job of these settings."""
    return build_job(make_settings(lake, output, **sections), "job", output.parent)


def write_job(
    path: Path, lake: Path | str, output: Path | str, **sections: Mapping[str, Any]
) -> Path:
    """A job file of these settings."""
    path.write_text(yaml.safe_dump(make_settings(lake, output, **sections)))
    return path


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.skipped: list[str] = []
        self.commits: dict[str, list[Commit]] = {}
        self.notes: list[str] = []

    def stage_started(self, name: str, *_: int) -> None:
        self.commits[name] = []

    def part_done(self, name: str, commit: Commit) -> None:
        self.commits[name].append(commit)

    def task_progress(self, name: str, share: float, note: str) -> None:
        self.notes.append(f"{name} {share:.2f} {note}")

    def stage_finished(self, name: str, manifest: Manifest, timing: Timing, skipped: bool) -> None:
        del manifest, timing
        (self.skipped if skipped else self.ran).append(name)


def one_try() -> SerialRunner:
    """A runner with memory enough and no second attempts."""
    return SerialRunner(task_bytes=1 << 40, retries=0)


def run_job(job: Job, seen: Recorder | None = None, only: str | None = None) -> flow.Published:
    """The published run, made in this process."""
    published = flow.run(job, one_try(), seen or Recorder(), only)
    assert published is not None
    return published


def lake_ref(job: Job) -> StoreRef:
    """The input as a stage gets it."""
    snapshot = take_snapshot(lake_source(job))
    return StoreRef(Folder(job.input.path), snapshot.digest)


def run_until(job: Job, last: str, seen: Recorder | None = None) -> dict[str, Store]:
    """The stores of all steps up to `last`, made now unless they are there; no gates apply."""
    refs = {"lake": lake_ref(job)}
    root, runner, observer = Folder(job.output), one_try(), seen or Recorder()
    for stage in flow.STAGES:
        inputs = {name: refs[name] for name in stage.reads}
        refs[stage.name] = run_stage(stage, inputs, root, job, runner, observer)
        if stage.name == last:
            break
    del refs["lake"]
    return {name: open_store(ref.folder, ref.digest) for name, ref in refs.items()}


def find_refs(job: Job) -> dict[str, StoreRef]:
    """Every finished store of a job that has been run."""
    refs = {"lake": lake_ref(job)}
    for stage in flow.STAGES:
        folder = locate_store(stage, refs, job)
        store = find_store(folder)
        assert store is not None, f"{folder.url} has no manifest"
        refs[stage.name] = StoreRef(folder, store.manifest.digest)
    return refs


def locate_store(stage: Stage[Any], refs: Mapping[str, StoreRef], job: Job) -> Folder:
    """Where the job has that stage's store."""
    digests = {name: refs[name].digest for name in stage.reads}
    return locate(stage, digests, Folder(job.output), job)


def read_array(store: Store, name: str) -> NDArray[Any]:
    """The whole array, over all partitions."""
    return np.concatenate([store.arrays(record).read(name) for record in store.records])


def shrink_blocks() -> None:
    """Make blocks of 128 rows and shards of 1,000 edges, so that a small lake has several.

    Training gets one thread: several wait for each other by spinning, which on a busy machine
    takes 20 times as long. Processes of their own get ENVIRONMENT instead.
    """
    for place, name, value in _SMALL:
        setattr(place, name, value)


def _small_block(*_: Any) -> int:
    return 128


_SMALL: tuple[tuple[Any, str, Any], ...] = (
    (sample, "block_rows", _small_block),
    (cells, "assign_rows", _small_block),
    (neighbors, "graph_rows", _small_block),
    (neighbors, "BLOCK_ROWS", 128),
    (neighbors, "QUERIES_PER_TASK", 200),
    (edges, "EDGES_PER_SHARD", 1000),
    (evaluate, "MAP_FILES_PER_TASK", 2),
    (training, "os", SimpleNamespace(sched_getaffinity=lambda _: {0})),
)


@contextmanager
def small_blocks() -> Iterator[None]:
    """Blocks are small inside; see shrink_blocks."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name, value in _SMALL:
            patch.setattr(place, name, value)
        yield


@dataclass(frozen=True)
class Finished:
    """A lake and the run that was made of it; for reading only."""

    lake: Lake
    job: Job
    published: flow.Published
    refs: Mapping[str, StoreRef]

    def store(self, name: str) -> Store:
        """That step's store."""
        ref = self.refs[name]
        return open_store(ref.folder, ref.digest)

    @property
    def run(self) -> Path:
        """The published folder."""
        return Path(self.published.run.url)

    @property
    def root(self) -> Path:
        """The output folder."""
        return Path(self.job.output)


LABELLED = {"label": "blob", "holdout": "test", "max_bad_fraction": 0.05}


def finish_run(factory: pytest.TempPathFactory) -> Finished:
    """The run most tests look at: four files, bad rows, labels, held-out rows, forced cells.

    Made once per session, under small blocks.
    """
    return _finish_run(factory.getbasetemp() / "finished")


@cache
def _finish_run(folder: Path) -> Finished:
    blobs = make_blobs(1000)
    lake = write_parquet(folder / "lake", *blobs, n_bad=10, held_out_every=7)
    job = make_job(lake.path, folder / "maps", input=LABELLED, neighbors={"cells": 5, "overlap": 2})
    with small_blocks():
        published = run_job(job)
    return Finished(lake, job, published, find_refs(job))


def tree(root: Path, without: Iterable[str] = ()) -> dict[str, tuple[int, int]]:
    """Size and time of last change of every file below root."""
    return {
        str(path.relative_to(root)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in without
    }


def digests(root: Path, without: Iterable[str] = ()) -> dict[str, str]:
    """SHA-256 of every file below root."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in without
    }


def results(output: Path) -> dict[str, str]:
    """Digests of all that a job's stores and runs hold, less what tells of times.

    The report does, and a run's manifest names it by its checksum.
    """
    found: dict[str, str] = {}
    for store in sorted((output / "stores").glob("*/*")):
        if store.parent.name == "publish":  # its files are those of the run
            continue
        place = store.relative_to(output)
        found |= {f"{place}/data/{k}": v for k, v in digests(store / "data").items()}
        for name in ("plan.json", "manifest.json"):
            found[f"{place}/{name}"] = hashlib.sha256((store / name).read_bytes()).hexdigest()
    runs = digests(output / "runs", ("report.html", "manifest.json"))
    return found | {f"runs/{key}": value for key, value in runs.items()}


class Ran(NamedTuple):
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


ENVIRONMENT = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}


def run_process(*arguments: str | Path) -> Ran:
    """The command line as a process of its own."""
    command = [sys.executable, "-m", "jobs.cli", *map(str, arguments)]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=ENVIRONMENT
    )
    return Ran(found.returncode, found.stdout, found.stderr)


def call_cli(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Ran:
    """The command line inside this process, which saves its start."""
    handler = signal.getsignal(signal.SIGTERM)
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lakemap", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    signal.signal(signal.SIGTERM, handler)
    said = capsys.readouterr()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return Ran(code or 0, said.out, said.err)

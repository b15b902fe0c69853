"""The stage driver: check, skip, resume, run, write the manifest. Written once for all stages."""

import functools
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from threadpoolctl import ThreadpoolController

from pipeline.config import Job
from pipeline.errors import StageError, StoreError
from pipeline.manifest import (
    Commit,
    Effort,
    Manifest,
    Part,
    Plan,
    Record,
    Store,
    Timing,
    commit_part,
    find_store,
    fingerprint,
    from_json,
    load_commit,
    load_commits,
    load_plan,
    missing_partitions,
    open_store,
    save_plan,
    to_json,
)
from pipeline.partitions import Partition, block_rows, graph_rows
from pipeline.runner import Report, Runner, Write
from pipeline.stores import Folder

S = TypeVar("S")


@dataclass(frozen=True)
class StoreRef:
    """A finished store by place and content: what travels to the tasks that read it."""

    folder: Folder
    digest: str


@dataclass(frozen=True)
class Context(Generic[S]):
    """Everything a stage's functions may use."""

    settings: S
    inputs: Mapping[str, StoreRef]
    folder: Folder
    facts: Mapping[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> Store:
        """The finished store of that stage, opened once per process."""
        source = self.inputs[name]
        return open_store(source.folder, source.digest)


@dataclass(frozen=True)
class Shape:
    """The lake's size, for estimates made before any stage has run."""

    n_rows: int
    n_partitions: int
    partition_rows: int
    width: int
    item_bytes: int
    n_train: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row."""
        return self.width * self.item_bytes

    @property
    def block_rows(self) -> int:
        """Rows of one block of the training sample."""
        return block_rows(self.row_bytes)

    @property
    def n_blocks(self) -> int:
        """Blocks of the training sample."""
        return -(-self.n_train // self.block_rows)

    @property
    def graph_rows(self) -> int:
        """Rows of one block of the graph."""
        return min(graph_rows(self.n_train), self.n_train)

    @property
    def n_graph_blocks(self) -> int:
        """Blocks of the graph."""
        return -(-self.n_train // self.graph_rows)


# A worker process with Python, Arrow, Zarr, faiss, numba and torch loaded, before any data.
PROCESS_BYTES = 800 << 20


@dataclass(frozen=True)
class Estimate:
    """Upper bounds for one stage: partitions, memory of one task, bytes of its store."""

    n_parts: int
    task_bytes: int
    store_bytes: int


def one_partition(_: Context[Any]) -> Plan:
    """The plan of a stage that is a single task."""
    return Plan([Partition(0, 0, 1)])


def no_metrics(_: Context[Any], __: list[Record]) -> dict[str, Any]:
    """The metrics of a stage that measures nothing."""
    return {}


@dataclass(frozen=True)
class Stage(Generic[S]):
    """One step of the pipeline, described by functions; `run_stage` drives it."""

    name: str
    version: int  # raise when equal inputs give other output
    reads: tuple[str, ...]
    settings: Callable[[Job], S]
    estimate: Callable[[Job, Shape], Estimate]
    prepare: Callable[[Context[S]], Plan]
    do_part: Callable[[Context[S], Partition, Report], Part]
    finish: Callable[[Context[S], list[Record]], dict[str, Any]] = no_metrics
    whole_machine: bool = False  # all cores, and a GPU where some worker offers one


class Observer(Protocol):
    """Who is told how a stage goes on."""

    def stage_started(self, name: str, n_parts: int, n_done: int, n_rows: int) -> None:
        """A stage begins; n_done of its partitions were committed by an earlier run."""
        ...

    def part_done(self, name: str, commit: Commit) -> None:
        """One partition was committed."""
        ...

    def task_progress(self, name: str, share: float, note: str) -> None:
        """A long task says how far it is."""
        ...

    def stage_finished(self, name: str, manifest: Manifest, timing: Timing, skipped: bool) -> None:
        """A stage has its manifest; skipped if an earlier run had finished it."""
        ...


def locate(stage: Stage[Any], inputs: Mapping[str, str], root: Folder, job: Job) -> Folder:
    """Where the stage's store lies: under a fingerprint of its name, version, settings, inputs."""
    settings = asdict(stage.settings(job))
    mark = fingerprint(stage.name, stage.version, settings, dict(inputs))
    return root.join(f"stores/{stage.name}/{mark[:16]}")


def run_stage(
    stage: Stage[S],
    inputs: Mapping[str, StoreRef],
    root: Folder,
    job: Job,
    runner: Runner,
    observer: Observer,
) -> StoreRef:
    """The stage's finished store: an earlier run's if it is there, else made or completed now."""
    folder = locate(stage, {name: source.digest for name, source in inputs.items()}, root, job)
    store = find_store(folder)
    if store is not None:
        observer.stage_finished(stage.name, store.manifest, load_timing(folder), skipped=True)
        return StoreRef(folder, store.manifest.digest)
    started = time.monotonic()
    context = Context(stage.settings(job), inputs, folder)
    plan = load_plan(folder) or save_plan(folder, stage.prepare(context))
    commits = _run_parts(stage, context, plan, runner, observer)
    context = replace(context, facts=plan.facts)
    wall_seconds = time.monotonic() - started
    manifest, timing = _finish(stage, context, commits, wall_seconds)
    observer.stage_finished(stage.name, manifest, timing, skipped=False)
    return StoreRef(folder, manifest.digest)


def _run_parts(
    stage: Stage[S], context: Context[S], plan: Plan, runner: Runner, observer: Observer
) -> list[Commit]:
    """Commits of all partitions of the plan, in order; only those without one are worked on."""
    commits = load_commits(context.folder)
    todo = missing_partitions(plan, commits)
    n_rows = sum(partition.n_rows for partition in plan.partitions)
    observer.stage_started(
        stage.name, len(plan.partitions), len(plan.partitions) - len(todo), n_rows
    )
    task = functools.partial(run_part, stage, context)
    report = functools.partial(observer.task_progress, stage.name)
    for commit in runner.map(stage.name, task, todo, report, whole_machine=stage.whole_machine):
        commits[commit.record.partition.index] = commit
        observer.part_done(stage.name, commit)
    lost = missing_partitions(plan, commits)
    if lost:
        raise StageError(f"{stage.name}: {len(lost)} partitions have no commit; run again")
    return [commits[partition.index] for partition in plan.partitions]


def run_part(stage: Stage[S], context: Context[S], partition: Partition, report: Report) -> Write:
    """The partition, computed and ready to commit; only if nobody has committed it yet."""
    existing = load_commit(context.folder, partition.index)
    if existing is not None:
        return lambda: existing
    context = replace(context, facts=_plan_facts(context.folder))
    with limited_threads(stage.whole_machine):
        started = time.perf_counter()
        forget_peak_memory()
        part = stage.do_part(context, partition, report)
        effort = Effort(time.perf_counter() - started, peak_memory())
    return functools.partial(commit_part, context.folder, partition, part, effort)


@lru_cache(maxsize=32)
def _plan_facts(folder: Folder) -> dict[str, Any]:
    """The facts of the store's plan, read once per process: they do not travel with each task."""
    plan = load_plan(folder)
    if plan is None:
        raise StoreError(f"{folder.url}/plan.json is missing; run again")
    return plan.facts


def _finish(
    stage: Stage[S], context: Context[S], commits: list[Commit], wall_seconds: float
) -> tuple[Manifest, Timing]:
    """The manifest, written last; if another run was faster, its manifest."""
    records = [commit.record for commit in commits]
    settings = asdict(context.settings)  # type: ignore[call-overload]  # S is a dataclass
    manifest = Manifest(
        stage=stage.name,
        version=stage.version,
        fingerprint=context.folder.url.rsplit("/", 1)[1],
        inputs={name: source.digest for name, source in context.inputs.items()},
        settings=settings,
        facts=dict(context.facts),
        metrics=stage.finish(context, records),
        n_rows=sum(record.n_rows for record in records),
        records=records,
    )
    efforts = [commit.effort for commit in commits]
    timing = Timing(
        wall_seconds,
        sum(effort.seconds for effort in efforts),
        max((effort.peak_bytes for effort in efforts), default=0),
    )
    context.folder.put("timing.json", to_json(timing))
    if not context.folder.create("manifest.json", to_json(manifest)):
        store = find_store(context.folder)
        assert store is not None
        manifest = store.manifest
    return manifest, timing


def load_timing(folder: Folder) -> Timing:
    """What the stage cost when it ran."""
    data = folder.find("timing.json")
    if data is None:
        raise StoreError(f"{folder.url}/timing.json is missing; remove {folder.url} and run again")
    return from_json(Timing, data, f"{folder.url}/timing.json")


@contextmanager
def limited_threads(whole_machine: bool) -> Iterator[None]:
    """One thread for BLAS, OpenMP (faiss) and torch inside; training sets its own number.

    Tasks are parallel by process: two one-thread processes beat one two-thread process.
    """
    if whole_machine:
        yield
        return
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 1
    if torch:
        torch.set_num_threads(1)
    try:
        with _thread_pools(len(sys.modules)).limit(limits=1):
            yield
    finally:
        if torch:
            torch.set_num_threads(before)


@lru_cache(maxsize=1)
def _thread_pools(n_modules: int) -> ThreadpoolController:  # noqa: ARG001 - new ones bring pools
    """The process's thread pools, looked for again only when modules have come: it takes 2 ms."""
    return ThreadpoolController()


def forget_peak_memory() -> None:
    """Reset the process's peak resident memory, where Linux allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Peak resident memory of the process, in bytes, since it was last reset."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024

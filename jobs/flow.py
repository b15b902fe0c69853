"""The ordered stages, which store feeds which, and the checks between them."""

import json
import logging
import shutil
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np

from jobs.checks import check_after, check_enough
from pipeline import history
from pipeline.config import Job
from pipeline.errors import ConfigError, DamagedError, StoreError
from pipeline.lake import take_snapshot
from pipeline.manifest import (
    Store,
    find_store,
    forget_part,
    open_store,
)
from pipeline.remote import is_remote
from pipeline.runner import Runner
from pipeline.stage import (
    Estimate,
    Observer,
    Shape,
    Stage,
    StoreRef,
    locate,
    run_stage,
)
from pipeline.stages import (
    affinity,
    cells,
    edges,
    embed,
    evaluate,
    ingest,
    neighbors,
    publish,
    sample,
    symmetrize,
    train,
)
from pipeline.stores import Folder

log = logging.getLogger("lakemap")

T = TypeVar("T")

# The ten stages people know, and the steps each is made of: a barrier inside one is two steps.
GROUPS: dict[str, tuple[Stage[Any], ...]] = {
    "ingest": (ingest.INGEST,),
    "sample": (sample.SAMPLE,),
    "neighbors": (
        cells.CENTROIDS,
        cells.ASSIGN,
        neighbors.SEARCH,
        neighbors.NEIGHBORS,
        neighbors.RECALL,
    ),
    "affinity": (affinity.AFFINITY,),
    "symmetrize": (symmetrize.TRANSPOSE, symmetrize.SYMMETRIZE),
    "edges": (edges.DRAW, edges.EDGES),
    "train": (train.TRAIN,),
    "embed": (embed.EMBED,),
    "evaluate": (evaluate.SURVEY, evaluate.EVALUATE),
    "publish": (publish.PUBLISH,),
}
STAGES = tuple(stage for group in GROUPS.values() for stage in group)


@dataclass(frozen=True)
class Published:
    """A finished run."""

    run: Folder
    metrics: Mapping[str, Any]
    changed: bool


@dataclass(frozen=True)
class Preflight:
    """What a run will need, known before it starts."""

    shape: Shape
    n_files: int
    lake_bytes: int
    warnings: tuple[str, ...]
    estimates: Mapping[str, Estimate]

    @property
    def task_bytes(self) -> int:
        """Memory of the largest task, training apart."""
        return max(e.task_bytes for name, e in self.estimates.items() if name != "train")

    @property
    def train_bytes(self) -> int:
        """Memory of the training task; a refresh has none."""
        return self.estimates["train"].task_bytes if "train" in self.estimates else 0

    @property
    def store_bytes(self) -> int:
        """Disk for all stores."""
        return sum(estimate.store_bytes for estimate in self.estimates.values())


def preflight(job: Job) -> Preflight:
    """What the job will need; reads listings and footers, writes nothing."""
    source = embed.map_source(job)
    snapshot = take_snapshot(ingest.lake_source(job))
    plan = ingest.lake_plan(source, snapshot)
    shape = Shape(
        n_rows=plan.n_rows,
        n_partitions=len(plan.partitions),
        partition_rows=max(partition.n_rows for partition in plan.partitions),
        width=plan.width,
        item_bytes=np.dtype(plan.dtype).itemsize,
        n_train=min(job.sample.rows, plan.n_rows),
    )
    check_enough(job, shape.n_train, "rows")
    estimates = {stage.name: stage.estimate(job, shape) for stage in STAGES}
    return Preflight(shape, plan.n_files, snapshot.n_bytes, plan.warnings, estimates)


def find_shortage(job: Job, needs: Preflight, task_bytes: int, train_bytes: int) -> str | None:
    """What is too small for the job, as one line; None when all fits."""
    name, largest = max(
        ((n, e) for n, e in needs.estimates.items() if n != "train"), key=lambda i: i[1].task_bytes
    )
    if largest.task_bytes > task_bytes:
        return (
            f"{name}: one task needs {_mib(largest.task_bytes)}, a worker gives "
            f"{_mib(task_bytes)}; raise cluster.memory, or lower input.partition_bytes "
            f"or neighbors.memory"
        )
    if needs.train_bytes > train_bytes:
        memory = "cluster.gpu.memory" if job.cluster.gpu else "cluster.memory"
        return (
            f"train: {needs.shape.n_train} rows need {_mib(needs.train_bytes)}, "
            f"a worker gives {_mib(train_bytes)}; raise {memory} or lower sample.rows"
        )
    free = free_bytes(job.output)
    if free is not None and needs.store_bytes > free:
        return (
            f"{job.output}: stores need {_mib(needs.store_bytes)}, {_mib(free)} are free; "
            f"free some or lower sample.rows"
        )
    return None


def free_bytes(output: str) -> int | None:
    """Free bytes where the output goes; None for object stores."""
    if is_remote(output):
        return None
    path = Path(output.removeprefix("file://"))
    existing = next(parent for parent in [path, *path.parents] if parent.exists())
    return shutil.disk_usage(existing).free


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 20):,.0f} MiB"


def check_installation() -> None:
    """Refuse an environment in which two distributions own the faiss module."""
    installed = {(dist.metadata["Name"] or "").lower() for dist in distributions()}
    found = sorted(name for name in installed if name.startswith(("faiss-cpu", "faiss-gpu")))
    if len(found) != 1:
        what = f"{' and '.join(found)} are both installed" if found else "faiss is not installed"
        raise ConfigError(f"{what}; install exactly one: pip install 'lakemap[cpu]' or [gpu]")


def check_place(job: Job) -> None:
    """Refuse an output that has a file in its way; touches nothing."""
    if not is_remote(job.output):
        path = Path(job.output.removeprefix("file://"))
        for place in [path, *path.parents]:
            if place.is_file():
                raise ConfigError(f"output {job.output}: {place} is a file; name a folder")


def check_output(job: Job) -> None:
    """Refuse an output that cannot be written, or that lets one write undo another."""
    root, key = Folder(job.output), f".probe-{uuid4().hex}"
    try:
        first, second = root.create(key, b"first"), root.create(key, b"second")
        root.delete(key)
    except StoreError as error:
        raise ConfigError(f"output {job.output}: not writable ({error}); choose another") from error
    if not first or second:
        raise ConfigError(
            f"output {job.output}: the store ignores conditional puts (If-None-Match), so two "
            f"attempts could overwrite each other; choose a store that honours them"
        )


def run(job: Job, runner: Runner, observer: Observer, only: str | None = None) -> Published | None:
    """The published run; with `only`, that stage's steps alone, on the finished stores before it.

    None when the stage is not the last one. Where a finished step turns out to be damaged, the
    task that wrote the damaged object is done again, and no other.
    """
    ours = {stage.name for stage in (GROUPS[only] if only else STAGES)}
    return repairing(lambda: _run_once(job, runner, observer, only), ours)


def repairing(attempt: Callable[[], T], ours: Container[str]) -> T:
    """What the attempt returns, made again after each damaged partition of `ours`, our steps."""
    repaired: set[str] = set()
    while True:
        try:
            return attempt()
        except DamagedError as error:
            url = error.partition_url
            step = url.split("/stores/")[-1].split("/")[0]
            if url in repaired or step not in ours:
                raise
            repaired.add(url)
            log.warning("%s; its task is done again", str(error).rpartition("; remove ")[0])
            forget_part(url)


def _run_once(job: Job, runner: Runner, observer: Observer, only: str | None) -> Published | None:
    root = Folder(job.output)
    after = history.start(root)
    stores: dict[str, Store] = {}
    worked = False
    refs = {"lake": snapshot_ref(job)}
    for group, stages in GROUPS.items():
        for stage in stages:
            worked = worked or _find(stage, refs, root, job) is None
            if only not in (None, group):
                ref = _finished(stage, refs, root, job, str(only))
            else:
                inputs = {name: refs[name] for name in stage.reads}
                ref = run_stage(stage, inputs, root, job, runner, observer)
            refs[stage.name] = ref
            stores[stage.name] = open_store(ref.folder, ref.digest)
            check_after(stage.name, stores[stage.name].manifest, job)
        if group == only and group != "publish":
            return None
    run_folder, changed = publish.release(root, stores, after)
    record = stores["publish"].records[0]
    metrics = json.loads(stores["publish"].file(record, "metrics.json"))
    return Published(run_folder, metrics, changed or worked)


def snapshot_ref(job: Job) -> StoreRef:
    """The lake as it is, as a stage gets it."""
    snapshot = take_snapshot(ingest.lake_source(job))
    return StoreRef(Folder(job.input.path), snapshot.digest)


def _finished(
    stage: Stage[Any], refs: Mapping[str, StoreRef], root: Folder, job: Job, only: str
) -> StoreRef:
    store = _find(stage, refs, root, job)
    if store is None:
        raise ConfigError(f"stage {only}: {stage.name} is not finished; run the stages before it")
    return StoreRef(store.folder, store.manifest.digest)


def _find(stage: Stage[Any], refs: Mapping[str, StoreRef], root: Folder, job: Job) -> Store | None:
    return find_store(_locate(stage, refs, root, job))


def _locate(stage: Stage[Any], refs: Mapping[str, StoreRef], root: Folder, job: Job) -> Folder:
    return locate(stage, {name: refs[name].digest for name in stage.reads}, root, job)

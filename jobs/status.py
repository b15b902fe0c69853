"""How far a job is: the steps of its run, or of the refresh that its published map is due."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jobs import flow, refresh, retrain
from pipeline import history
from pipeline.config import Job
from pipeline.errors import LakemapError
from pipeline.lease import Lease, find_holder
from pipeline.manifest import Store, find_store, load_commits, load_plan
from pipeline.stage import Stage, StoreRef, load_timing, locate
from pipeline.stores import Folder

REFRESH = "refresh"
REFRESH_ANEW = "refresh --retrain"


@dataclass(frozen=True)
class StageStatus:
    """How far one step is; `state` is done, partial or waiting.

    store: its place, once the steps before it are done. wall_seconds: of a step that is done.
    task_seconds: the sum over its tasks so far.
    """

    name: str
    state: str
    store: str | None = None
    n_done: int = 0
    n_parts: int = 0
    n_rows: int = 0
    wall_seconds: float | None = None
    task_seconds: float = 0.0


class Status(NamedTuple):
    """The command that is under way or next, and how far each of its steps is.

    A refresh of a lake that has not changed has no steps. at_work: who holds the output now.
    """

    command: str
    steps: list[StageStatus]
    at_work: Lease | None


def find_status(job: Job) -> Status:
    """The steps of the job's run; those of a refresh where its map is published already.

    A run that was begun on the lake as it is comes first, unless a refresh is at work.
    """
    at_work = find_holder(Folder(job.output))
    command = "" if at_work is None else at_work.command
    steps = run_steps(job)
    refreshes = command.startswith(REFRESH)
    if refreshes or (steps[0].state == "waiting" and not command.startswith(("run", "stage"))):
        try:
            base = refresh.find_base(job)
            if base is not None:
                due = _refresh_steps(job, base, again=command == REFRESH_ANEW)
                return Status(command if refreshes else REFRESH, due, at_work)
        except LakemapError:  # only a run can replace the map, or says what is wrong with the lake
            pass
    return Status("run", steps, at_work)


def run_steps(job: Job) -> list[StageStatus]:
    """How far each step of a run is; those after an unfinished one are waiting."""
    return _steps(job, flow.STAGES, {"lake": flow.snapshot_ref(job)})


def _refresh_steps(job: Job, base: refresh.Base, again: bool) -> list[StageStatus]:
    """The steps of a refresh, and those of the training that its drift, or the user, calls for."""
    steps: list[StageStatus] = []
    refs = {"lake": flow.snapshot_ref(job), "published": base.ref}
    work = None if again else refresh.find_work(job, base)
    if work is not None:
        found = refresh.input_refs(job, work)
        steps = _steps(job, refresh.STAGES, found)
        drift = found.get("drift")
        if drift is None or not refresh.calls_for_training(drift):
            return steps
        steps = [step for step in steps if step.state == "done"]
        refs["drift"] = drift
    elif not again:
        return []
    return steps + _steps(job, retrain.make_stages("drift" in refs), refs)


def _steps(job: Job, stages: Iterable[Stage[Any]], refs: dict[str, StoreRef]) -> list[StageStatus]:
    """How far each step is; the stores of those that are done are added to `refs`."""
    root, found = Folder(job.output), list[StageStatus]()
    for stage in stages:
        if any(name not in refs for name in stage.reads):
            found.append(StageStatus(stage.name, "waiting"))
            continue
        digests = {name: refs[name].digest for name in stage.reads}
        folder = locate(stage, digests, root, job)
        place, store = folder.url.removeprefix(f"{root.url}/"), find_store(folder)
        if store is None:
            found.append(_partial(stage.name, place, folder))
            continue
        found.append(_done(stage.name, place, store))
        for name in refresh.known_as(stage):
            refs[name] = StoreRef(folder, store.manifest.digest)
    return found


def _done(name: str, place: str, store: Store) -> StageStatus:
    n_parts, timing = len(store.records), load_timing(store.folder)
    return StageStatus(
        name,
        "done",
        place,
        n_done=n_parts,
        n_parts=n_parts,
        n_rows=store.n_rows,
        wall_seconds=timing.wall_seconds,
        task_seconds=timing.task_seconds,
    )


def _partial(name: str, place: str, folder: Folder) -> StageStatus:
    plan = load_plan(folder)
    if plan is None:
        return StageStatus(name, "waiting", place)
    commits = load_commits(folder).values()
    return StageStatus(
        name,
        "partial",
        place,
        n_done=len(commits),
        n_parts=len(plan.partitions),
        n_rows=sum(commit.record.n_rows for commit in commits),
        task_seconds=sum(commit.effort.seconds for commit in commits),
    )


def used_stores(job: Job) -> list[str]:
    """Places below the output of the job's stores, as far as they can be told."""
    return [stage.store for stage in run_steps(job) if stage.store is not None]


def is_finished(job: Job) -> bool:
    """Whether every step of the job is done."""
    return all(stage.state == "done" for stage in run_steps(job))


def is_published(job: Job) -> bool:
    """Whether the published run is that of the job and the lake as they are."""
    current = history.current_run(Folder(job.output))
    return current is not None and f"stores/publish/{current}" in used_stores(job)

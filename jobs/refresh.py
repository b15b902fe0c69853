"""The refresh: the published map brought to today's lake, without moving a row that stays."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs import retrain
from jobs.checks import check_bad_rows
from jobs.flow import Preflight, Published, repairing
from pipeline import history
from pipeline.config import Job
from pipeline.gates import check_gates
from pipeline.lake import Snapshot, take_snapshot
from pipeline.lake.delta import Delta, find_delta, lake_mark
from pipeline.manifest import Plan, Store, load_plan, open_store, save_plan
from pipeline.published import (
    MapPart,
    PublishedMap,
    check_same_job,
    has_same_form,
    load_snapshot,
)
from pipeline.runner import Runner
from pipeline.runs import RunFile, assemble, load_manifest, run_name
from pipeline.stage import Observer, Shape, Stage, StoreRef, locate, run_stage
from pipeline.stages import embed, ingest, publish
from pipeline.stages.drift import DRIFT
from pipeline.stages.embed import EMBED
from pipeline.stages.ingest import INGEST
from pipeline.stages.refresh import (
    ENCODER,
    REPUBLISH,
    TALLY,
    all_parts,
    count_rows,
    plan_republish,
    plan_tally,
)
from pipeline.stores import Folder

log = logging.getLogger("lakemap")

STAGES: tuple[Stage[Any], ...] = (ENCODER, INGEST, EMBED, DRIFT, TALLY, REPUBLISH)
CARRIED = ("model/", "telemetry.parquet")  # of the run before, beside the map


@dataclass(frozen=True)
class Base:
    """The published run that a refresh starts from."""

    after: history.Entry
    run: Folder
    map: PublishedMap

    @property
    def ref(self) -> StoreRef:
        """The run as a step reads it."""
        return StoreRef(self.run, run_name(self.run))


@dataclass(frozen=True)
class Work:
    """What a refresh has to do: the base, today's lake, and how the two differ."""

    base: Base
    snapshot: Snapshot
    delta: Delta

    @property
    def kept(self) -> list[MapPart]:
        """Partitions of the map that stay."""
        return [self.base.map.parts[position] for position in self.delta.kept]

    @property
    def gone(self) -> list[MapPart]:
        """Partitions of the map that go."""
        stays = set(self.delta.kept)
        return [part for at, part in enumerate(self.base.map.parts) if at not in stays]


def find_base(job: Job) -> Base | None:
    """The published run, which must be this job's; None if nothing is published."""
    root = Folder(job.output)
    after = history.seen(root)
    if after is None:
        return None
    run = root.join(f"runs/{after.run}")
    published = load_snapshot(run)
    check_same_job(job, published)
    return Base(after, run, published)


def find_work(job: Job, base: Base) -> Work | None:
    """What there is to do; None if the map is that of today's lake. Nothing is written."""
    snapshot = take_snapshot(ingest.lake_source(job))
    source, reuse = embed.map_source(job), has_same_form(job, base.map)
    delta = find_delta(source, snapshot, base.map.lake, reuse=reuse)
    return None if delta is None else Work(base, snapshot, delta)


def preflight(job: Job, work: Work) -> Preflight:
    """What the refresh will need."""
    plan, gone = work.delta.plan, work.gone
    shape = Shape(
        n_rows=plan.n_rows,
        n_partitions=max(len(plan.partitions), len(gone)),
        partition_rows=max([0, *(p.n_rows for p in plan.partitions), *(p.n_rows for p in gone)]),
        width=plan.width,
        item_bytes=4,
        n_train=1,
    )
    estimates = {stage.name: stage.estimate(job, shape) for stage in STAGES}
    n_bytes = sum(file.size for file in work.delta.files)
    return Preflight(shape, plan.n_files, n_bytes, plan.warnings, estimates)


def run(job: Job, runner: Runner, observer: Observer, *, again: bool = False) -> Published:
    """The published run, refreshed; the run as it was if there is nothing to do.

    With `again`, or where the new rows have drifted too far, the encoder is trained again.
    """
    names = {stage.name for stage in (*STAGES, *retrain.make_stages(True))}
    return repairing(lambda: _run_once(job, runner, observer, again), names)


def unchanged(base: Base) -> Published:
    """The published run as it is; CURRENT is put right if a crash kept it from moving."""
    if base.after.number:
        history.point_at(Folder(base.run.url.rsplit("/runs/", 1)[0]), base.after.run)
    metrics = json.loads(base.run.get("metrics.json"))
    return Published(base.run, metrics, changed=False)


def _run_once(job: Job, runner: Runner, observer: Observer, again: bool) -> Published:
    root = Folder(job.output)
    history.start(root)
    base = find_base(job)
    assert base is not None, "the caller has seen one"
    if again:
        return retrain.run(job, base.after, None, runner, observer)
    work = find_work(job, base)
    if work is None:
        return unchanged(base)
    stores = _make_stores(job, work, runner, observer)
    if "republish" not in stores:
        found = stores["drift"]
        drift = StoreRef(found.folder, found.manifest.digest)
        return retrain.run(job, base.after, drift, runner, observer)
    store = stores["republish"]
    metrics = json.loads(store.file(store.records[0], "metrics.json"))
    folder = root.join(f"runs/{run_name(store.folder)}")
    made_from = {name: found.manifest.fingerprint for name, found in stores.items()}
    assemble(folder, _run_files(work, stores), metrics, made_from)
    history.publish(root, base.after, run_name(folder), "refresh", metrics["rows_mapped"])
    return Published(folder, metrics, changed=True)


def input_refs(job: Job, work: Work) -> dict[str, StoreRef]:
    """What the steps start from."""
    lake, base = Folder(job.input.path), work.base
    return {
        "lake": StoreRef(lake, work.delta.digest),
        "today": StoreRef(lake, work.snapshot.digest),
        "model": StoreRef(base.run, base.map.encoder),
        "published": base.ref,
    }


def known_as(stage: Stage[Any]) -> tuple[str, ...]:
    """Names by which later steps know the step: the published encoder stands for a trained one."""
    return (stage.name, "train") if stage is ENCODER else (stage.name,)


def calls_for_training(drift: StoreRef) -> bool:
    """Whether the scores say that the encoder has grown old."""
    return bool(open_store(drift.folder, drift.digest).manifest.metrics["drift"] == "retrain")


def _make_stores(job: Job, work: Work, runner: Runner, observer: Observer) -> dict[str, Store]:
    """The stores of all steps; a gate may refuse on the way, drift may end them early."""
    base, root = work.base, Folder(job.output)
    refs = input_refs(job, work)
    stores: dict[str, Store] = {}

    def make(stage: Stage[Any], plan: Plan | None = None) -> Store:
        inputs = {name: refs[name] for name in stage.reads}
        if plan is not None:
            _write_plan(stage, inputs, root, job, plan)
        ref = run_stage(stage, inputs, root, job, runner, observer)
        refs.update(dict.fromkeys(known_as(stage), ref))
        stores[stage.name] = open_store(ref.folder, ref.digest)
        return stores[stage.name]

    make(ENCODER)
    checked = make(INGEST, _plan_ingest(job, work))
    check_bad_rows(checked.manifest, job)
    placed = make(EMBED)
    kept = [part.number for part in work.kept]
    parts = all_parts(base.map, kept, checked, placed)
    check_gates(job.gates, count_rows(parts, base.map, vars(work.delta.changes)))
    _tell_drift(make(DRIFT).manifest.metrics)
    if calls_for_training(refs["drift"]):
        return stores
    make(TALLY, plan_tally(base.map, work.kept, work.gone, placed))
    files = {file.path: (file.size, file.etag) for file in work.snapshot.files}
    make(REPUBLISH, plan_republish(work.kept, files, work.delta.changes))
    return stores


def _tell_drift(drift: Mapping[str, Any]) -> None:
    """Say that the new rows are unlike those of the training, if they are."""
    if drift["drift"] in ("warn", "retrain"):
        what = "the encoder is trained again" if drift["drift"] == "retrain" else "look at the map"
        log.warning("drift: %s; %s", ", ".join(drift["drift_reasons"]), what)


def _write_plan(
    stage: Stage[Any], inputs: Mapping[str, StoreRef], root: Folder, job: Job, plan: Plan
) -> None:
    """Write the stage's plan ahead: the stage finds it there, as after a crash."""
    folder = locate(stage, {name: ref.digest for name, ref in inputs.items()}, root, job)
    if load_plan(folder) is None:
        save_plan(folder, plan)


def _plan_ingest(job: Job, work: Work) -> Plan:
    """The rows that are not on the map, as ingest plans a whole lake."""
    plan = work.delta.plan
    facts = {
        "width": plan.width,
        "dtype": plan.dtype,
        "n_rows": plan.n_rows,
        "warnings": list(plan.warnings),
        "files": {file.path: [file.size, file.etag] for file in work.delta.files},
        "mark": lake_mark(ingest.lake_source(job), work.snapshot),
    }
    return Plan(plan.partitions, facts)


def _run_files(work: Work, stores: Mapping[str, Store]) -> list[RunFile]:
    """The run's files: those that stay, from the run before, and the new ones."""
    run = work.base.run
    manifest = load_manifest(run)
    assert manifest is not None, "its snapshot was read"
    listed = manifest["files"]
    carried = [name for name in listed if name.startswith(CARRIED)]
    names = [*carried, *(name for part in work.kept for name in part.files)]
    first = work.base.map.next_number
    return [
        *(RunFile(run, n, n, listed[n]["bytes"], listed[n]["crc32"]) for n in names),
        *publish.run_files("embed", stores["embed"], first),
        *publish.run_files("ingest", stores["ingest"], first),
        *publish.run_files("publish", stores["republish"]),
    ]

"""Training again in place: a new encoder of today's lake that keeps the published map's places."""

import json
import logging
from typing import Any

from jobs import flow
from jobs.checks import check_after
from pipeline import history
from pipeline.config import Job
from pipeline.errors import ConfigError
from pipeline.gates import check_gates, share_lost
from pipeline.manifest import Store, open_store
from pipeline.published import load_snapshot
from pipeline.runner import Runner
from pipeline.runs import run_name
from pipeline.stage import Observer, Stage, StoreRef, run_stage
from pipeline.stages import publish
from pipeline.stages.drift import DISPLACEMENT
from pipeline.stages.train import RETRAIN, TRAIN
from pipeline.stores import Folder

log = logging.getLogger("lakemap")


def make_stages(has_drift: bool) -> tuple[Stage[Any], ...]:
    """The steps: those of a run, from the published model, and how far rows have moved."""
    found: list[Stage[Any]] = []
    for stage in flow.STAGES:
        found += {
            TRAIN.name: [RETRAIN, DISPLACEMENT],
            publish.PUBLISH.name: [publish.after_retraining(has_drift)],
        }.get(stage.name, [stage])
    return tuple(found)


def run(
    job: Job, after: history.Entry, drift: StoreRef | None, runner: Runner, observer: Observer
) -> flow.Published:
    """The published run of an encoder that was trained again; `after` is the publication before.

    `drift` are the scores that led to it, where they did.
    """
    root = Folder(job.output)
    before = root.join(f"runs/{after.run}")
    needs = flow.preflight(job)
    shortage = flow.find_shortage(job, needs, runner.task_bytes, runner.train_bytes)
    if shortage:
        raise ConfigError(shortage)
    refs = {"lake": flow.snapshot_ref(job), "published": StoreRef(before, run_name(before))}
    if drift is not None:
        refs["drift"] = drift
    stores: dict[str, Store] = {}
    for stage in make_stages(drift is not None):
        inputs = {name: refs[name] for name in stage.reads}
        ref = refs[stage.name] = run_stage(stage, inputs, root, job, runner, observer)
        store = stores[stage.name] = open_store(ref.folder, ref.digest)
        check_after(stage.name, store.manifest, job)
        if stage.name == "ingest":
            lost = share_lost(store.n_rows, load_snapshot(before).n_mapped)
            check_gates(job.gates, {"rows_lost": lost})
    folder, _ = publish.release(root, stores, after, "retrain")
    store = stores["publish"]
    metrics = json.loads(store.file(store.records[0], "metrics.json"))
    return flow.Published(folder, metrics, changed=True)

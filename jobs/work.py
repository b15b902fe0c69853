"""What run, refresh and rollback have in common: checks, the lease, workers, progress, the end."""

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import typer
from rich.console import Console

from jobs import flow, refresh
from jobs.cluster import open_runner
from jobs.metrics import Record, recorded
from jobs.progress import make_observer
from jobs.status import REFRESH, REFRESH_ANEW, is_finished, is_published
from pipeline import history
from pipeline.config import Job
from pipeline.errors import ConfigError, InputError
from pipeline.lease import hold
from pipeline.runner import Runner, SerialRunner
from pipeline.runs import load_manifest
from pipeline.stage import Observer
from pipeline.stores import Folder

STOPPED = 130

T = TypeVar("T")


def run_job(job: Job, only: str | None = None) -> flow.Published | None:
    """Run the job, or one stage of it; None after a stage that is not the last."""
    return _recorded(job, lambda record: _run(job, only, record))


def refresh_job(job: Job, *, again: bool = False) -> flow.Published:
    """Bring the published map to today's lake; make the first map where there is none.

    With `again` the encoder is trained again, in place.
    """
    found = _recorded(job, lambda record: _refresh(job, again, record))
    assert found is not None
    return found


def _recorded(job: Job, go: Callable[[Record], flow.Published | None]) -> flow.Published | None:
    """What `go` publishes, with the figures that operators want of it."""
    with recorded(job) as record:
        published = go(record)
        if published is not None:
            record.succeeded(published.metrics)
    return published


def _run(job: Job, only: str | None, record: Record) -> flow.Published | None:
    if only is not None and only not in flow.GROUPS:
        raise ConfigError(f"stage {only}: unknown; the stages are {', '.join(flow.GROUPS)}")
    flow.check_place(job)
    command = "run" if only is None else f"stage {only}"
    if only is None and is_finished(job):  # no workers to start, only a look at the stores
        idle = SerialRunner(task_bytes=0)
        if is_published(job):  # nothing to write either
            return _watched(record, lambda observer: flow.run(job, idle, observer))
        with hold(Folder(job.output), command):
            return _watched(record, lambda observer: flow.run(job, idle, observer))
    flow.check_installation()
    needs = flow.preflight(job)
    order = Order(job, command, needs, record)
    return _work(order, lambda runner, seen: flow.run(job, runner, seen, only))


def _refresh(job: Job, again: bool, record: Record) -> flow.Published | None:
    flow.check_place(job)
    base = refresh.find_base(job)
    if base is None:
        return _run(job, None, record)
    if again:
        flow.check_installation()
        needs = flow.preflight(job)
    else:
        work = refresh.find_work(job, base)
        if work is None:
            return refresh.unchanged(base)
        needs = refresh.preflight(job, work)
    order = Order(job, REFRESH_ANEW if again else REFRESH, needs, record)
    return _work(order, lambda runner, seen: refresh.run(job, runner, seen, again=again))


def roll_back(job: Job, run: str | None) -> history.Entry:
    """Publish an earlier run again: the one given, else the one before the published one."""
    with recorded(job) as record:
        return _roll_back(job, run, record)


def _roll_back(job: Job, run: str | None, record: Record) -> history.Entry:
    root = Folder(job.output)
    if history.head(root) is None:
        raise InputError(f"{job.output}: no published map; nothing to roll back")
    with hold(root, "rollback"):
        after = history.start(root)
        assert after is not None, "history is never taken back"
        target = run or history.run_before(history.entries(root), after.run)
        if target is None:
            raise InputError(
                f"{job.output}: no run was published before {after.run}; lakemap history shows them"
            )
        if target == after.run:
            raise InputError(f"{job.output}: run {target} is the published one; nothing to do")
        manifest = load_manifest(root.join(f"runs/{target}"))
        if manifest is None:
            raise InputError(
                f"{job.output}: run {target} is not there, or was removed by lakemap gc; "
                "lakemap history shows what was published"
            )
        history.publish(root, after, target, "rollback", manifest["metrics"]["rows_mapped"])
        record.succeeded(manifest["metrics"])
        found = history.head(root)
    assert found is not None
    return found


class Order(NamedTuple):
    """What is to be done, what it needs and where its figures go."""

    job: Job
    command: str
    needs: flow.Preflight
    record: Record


def _work(order: Order, go: Callable[[Runner, Observer], T]) -> T:
    """What `go` returns, run under the lease of the output on workers that are large enough."""
    console = Console(stderr=True)
    job, command, needs, record = order
    flow.check_output(job)
    try:
        with (
            hold(Folder(job.output), command),
            open_runner(job.cluster, lambda link: _announce(console, link)) as runner,
        ):
            shortage = flow.find_shortage(job, needs, runner.task_bytes, runner.train_bytes)
            if shortage:
                raise ConfigError(shortage)
            for warning in needs.warnings:
                logging.getLogger("lakemap").warning("%s", warning)
            return _watched(record, lambda observer: go(runner, observer))
    except KeyboardInterrupt:
        line = "stopped; finished partitions are kept, the same command goes on from here"
        console.print(line, highlight=False, soft_wrap=True)
        raise typer.Exit(STOPPED) from None


def _watched(record: Record, go: Callable[[Observer], T]) -> T:
    with make_observer(Console(stderr=True)) as observer:
        return go(record.watch(observer))


def _announce(console: Console, link: str) -> None:
    console.print(f"dashboard: {link}", highlight=False, soft_wrap=True)

"""What plan and status show, as documents and as tables."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.cluster import Offer
from jobs.flow import Preflight, free_bytes
from jobs.status import StageStatus, Status
from pipeline import history
from pipeline.config import Job
from pipeline.lake import InputFile, take_snapshot
from pipeline.lease import Lease
from pipeline.published import load_snapshot
from pipeline.stages.ingest import lake_source
from pipeline.stores import Folder


def plan_document(job: Job, needs: Preflight, offer: Offer, shortage: str | None) -> dict[str, Any]:
    """Everything `plan` knows, as plain values."""
    return {
        "rows": needs.shape.n_rows,
        "files": needs.n_files,
        "lake_bytes": needs.lake_bytes,
        "width": needs.shape.width,
        "training_rows": needs.shape.n_train,
        "training_bytes": needs.train_bytes,
        "task_bytes": needs.task_bytes,
        "disk_bytes": needs.store_bytes,
        "disk_free_bytes": free_bytes(job.output),
        "workers": offer.n_workers,
        "worker_bytes": offer.task_bytes,
        "device": offer.device,
        "fits": shortage is None,
        "shortage": shortage,
        "warnings": list(needs.warnings),
        "stages": [
            {
                "name": name,
                "partitions": estimate.n_parts,
                "task_bytes": estimate.task_bytes,
                "store_bytes": estimate.store_bytes,
            }
            for name, estimate in needs.estimates.items()
        ],
    }


def show_plan(document: dict[str, Any]) -> None:
    """Print the plan as a table."""
    console = Console()
    table = Table("stage", "partitions", "memory per task", "store")
    for stage in document["stages"]:
        memory, store = human_bytes(stage["task_bytes"]), human_bytes(stage["store_bytes"])
        table.add_row(stage["name"], f"{stage['partitions']:,}", memory, store)
    console.print(table)
    free = document["disk_free_bytes"]
    lines = [
        f"lake: {document['rows']:,} rows of width {document['width']} in "
        f"{document['files']:,} files, {human_bytes(document['lake_bytes'])}",
        f"training: {document['training_rows']:,} rows, "
        f"{human_bytes(document['training_bytes'])}, on {document['device']}",
        f"workers: {document['workers']} with {human_bytes(document['worker_bytes'])} each",
        f"disk: {human_bytes(document['disk_bytes'])} at most"
        + ("" if free is None else f", {human_bytes(free)} free"),
        *(f"warning: {warning}" for warning in document["warnings"]),
        "fits" if document["fits"] else f"does not fit: {document['shortage']}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def status_document(job: Job, status: Status) -> dict[str, Any]:
    """Everything `status` knows, as plain values."""
    entry, at_work = history.head(Folder(job.output)), status.at_work
    return {
        "job": job.name,
        "current": None if entry is None else entry.run,
        "published": None if entry is None else _published(job, entry),
        "at_work": None if at_work is None else _at_work(at_work),
        "command": status.command,
        "stages": [_stage_document(stage) for stage in status.steps],
    }


def _published(job: Job, entry: history.Entry) -> dict[str, Any]:
    """The published run: since when, its figures, whether the lake is still the one it shows."""
    run = Folder(job.output).join(f"runs/{entry.run}")
    return {
        "run": entry.run,
        "folder": run.url,
        "since": entry.at or None,
        "lake_changed": take_snapshot(lake_source(job)).files != _known_files(run),
        "metrics": json.loads(run.get("metrics.json")),
    }


def _at_work(lease: Lease) -> dict[str, Any]:
    """Who holds the output now."""
    keys = ("command", "host", "process", "since", "renewed")
    return {key: value for key, value in asdict(lease).items() if key in keys}


def _known_files(run: Folder) -> tuple[InputFile, ...]:
    """The lake's files when the run was made."""
    return tuple(load_snapshot(run).lake.files.values())


def _stage_document(stage: StageStatus) -> dict[str, Any]:
    share = stage.n_done / stage.n_parts if stage.n_parts else 0.0
    speed = stage.n_rows / stage.task_seconds if stage.task_seconds else None
    return asdict(stage) | {"share": share, "rows_per_task_second": speed}


def show_status(document: dict[str, Any]) -> None:
    """Print how far each step is, and what is published."""
    console = Console()
    table = Table(f"step of {document['command']}", "state", "partitions", "rows", "seconds")
    for stage in document["stages"]:
        parts = f"{stage['n_done']:,} of {stage['n_parts']:,}" if stage["n_parts"] else ""
        rows = f"{stage['n_rows']:,}" if stage["n_rows"] else ""
        seconds = "" if stage["wall_seconds"] is None else f"{stage['wall_seconds']:,.1f}"
        table.add_row(stage["name"], stage["state"], parts, rows, seconds)
    if document["stages"]:
        console.print(table)
    at_work, published = document["at_work"], document["published"]
    if at_work is not None:
        line = f"at work: lakemap {at_work['command']} since {at_work['since']}"
        console.print(f"{line} ({at_work['host']}, process {at_work['process']})", highlight=False)
    if published is None:
        console.print("published: nothing yet", highlight=False)
        return
    changed = "has changed since" if published["lake_changed"] else "is as it was"
    line = f"published: {published['run']}, {published['since']}; the lake {changed}"
    console.print(line, highlight=False, soft_wrap=True)


def show_history(log: Sequence[history.Entry]) -> None:
    """Print every publication, the newest last."""
    table = Table("", "published", "by", "run", "rows", "in place of")
    for entry in log:
        at = entry.at.replace("T", " ").replace("Z", " UTC")
        rows, previous = f"{entry.rows:,}", entry.previous or ""
        table.add_row(str(entry.number), at, entry.action, entry.run, rows, previous)
    Console().print(table)


def human_bytes(n_bytes: int) -> str:
    """The size in the unit a person would use."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if unit != "B" else f"{n_bytes} B"
        size /= 1024
    return f"{size:.3g} TiB"

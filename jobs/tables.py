"""What plan and status show, as documents and as tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs.cluster import Offer
from jobs.flow import Preflight, StageStatus, free_bytes
from pipeline.config import Job
from pipeline.history import Entry


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


def show_status(stages: Sequence[StageStatus], current: str | None) -> None:
    """Print how far each step is."""
    console = Console()
    table = Table("stage", "state", "partitions", "rows")
    for stage in stages:
        parts = f"{stage.n_done:,} of {stage.n_parts:,}" if stage.n_parts else ""
        table.add_row(stage.name, stage.state, parts, f"{stage.n_rows:,}" if stage.n_rows else "")
    console.print(table)
    console.print(f"published: {current or 'nothing yet'}", highlight=False)


def show_history(log: Sequence[Entry]) -> None:
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

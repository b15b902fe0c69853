"""ingest: every row of the lake is read once and checked; bad rows go to the quarantine.

Nothing is copied: later stages read the lake itself, and are stopped if a file has changed.
"""

import hashlib
from collections import Counter
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Job
from pipeline.errors import InputError
from pipeline.lake import (
    CHANGED,
    InputFile,
    LakePlan,
    Rows,
    Snapshot,
    Source,
    Watch,
    plan_lake,
    read_partition,
    take_snapshot,
)
from pipeline.lake.delta import lake_mark
from pipeline.manifest import Part, Plan, Record, Store
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage


def lake_source(job: Job) -> Source:
    """What of the lake the job reads."""
    return Source(
        path=job.input.path,
        vector=job.input.vector,
        id=job.input.id,
        label=job.input.label,
        holdout=job.input.holdout,
        reject_zero=job.neighbors.metric == "cosine",
        partition_bytes=int(job.input.partition_bytes),
        on_change=job.input.on_change,
    )


@lru_cache(maxsize=1)
def lake_plan(source: Source, snapshot: Snapshot) -> LakePlan:
    """The lake's plan; footers are read once per process."""
    return plan_lake(source, snapshot)


def estimate(job: Job, shape: Shape) -> Estimate:
    """One task holds a partition as read, as Arrow and as one copy."""
    task = PROCESS_BYTES + 4 * int(job.input.partition_bytes)
    return Estimate(shape.n_partitions, task, shape.n_partitions * 1000)


def prepare(context: Context[Source]) -> Plan:
    """Partitions of the lake, bounded by bytes."""
    snapshot = take_snapshot(context.settings)
    if snapshot.digest != context.inputs["lake"].digest:
        raise InputError(f"{context.settings.path}: changed while the run was starting; run again")
    plan = lake_plan(context.settings, snapshot)
    facts = {
        "width": plan.width,
        "dtype": plan.dtype,
        "n_rows": plan.n_rows,
        "warnings": list(plan.warnings),
        "files": {file.path: [file.size, file.etag] for file in snapshot.files},
        "mark": lake_mark(context.settings, snapshot),
    }
    return Plan(plan.partitions, facts)


def read_rows(source: Source, partition: Partition, facts: Any, watch: Watch | None = None) -> Rows:
    """The partition's rows, from files that must not have changed since the snapshot."""
    listed = facts["files"]
    is_zarr = partition.pieces[0].group < 0  # its pieces do not name the chunks they touch
    names = listed if is_zarr else {piece.path for piece in partition.pieces}
    files = {path: InputFile(path, *listed[path]) for path in names}
    return read_partition(source, partition, facts["width"], facts["dtype"], files, watch)


class GoodRows(NamedTuple):
    """A partition's good rows as read again, and their ranks among those that ingest found."""

    rows: Rows
    ranks: NDArray[np.int64]


def read_good_rows(
    source: Source, ingest: Store, record: Record, watch: Watch | None = None
) -> GoodRows:
    """The partition's good rows, as many as ingest counted but for files that changed since."""
    rows = read_rows(source, record.partition, ingest.manifest.facts, watch)
    counts = record.metrics["n_good"]
    found = {path: rows.n_good.get(path, 0) for path in counts if path not in rows.lost}
    if found != {path: counts[path] for path in found}:
        raise InputError(
            f"{source.path}: partition {record.partition.index} has {len(rows.vectors)} good rows, "
            f"ingest found {record.n_rows}; the lake changed during the run, run again"
        )
    starts = np.cumsum([0, *counts.values()])
    ranges = [np.arange(*starts[i : i + 2]) for i, path in enumerate(counts) if path in found]
    return GoodRows(rows, np.concatenate([np.empty(0, np.int64), *ranges]))


def do_part(context: Context[Source], partition: Partition, _: Report) -> Part:
    """Counts of good, held-out and bad rows; the bad ones as a table."""
    rows = read_rows(context.settings, partition, context.facts)
    reasons = Counter(reason.split(" at position")[0] for reason in rows.bad["reason"].to_pylist())
    first = rows.vectors[:1]
    metrics = {
        "n_good": rows.n_good,
        "n_bad": rows.bad.num_rows,
        "n_changed": reasons[CHANGED],
        "n_holdout": int(rows.holdout.sum()),
        "reasons": dict(reasons),
        "first_row": hashlib.sha256(first.tobytes()).hexdigest() if len(first) else None,
        "identical": bool((rows.vectors == first).all()),
    }
    tables = {"quarantine": rows.bad} if rows.bad.num_rows else {}
    return Part(len(rows.vectors), tables=tables, metrics=metrics)


def finish(_: Context[Source], records: list[Record]) -> dict[str, Any]:
    """Totals over the lake."""
    reasons: Counter[str] = Counter()
    for record in records:
        reasons.update(record.metrics["reasons"])
    firsts = {record.metrics["first_row"] for record in records} - {None}
    return {
        "n_good": sum(record.n_rows for record in records),
        "n_bad": sum(record.metrics["n_bad"] for record in records),
        "n_changed": sum(record.metrics["n_changed"] for record in records),
        "n_holdout": sum(record.metrics["n_holdout"] for record in records),
        "reasons": dict(sorted(reasons.items())),
        "identical": len(firsts) == 1 and all(record.metrics["identical"] for record in records),
    }


INGEST = Stage(
    name="ingest",
    version=3,
    reads=("lake",),
    settings=lake_source,
    estimate=estimate,
    prepare=prepare,
    do_part=do_part,
    finish=finish,
)

"""embed: every good row of the lake to its place on the map, one Parquet file per partition."""

from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from encoders.artifact import Encoder
from pipeline.config import Job
from pipeline.lake import Rows, Source
from pipeline.manifest import Part, Plan, Record, open_store
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage, StoreRef
from pipeline.stages.ingest import lake_source, read_good_rows

# A label with more values than this in one partition is not a category to colour by.
MOST_LABELS = 1000
COLOURED_LABELS = 20
NOT_FINITE = "coordinates not finite"


def estimate(job: Job, shape: Shape) -> Estimate:
    """One task holds a partition as read, its map and their encodings."""
    task = PROCESS_BYTES + 5 * int(job.input.partition_bytes) + 100 * shape.partition_rows
    return Estimate(shape.n_partitions, task, shape.n_rows * 24)


def prepare(context: Context[Source]) -> Plan:
    """The lake's partitions, as ingest has them."""
    return Plan([record.partition for record in context.read("ingest").records])


@lru_cache(maxsize=2)
def load_encoder(ref: StoreRef) -> Encoder:
    """The trained encoder, loaded once per process; its digest is checked."""
    store = open_store(ref.folder, ref.digest)
    record = store.records[0]
    names = ("encoder.safetensors", "encoder.json")
    return Encoder.from_files({name: store.file(record, name) for name in names})


def do_part(context: Context[Source], partition: Partition, _: Report) -> Part:
    """A partition's map; rows without finite coordinates are set aside with the reason."""
    ingest = context.read("ingest")
    rows = read_good_rows(context.settings, ingest, ingest.records[partition.index])
    xy = load_encoder(context.inputs["train"]).embed(rows.vectors)
    mapped = np.isfinite(xy).all(axis=1)
    columns = {"id": rows.ids, "x": pa.array(xy[:, 0]), "y": pa.array(xy[:, 1])}
    if rows.labels is not None:
        columns["label"] = rows.labels
    tables = {"map": pa.table(columns).filter(pa.array(mapped))}
    if not mapped.all():
        tables["unmapped"] = _unmapped(rows, partition, ~mapped)
    metrics = {"n_unmapped": int((~mapped).sum()), "labels": _count_labels(tables["map"])}
    return Part(int(mapped.sum()), tables=tables, metrics=metrics)


def _unmapped(rows: Rows, partition: Partition, lost: Any) -> pa.Table:
    """Quarantine entries of rows the encoder cannot place; `row` is the rank in the partition."""
    ranks = np.flatnonzero(lost)
    return pa.table(
        {
            "file": pa.array([partition.pieces[0].path] * len(ranks)),
            "row": pa.array(ranks),
            "id": pc.cast(rows.ids.take(pa.array(ranks)), pa.string()),
            "reason": pa.array([NOT_FINITE] * len(ranks)),
        }
    )


def _count_labels(table: pa.Table) -> dict[str, int] | None:
    """Rows per label; None when there are no labels or too many."""
    if "label" not in table.column_names:
        return None
    counted = pc.value_counts(label_text(table["label"]))
    if len(counted) > MOST_LABELS:
        return None
    return {str(pair["values"]): int(pair["counts"]) for pair in counted.to_pylist()}


def label_text(labels: Any) -> Any:
    """Labels as strings; null is its own category."""
    return pc.fill_null(pc.cast(labels, pa.string()), "(none)")


def finish(_: Context[Source], records: list[Record]) -> dict[str, Any]:
    """Rows mapped and not, and the labels to colour by, most frequent first."""
    totals: Counter[str] = Counter()
    for record in records:
        totals.update(record.metrics["labels"] or {})
    usable = all(record.metrics["labels"] is not None for record in records)
    common = [label for label, _ in totals.most_common(COLOURED_LABELS)] if usable else []
    return {
        "n_mapped": sum(record.n_rows for record in records),
        "n_unmapped": sum(record.metrics["n_unmapped"] for record in records),
        "labels": sorted(common, key=_natural),
        "n_labels": len(totals) if usable else 0,
    }


def _natural(label: str) -> tuple[int, float, str]:
    """Numbers in numeric order, then words."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)


EMBED = Stage(
    name="embed",
    version=1,
    reads=("ingest", "train"),
    settings=lake_source,
    estimate=estimate,
    prepare=prepare,
    do_part=do_part,
    finish=finish,
)

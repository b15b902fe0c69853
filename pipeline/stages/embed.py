"""embed: every good row of the lake to its place on the map, one Parquet file per partition."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config import EmbedConfig, Job
from pipeline.errors import InputError
from pipeline.kernels.morton import morton_keys
from pipeline.lake import CHANGED, Rows, Source
from pipeline.manifest import Part, Plan, Record, Store
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage
from pipeline.stages.ingest import lake_source, read_good_rows

# A label with more values than this in one partition is not a category to colour by.
MOST_LABELS = 1000
COLOURED_LABELS = 20
NOT_FINITE = "coordinates not finite"
MOST_FOLDERS = 1000  # of one partition: more are no longer folders but rows
PUBLISHED_ENCODER = "encoder"  # the step that carries it to a refresh, in place of train
NOVEL = 0.99  # rows above this novelty are novel: one in a hundred where nothing has changed
DRIFT_ROWS = 10_000  # new rows that occupancy and the classifier are measured on
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
NO_PLACES = pa.table(
    {"x": pa.array([], pa.float32()), "y": pa.array([], pa.float32()), "label": pa.nulls(0)}
)


@dataclass(frozen=True)
class EmbedSettings:
    """What is read of the lake, and what the map's files look like."""

    source: Source
    embed: EmbedConfig


def settings(job: Job) -> EmbedSettings:
    """The lake with the columns that are handed on, and the files' shape."""
    return EmbedSettings(map_source(job), job.embed)


def map_source(job: Job) -> Source:
    """What of the lake the map needs."""
    return replace(lake_source(job), passed=job.embed.columns)


def estimate(job: Job, shape: Shape) -> Estimate:
    """One task holds a partition as read, its map and their encodings."""
    task = PROCESS_BYTES + 5 * int(job.input.partition_bytes) + 100 * shape.partition_rows
    return Estimate(shape.n_partitions, task, shape.n_rows * 24)


def prepare(context: Context[EmbedSettings]) -> Plan:
    """The lake's partitions, as ingest has them."""
    return Plan([record.partition for record in context.read("ingest").records])


def do_part(context: Context[EmbedSettings], partition: Partition, _: Report) -> Part:
    """A partition's map; rows that cannot be placed are set aside with the reason."""
    from pipeline import placing  # noqa: PLC0415 - loads torch, which the driver does not need

    ingest, config = context.read("ingest"), context.settings.embed
    record = ingest.records[partition.index]
    places = placing.Places(placing.load_encoder(context.inputs["train"]))
    rows, ranks = read_good_rows(context.settings.source, ingest, record, places.follow)
    xy = places.of(rows.vectors)
    mapped = np.isfinite(xy).all(axis=1)
    columns = {"id": rows.ids, "x": pa.array(xy[:, 0]), "y": pa.array(xy[:, 1])}
    if rows.labels is not None:
        columns["label"] = rows.labels
    seen = placing.judge_rows(context, partition, rows.vectors, xy)
    columns["novelty"] = pa.array(seen.novelty) if seen else pa.nulls(len(xy), pa.float32())
    columns |= {name: rows.passed[name].combine_chunks() for name in config.columns}
    table = pa.table(columns).filter(pa.array(mapped))
    if config.spatial_key:
        extent = context.read("train").manifest.metrics["extent"]
        table = table.append_column("morton", pa.array(morton_keys(xy[mapped], extent)))
    tables, order = arrange(table, config, partition)
    unmapped = _unmapped(rows, record, ranks, np.flatnonzero(~mapped))
    if unmapped.num_rows:
        tables["unmapped"] = unmapped
    metrics = {
        "n_unmapped": unmapped.num_rows,
        "n_changed": record.n_rows - len(rows.vectors),
        "labels": _count_labels(table),
    }
    arrays: dict[str, NDArray[Any]] = {} if order is None else {"order": order}
    if seen is not None:
        metrics["n_novel"] = int((seen.novelty[mapped] > NOVEL).sum())
        if len(seen.drawn):
            arrays["drawn"] = seen.drawn
    return Part(table.num_rows, arrays=arrays, tables=tables, metrics=metrics)


def arrange(
    table: pa.Table, config: EmbedConfig, partition: Partition
) -> tuple[dict[str, pa.Table], NDArray[np.int32] | None]:
    """The tables of a partition's files by name, and the rank of every row of them in `table`.

    The ranks are None where all rows are in one file and in the lake's order. No rows make no file:
    where all of them are lost nobody knows what type their ids have.
    """
    if not table.num_rows:
        return {}, None
    if not config.spatial_key and config.partition_by is None:
        return {"map": table}, None
    order = np.arange(table.num_rows)
    if config.spatial_key:
        order = np.argsort(table["morton"].to_numpy(), kind="stable")
    if config.partition_by is None:
        return {"map": table.take(pa.array(order))}, order.astype(np.int32)
    by = config.partition_by
    values = pc.fill_null(pc.cast(table[by], pa.string()), HIVE_NULL)
    codes = values.combine_chunks().dictionary_encode()
    if len(codes.dictionary) > MOST_FOLDERS:
        raise InputError(
            f"embed: column {by!r} has {len(codes.dictionary):,} values in partition "
            f"{partition.index}, at most {MOST_FOLDERS:,} make folders; choose another "
            "embed.partition_by or leave it out"
        )
    numbers, rest = codes.indices.to_numpy()[order], table.drop_columns([by])
    names = [f"map/{_quoted(by)}={_quoted(value)}" for value in codes.dictionary.to_pylist()]
    ranks = {name: order[numbers == number] for number, name in enumerate(names)}
    tables = {name: rest.take(pa.array(ranks[name])) for name in sorted(names)}
    together = np.concatenate([ranks[name] for name in tables])
    return tables, together.astype(np.int32)


def _quoted(text: str) -> str:
    """The text as a folder's name, as Hive has it."""
    return quote(text, safe=" ")


def map_names(record: Record) -> list[str]:
    """Names of the tables that are a partition's map, in the order of its ranks."""
    names = [name.removesuffix(".parquet") for name in record.objects if name.startswith("map")]
    return sorted(names)


def read_map(store: Store, record: Record) -> pa.Table:
    """Place and label of a partition's rows, in the lake's order, whatever its files' is."""
    tables = [] if record.n_rows else [NO_PLACES]
    for name in map_names(record):
        table = store.table(record, name)
        key, _, value = name.removeprefix("map/").partition("=")
        if key == "label":
            label = None if value == HIVE_NULL else unquote(value)
            table = table.append_column("label", pa.array([label] * table.num_rows, pa.string()))
        tables.append(table.select([n for n in ("x", "y", "label") if n in table.column_names]))
    table = pa.concat_tables(tables)
    if not any(name.startswith("arrays/order/") for name in record.objects):
        return table
    return table.take(pa.array(np.argsort(store.arrays(record).read("order"))))


def _unmapped(
    rows: Rows, record: Record, ranks: NDArray[np.int64], numbers: NDArray[np.int64]
) -> pa.Table:
    """Quarantine entries, by rank: the rows of these numbers, and those of files that changed."""
    file = record.partition.pieces[0].path
    stayed = np.zeros(record.n_rows, bool)
    stayed[ranks] = True
    gone = np.flatnonzero(~stayed)
    ids = pc.cast(rows.ids.take(pa.array(numbers)), pa.string()).to_pylist()
    n_lost, n_gone = len(numbers), len(gone)
    table = pa.table(
        {
            "file": pa.array([file] * n_lost + [",".join(rows.lost)] * n_gone, pa.string()),
            "row": pa.array(np.concatenate([ranks[numbers], gone]), pa.int64()),
            "id": pa.array(ids + [None] * n_gone, pa.string()),
            "reason": pa.array([NOT_FINITE] * n_lost + [CHANGED] * n_gone, pa.string()),
        }
    )
    return table.sort_by("row")


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


def finish(_: Context[EmbedSettings], records: list[Record]) -> dict[str, Any]:
    """Rows mapped and not, and the labels to colour by, most frequent first."""
    totals: Counter[str] = Counter()
    for record in records:
        totals.update(record.metrics["labels"] or {})
    usable = all(record.metrics["labels"] is not None for record in records)
    common = [label for label, _ in totals.most_common(COLOURED_LABELS)] if usable else []
    return {
        "n_mapped": sum(record.n_rows for record in records),
        "n_unmapped": sum(record.metrics["n_unmapped"] for record in records),
        "n_changed": sum(record.metrics["n_changed"] for record in records),
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
    version=3,
    reads=("ingest", "train"),
    settings=settings,
    estimate=estimate,
    prepare=prepare,
    do_part=do_part,
    finish=finish,
)

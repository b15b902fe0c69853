"""refresh: the published map brought to today's lake with the published encoder.

encoder    the published encoder, as a store that embed reads
tally      rows per pixel of the map files that come, less those of the files that go
republish  picture, report, metrics and snapshot of the map as it is then

Between them `ingest` and `embed` run on the rows that are not on the map yet. The plans of tally
and republish are written by who runs them, from the comparison of the two lakes.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from pipeline.config import Job
from pipeline.drift_log import drift_section, extend_log
from pipeline.errors import InputError, StageError
from pipeline.gates import share_lost
from pipeline.lake.delta import Changes
from pipeline.manifest import Part, Plan, Record, Store
from pipeline.partitions import Partition
from pipeline.picture import OTHER_NAME, Raster, draw_map, rasterize
from pipeline.published import (
    DENSITY,
    SNAPSHOT,
    MapPart,
    PublishedMap,
    add_counts,
    density_table,
    encode_snapshot,
    load_snapshot,
    read_density,
)
from pipeline.report import render_report
from pipeline.run_report import PublishSettings, make_report
from pipeline.runner import Report as Progress
from pipeline.runs import load_manifest, read_file
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage, one_partition
from pipeline.stages import publish
from pipeline.stages.embed import (
    COLOURED_LABELS,
    HIVE_NULL,
    PUBLISHED_ENCODER,
    label_text,
    map_names,
)
from pipeline.stages.evaluate import MAP_FILES_PER_TASK, PIXELS, categories, category_codes
from pipeline.stores import Folder, decode_table

CHANGES = ("new", "changed", "removed", "kept")


@dataclass(frozen=True)
class NoSettings:
    """Nothing: the stage depends on its inputs alone."""


def no_settings(_: Job) -> NoSettings:
    """No settings."""
    return NoSettings()


def estimate_encoder(job: Job, shape: Shape) -> Estimate:
    """One task holds the weights a few times."""
    hidden, depth = job.train.encoder.hidden, 2 * job.train.encoder.layers + 2
    weights = 4 * hidden * (shape.width + hidden * depth) + 400 * shape.width
    return Estimate(1, PROCESS_BYTES + 6 * weights, 2 * weights)


def carry_encoder(context: Context[NoSettings], _: Partition, __: Progress) -> Part:
    """The files of the published encoder, which must be the one that made the map."""
    from encoders.artifact import (  # noqa: PLC0415 - loads torch, which the driver does not need
        HEADER_FILE,
        WEIGHTS_FILE,
        ArtifactError,
        Encoder,
    )
    from encoders.reference import REFERENCE_FILE, Reference  # noqa: PLC0415 - loads torch

    run, digest = context.inputs["model"].folder, context.inputs["model"].digest
    names = (WEIGHTS_FILE, HEADER_FILE, REFERENCE_FILE)
    files = {name: _read(run, f"model/{name}") for name in names}
    try:
        encoder = Encoder.from_files(files)
        Reference.from_bytes(files[REFERENCE_FILE], encoder)
    except ArtifactError as error:
        raise InputError(f"{run.url}/model: {error}; lakemap run makes a new map") from error
    if encoder.digest != digest:
        raise InputError(
            f"{run.url}/model: encoder {encoder.digest[:12]}, the map was made with {digest[:12]}; "
            "restore its files, or lakemap run makes a new map"
        )
    metrics = {"extent": list(load_snapshot(run).extent), "encoder": digest}
    return Part(0, files=files, metrics=metrics)


def first_metrics(_: Context[Any], records: list[Record]) -> dict[str, Any]:
    """The metrics of the only task."""
    return records[0].metrics


def _read(run: Folder, name: str) -> bytes:
    return read_file(run, _listing(run), name)


@lru_cache(maxsize=2)
def _listing(run: Folder) -> dict[str, dict[str, int]]:
    """The files of a finished run, read once per process."""
    manifest = load_manifest(run)
    assert manifest is not None, "its snapshot was read"
    return dict(manifest["files"])


def estimate_tally(_: Job, shape: Shape) -> Estimate:
    """One task holds the raster of all categories, its encoding and one map file."""
    raster = (COLOURED_LABELS + 1) * PIXELS * PIXELS * 4
    n_parts = -(-2 * shape.n_partitions // MAP_FILES_PER_TASK)
    return Estimate(n_parts, PROCESS_BYTES + 4 * raster + shape.partition_rows * 100, n_parts << 20)


def plan_tally(
    published: PublishedMap, kept: list[MapPart], gone: list[MapPart], embed: Store
) -> Plan:
    """Runs of map files: first those that go, then those that come.

    Where nothing stays there is nothing to take away from: the picture begins anew.
    """
    names = [name for part in gone for name in part.map_files] if kept else []
    n_files = len(names) + len(_new_files(embed))
    starts = range(0, n_files, MAP_FILES_PER_TASK)
    parts = [
        Partition(index, start, min(start + MAP_FILES_PER_TASK, n_files))
        for index, start in enumerate(starts)
    ]
    shown = _categories(published, count_labels(embed)) if kept else categories(embed)
    return Plan(parts, {"gone": names, "categories": list(shown), "anew": not kept})


def _categories(published: PublishedMap, labels: dict[str, int] | None) -> tuple[str, ...]:
    """The published categories, each in its place, then labels that the map did not have."""
    if published.labels is None or labels is None:
        return ("",)
    known = tuple(name for name in published.categories if name not in ("", OTHER_NAME))
    new = sorted(labels.keys() - published.labels.keys())
    room = COLOURED_LABELS - len(known)
    names = (*known, *new[:room]) if room > 0 else known
    others = OTHER_NAME in published.categories or len(new) > max(0, room)
    return (*names, OTHER_NAME) if others else names or ("",)


def count_labels(embed: Store) -> dict[str, int] | None:
    """Rows of every label among the new rows; none where there are no new rows."""
    return publish.count_labels(embed) if embed.records else {}


def _new_files(embed: Store) -> list[tuple[Record, str]]:
    return [(record, name) for record in embed.records for name in map_names(record)]


def tally_part(context: Context[NoSettings], partition: Partition, _: Progress) -> Part:
    """Rows per pixel and category that a run of map files adds, or takes away."""
    run, embed = context.inputs["published"].folder, context.read("embed")
    extent, gone = load_snapshot(run).extent, context.facts["gone"]
    names, new = tuple(context.facts["categories"]), _new_files(embed)
    counts = np.zeros((len(names), PIXELS, PIXELS), np.int32)
    lost: Counter[str] = Counter()
    for position in range(partition.start, partition.stop):
        if position < len(gone):
            table, sign = _places(_read(run, gone[position]), gone[position].split("/")[1]), -1
            if names != ("",):
                lost.update(Counter(label_text(table["label"]).to_pylist()))
        else:
            record, name = new[position - len(gone)]
            data = embed.file(record, f"{name}.parquet")
            table, sign = _places(data, name.removeprefix("map/")), 1
        xy = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
        counts += sign * rasterize(
            xy, category_codes(table, names), len(names), extent, PIXELS
        ).astype(np.int32)
    return Part(0, arrays={"counts": counts}, metrics={"lost": dict(lost)})


def _places(data: bytes, folder: str) -> pa.Table:
    """Place and label of a map file's rows; the label may be the name of its folder."""
    table = decode_table(data)
    key, _, value = folder.partition("=")
    if key == "label":
        label = None if value == HIVE_NULL else unquote(value)
        table = table.append_column("label", pa.array([label] * table.num_rows, pa.string()))
    return table.select([name for name in ("x", "y", "label") if name in table.column_names])


def plan_republish(kept: list[MapPart], files: Mapping[str, Any], changes: Changes) -> Plan:
    """One task, which is told what stays, the lake's files and what became of them."""
    facts = {
        "kept": [part.number for part in kept],
        "files": dict(files),
        "changes": dict(vars(changes)),
    }
    return Plan([Partition(0, 0, 1)], facts)


def count_rows(
    parts: tuple[MapPart, ...], published: PublishedMap, changes: Mapping[str, int]
) -> dict[str, Any]:
    """The rows of the new map, checked against the files, and what became of the old ones."""
    rows: dict[str, Any] = {
        "rows_read": sum(part.n_rows for part in parts),
        "rows_mapped": sum(part.n_mapped for part in parts),
        "rows_quarantined": sum(sum(part.reasons.values()) for part in parts),
        "rows_held_out": sum(part.n_holdout for part in parts),
    }
    planned = sum(changes[f"rows_{name}"] for name in ("new", "changed", "kept"))
    if not rows["rows_read"] == rows["rows_mapped"] + rows["rows_quarantined"] == planned:
        raise StageError(f"refresh: rows do not add up: {rows}, the lake has {planned}")
    lost = share_lost(rows["rows_mapped"], published.n_mapped)
    return rows | dict(changes) | {"rows_lost": lost}


def all_parts(
    published: PublishedMap, kept: list[int], ingest: Store, embed: Store
) -> tuple[MapPart, ...]:
    """The partitions of the new map: those that stay, by number, and the new ones."""
    stays = set(kept)
    old = [part for part in published.parts if part.number in stays]
    return (*old, *publish.map_parts(ingest, embed, published.next_number))


def republish_part(context: Context[PublishSettings], _: Partition, __: Progress) -> Part:
    """The files of the refreshed run that are neither map nor model."""
    run, facts = context.inputs["published"].folder, context.facts
    ingest, embed = context.read("ingest"), context.read("embed")
    published = load_snapshot(run)
    parts = all_parts(published, facts["kept"], ingest, embed)
    metrics = json.loads(_read(run, "metrics.json"))
    metrics |= count_rows(parts, published, facts["changes"])
    metrics |= {"rows_bad": sum(sum(p.reasons.values()) for p in parts[len(facts["kept"]) :])}
    metrics |= {"trained_in": published.trained_in} | context.read("drift").manifest.metrics
    log = extend_log(context, metrics, "refresh")
    raster = _raster(context, published, metrics["rows_mapped"])
    snapshot = replace(
        published,
        settings=context.settings.kept,
        files={path: (size, etag) for path, (size, etag) in facts["files"].items()},
        parts=parts,
        next_number=published.next_number + len(ingest.records),
        dtype=ingest.manifest.facts["dtype"] if ingest.records else published.dtype,
        mark=ingest.manifest.facts["mark"],
        categories=raster.categories,
        labels=_labels(context, published),
    )
    picture = draw_map(raster, context.settings.name)
    report = replace(
        make_report(context, metrics, picture, parts),
        changes=tuple((n, metrics[f"files_{n}"], metrics[f"rows_{n}"]) for n in CHANGES),
        drift=drift_section(context.settings.drift, metrics, log),
        trained_in=published.trained_in,
    )
    files = {
        "map.png": picture,
        "report.html": render_report(report).encode(),
        "metrics.json": json.dumps(metrics, indent=1, sort_keys=True).encode(),
        "job.yaml": context.settings.job.encode(),
        SNAPSHOT: encode_snapshot(snapshot),
    }
    tables = {"density": density_table(raster), "drift": log}
    return Part(metrics["rows_mapped"], files=files, tables=tables)


def _raster(context: Context[Any], published: PublishedMap, n_mapped: int) -> Raster:
    """Rows per pixel: those that were published, less those that went, and those that came."""
    tally = context.read("tally")
    names = tuple(tally.manifest.facts["categories"])
    counts = np.zeros((len(names), PIXELS, PIXELS), np.int64)
    if not tally.manifest.facts["anew"]:
        data = _read(context.inputs["published"].folder, DENSITY)
        before = read_density(data, len(published.categories), PIXELS)
        if names == ("",):
            counts += before.sum(axis=0)
        elif published.categories != ("",):
            counts[[names.index(name) for name in published.categories]] = before
    for record in tally.records:
        counts += tally.arrays(record).read("counts")
    if counts.min() < 0:
        raise StageError("refresh: more rows left the picture than were in it; lakemap run anew")
    return Raster(counts, names, published.extent, n_mapped - int(counts.sum()))


def _labels(context: Context[Any], published: PublishedMap) -> dict[str, int] | None:
    """Rows of every label of the new map."""
    tally, embed = context.read("tally"), context.read("embed")
    new = count_labels(embed)
    if tally.manifest.facts["anew"]:
        return new
    if published.labels is None or new is None:
        return None
    lost = add_counts(record.metrics["lost"] for record in tally.records)
    left = add_counts([published.labels, new, {k: -n for k, n in lost.items()}])
    return {label: count for label, count in left.items() if count > 0}


ENCODER = Stage(
    name=PUBLISHED_ENCODER,
    version=1,
    reads=("model",),
    settings=no_settings,
    estimate=estimate_encoder,
    prepare=one_partition,
    do_part=carry_encoder,
    finish=first_metrics,
)
TALLY = Stage(
    name="tally",
    version=1,
    reads=("published", "today", "embed"),
    settings=no_settings,
    estimate=estimate_tally,
    prepare=one_partition,
    do_part=tally_part,
)
REPUBLISH = Stage(
    name="republish",
    version=1,
    reads=("published", "today", "ingest", "embed", "drift", "tally"),
    settings=publish.settings,
    estimate=publish.estimate,
    prepare=one_partition,
    do_part=republish_part,
)

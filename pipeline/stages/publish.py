"""publish: picture, report and metrics of a run; then the run itself and its place in the history.

A run's folder is made of links to (on object stores: copies of) the stores' files, so the stores
can be removed once it is published. Its manifest is written last, its entry in the history then.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline import history
from pipeline.cluster_config import ClusterConfig
from pipeline.config import Job, MetricsConfig, to_yaml
from pipeline.curves import draw_curves
from pipeline.drift_log import drift_section, extend_log
from pipeline.errors import StageError
from pipeline.gates import share_lost
from pipeline.lake import CHANGED
from pipeline.manifest import Part, Record, Store
from pipeline.moved import draw_moved, keep_colours
from pipeline.partitions import Partition
from pipeline.picture import Raster, draw_map
from pipeline.published import (
    SNAPSHOT,
    MapPart,
    PublishedMap,
    add_counts,
    check_rows,
    density_table,
    encode_snapshot,
    job_settings,
    load_snapshot,
    published_raster,
)
from pipeline.report import Report, render_report
from pipeline.run_report import PublishSettings, make_report
from pipeline.runner import Report as Progress
from pipeline.runs import RunFile, assemble, run_name
from pipeline.stage import (
    PROCESS_BYTES,
    Context,
    Estimate,
    Shape,
    Stage,
    one_partition,
)
from pipeline.stages.embed import COLOURED_LABELS, NOT_FINITE
from pipeline.stages.evaluate import PIXELS, categories
from pipeline.stores import Folder


def settings(job: Job) -> PublishSettings:
    """Name, gates and the job's text, less cluster and metrics, on which nothing depends."""
    plain = replace(job, cluster=ClusterConfig(), metrics=MetricsConfig())
    return PublishSettings(job.name, job.gates, to_yaml(plain), job_settings(job), job.drift)


def estimate(_: Job, __: Shape) -> Estimate:
    """One task holds the raster of all categories a few times."""
    raster = (COLOURED_LABELS + 1) * PIXELS * PIXELS * 8
    return Estimate(1, PROCESS_BYTES + 6 * raster, 4 << 20)


def gather_metrics(context: Context[PublishSettings]) -> dict[str, Any]:
    """All figures of the run, rows included."""
    ingest, embed = context.read("ingest").manifest, context.read("embed").manifest
    train = context.read("train").manifest.metrics
    rows = {
        "rows_read": ingest.facts["n_rows"],
        "rows_mapped": embed.n_rows,
        "rows_quarantined": ingest.metrics["n_bad"] + embed.metrics["n_unmapped"],
        "rows_held_out": ingest.metrics["n_holdout"],
        "rows_trained": context.read("sample").n_rows,
    }
    if rows["rows_read"] != rows["rows_mapped"] + rows["rows_quarantined"]:
        raise StageError(f"publish: rows do not add up: {rows}; nothing was published")
    recall, quality = (
        context.read("recall").manifest.metrics,
        context.read("evaluate").manifest.metrics,
    )
    training = {name: train[name] for name in ("loss", "pair_clipped", "layer_clipped", "encoder")}
    affinity = context.read("affinity").manifest.metrics
    chosen = context.read("centroids").manifest.metrics
    cells = {name: chosen[name] for name in ("cells", "overlap", "coverage")}
    found = rows | cells | recall | affinity | training | quality
    for name in ("drift", "displacement"):
        found |= context.read(name).manifest.metrics if name in context.inputs else {}
    if "published" in context.inputs:
        before = load_snapshot(context.inputs["published"].folder).n_mapped
        found |= {"rows_lost": share_lost(rows["rows_mapped"], before)}
    return found


def do_part(context: Context[PublishSettings], _: Partition, __: Progress) -> Part:
    """The report, the picture, the metrics and the job, as files."""
    metrics = gather_metrics(context) | {"trained_in": run_name(context.folder)}
    raster = _raster(context)
    snapshot = _snapshot(context, raster.categories)
    picture = draw_map(raster, context.settings.name)
    report = _report(context, metrics, picture, snapshot.parts)
    tables = {"density": density_table(raster)}
    files = {}
    if "published" in context.inputs:
        tables["drift"] = extend_log(context, metrics, "retrain")
        files["displacement.png"] = _side_by_side(context, raster)
        drift = drift_section(context.settings.drift, metrics, tables["drift"])
        report = replace(report, drift=drift, moved=files["displacement.png"])
    files |= {
        "map.png": picture,
        "report.html": render_report(report).encode(),
        "metrics.json": json.dumps(metrics, indent=1, sort_keys=True).encode(),
        "job.yaml": context.settings.job.encode(),
        SNAPSHOT: encode_snapshot(snapshot),
    }
    return Part(metrics["rows_mapped"], files=files, tables=tables)


def _side_by_side(context: Context[PublishSettings], raster: Raster) -> bytes:
    """The published map beside this one, with the ways of rows that are on both."""
    run, moved = context.inputs["published"].folder, context.read("displacement")
    table = moved.table(moved.records[0], "moved")
    ways = np.stack([table[name].to_numpy() for name in table.column_names], axis=1)
    return draw_moved(published_raster(run, PIXELS), raster, ways)


def _snapshot(context: Context[PublishSettings], shown: tuple[str, ...]) -> PublishedMap:
    ingest, embed, train = (context.read(name) for name in ("ingest", "embed", "train"))
    facts, made = ingest.manifest.facts, train.manifest.metrics
    parts = map_parts(ingest, embed)
    x0, x1, y0, y1 = made["extent"]
    return PublishedMap(
        name=context.settings.name,
        settings=context.settings.kept,
        encoder=made["encoder"],
        trained_in=run_name(context.folder),
        extent=(x0, x1, y0, y1),
        width=facts["width"],
        dtype=facts["dtype"],
        mark=facts["mark"],
        files={path: (size, etag) for path, (size, etag) in facts["files"].items()},
        parts=tuple(parts),
        next_number=len(parts),
        categories=shown,
        labels=count_labels(embed),
    )


def map_parts(ingest: Store, embed: Store, first: int = 0) -> list[MapPart]:
    """The partitions of a map, numbered from `first`; their rows must add up."""
    parts = [
        MapPart(
            number=first + checked.partition.index,
            pieces=checked.partition.pieces,
            n_mapped=placed.n_rows,
            n_holdout=checked.metrics["n_holdout"],
            reasons=_part_reasons(checked, placed),
            files=tuple(
                name
                for stage, record in (("embed", placed), ("ingest", checked))
                for key in record.objects
                for name in [file_name(stage, key, first + record.partition.index)]
                if name is not None
            ),
        )
        for checked, placed in zip(ingest.records, embed.records, strict=True)
    ]
    wrong = check_rows(parts)
    if wrong:
        raise StageError(f"publish: rows do not add up: {wrong}; nothing was published")
    return parts


def _part_reasons(checked: Record, placed: Record) -> dict[str, int]:
    """Rows of a partition that are not on the map, by reason."""
    reasons, lost = Counter(checked.metrics["reasons"]), placed.metrics
    reasons[CHANGED] += lost["n_changed"]
    reasons[NOT_FINITE] += lost["n_unmapped"] - lost["n_changed"]
    return {reason: count for reason, count in reasons.items() if count}


def count_labels(embed: Store) -> dict[str, int] | None:
    """Rows of every label; None where there are none to colour by, or too many."""
    counts = [record.metrics["labels"] for record in embed.records]
    return None if any(labels is None for labels in counts) else add_counts(counts)


def _raster(context: Context[PublishSettings]) -> Raster:
    survey = context.read("survey")
    names = categories(context.read("embed"))
    counts = np.zeros((len(names), PIXELS, PIXELS), np.int64)
    for record in survey.records:
        counts += survey.arrays(record).read("counts")
    x0, x1, y0, y1 = context.read("train").manifest.metrics["extent"]
    raster = Raster(counts, names, (x0, x1, y0, y1), survey.manifest.metrics["n_outside"])
    if "published" not in context.inputs:
        return raster
    return keep_colours(raster, load_snapshot(context.inputs["published"].folder).categories)


def _report(
    context: Context[PublishSettings],
    metrics: Mapping[str, Any],
    picture: bytes,
    parts: Iterable[MapPart],
) -> Report:
    train = context.read("train")
    telemetry = train.table(train.records[0], "telemetry")
    curves = draw_curves({name: telemetry[name].to_numpy() for name in telemetry.column_names})
    return replace(make_report(context, metrics, picture, parts), curves=curves)


PUBLISH = Stage(
    name="publish",
    version=2,
    reads=(
        "ingest",
        "sample",
        "centroids",
        "assign",
        "search",
        "neighbors",
        "recall",
        "affinity",
        "transpose",
        "symmetrize",
        "draw",
        "edges",
        "train",
        "embed",
        "survey",
        "evaluate",
    ),
    settings=settings,
    estimate=estimate,
    prepare=one_partition,
    do_part=do_part,
)


def after_retraining(has_drift: bool) -> Stage[PublishSettings]:
    """The step for an encoder that was trained again, with the drift that led to it if it did."""
    more = ("published", "displacement", *(("drift",) if has_drift else ()))
    return replace(PUBLISH, reads=(*PUBLISH.reads, *more))


def release(
    root: Folder,
    stores: Mapping[str, Store],
    after: history.Entry | None,
    action: history.Action = "run",
) -> tuple[Folder, bool]:
    """The published run's folder, and whether anything had to be done.

    `after` is the publication that was in force when the run began.
    """
    store = stores["publish"]
    run = root.join(f"runs/{run_name(store.folder)}")
    metrics = json.loads(store.file(store.records[0], "metrics.json"))
    files = [
        file
        for stage in ("embed", "ingest", "train", "publish")
        for file in run_files(stage, stores[stage])
    ]
    made_from = {name: store.manifest.fingerprint for name, store in stores.items()}
    assemble(run, files, metrics, made_from)
    return run, history.publish(root, after, run_name(run), action, metrics["rows_mapped"])


def run_files(stage: str, store: Store, first: int = 0) -> list[RunFile]:
    """The files of a run that come from a store, whose first partition has the number `first`."""
    return [
        RunFile(store.folder, f"{record.key}/{name}", target, record.objects[name], crc32)
        for record in store.records
        for name, crc32 in record.crcs.items()
        for target in [file_name(stage, name, first + record.partition.index)]
        if target is not None
    ]


def file_name(stage: str, name: str, number: int) -> str | None:
    """What an object of a store is called in a run; None if it is not part of it."""
    if stage == "embed" and name.startswith("map"):  # map.parquet, or map/key=value.parquet
        return f"{name.removesuffix('.parquet')}/{number:06d}.parquet"
    if stage == "publish":
        return name
    return {
        ("embed", "unmapped.parquet"): f"quarantine/embed-{number:06d}.parquet",
        ("ingest", "quarantine.parquet"): f"quarantine/ingest-{number:06d}.parquet",
        ("train", "encoder.safetensors"): "model/encoder.safetensors",
        ("train", "encoder.json"): "model/encoder.json",
        ("train", "reference.safetensors"): "model/reference.safetensors",
        ("train", "telemetry.parquet"): "telemetry.parquet",
    }.get((stage, name))

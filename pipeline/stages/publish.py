"""publish: picture, report and metrics of a run; then the run itself and its place in the history.

A run's folder is made of links to (on object stores: copies of) the stores' files, so the stores
can be removed once it is published. Its manifest is written last, its entry in the history then.
"""

import importlib.metadata
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pipeline import history
from pipeline.cluster_config import ClusterConfig
from pipeline.config import DriftConfig, GatesConfig, Job, MetricsConfig, to_yaml
from pipeline.curves import draw_curves
from pipeline.drift_log import drift_section, extend_log
from pipeline.errors import GateError, StageError
from pipeline.lake import CHANGED
from pipeline.manifest import Part, Record, Store
from pipeline.moved import draw_moved
from pipeline.partitions import Partition
from pipeline.picture import Raster, draw_map
from pipeline.published import (
    SNAPSHOT,
    MapPart,
    PublishedMap,
    check_rows,
    density_table,
    encode_snapshot,
    job_settings,
    load_snapshot,
    published_raster,
)
from pipeline.report import Gate, Metric, Report, RowCount, StageRow, render_report
from pipeline.runner import Report as Progress
from pipeline.runs import RunFile, assemble, run_name
from pipeline.stage import (
    PROCESS_BYTES,
    Context,
    Estimate,
    Shape,
    Stage,
    StoreRef,
    load_timing,
    one_partition,
)
from pipeline.stages.embed import COLOURED_LABELS, NOT_FINITE
from pipeline.stages.evaluate import PIXELS, categories
from pipeline.stores import Folder

SHOWN_BAD_ROWS = 20
MEANINGS = {
    "accuracy": "labels guessed right from a row's nearest rows on the map",
    "trustworthiness": "map neighbours that are neighbours in the lake (1 is best)",
    "recall": "share of the true nearest neighbours that the kNN graph holds",
    "continuity": "lake neighbours that are neighbours on the map (1 is best)",
    "neighbor_recall": "share of a row's nearest rows that are also nearest on the map",
}
# Gates that are not to be exceeded, and what they are of; refreshes and retrainings measure it.
MOST = {"rows_lost": "rows_lost", "displacement": "displacement_p95"}
FILES = (
    ("map/", "every row's place: id, x, y, label and further columns where asked for (Parquet)"),
    ("model/", "the encoder: weights, settings and a digest (safetensors and JSON)"),
    ("map.png", "the picture above"),
    ("metrics.json", "the figures of this page, for programs"),
    ("quarantine/", "rows that could not be mapped, with the reason (Parquet)"),
    ("job.yaml", "the job, defaults included"),
    ("snapshot.json", "of which rows of which files of the lake every map file is"),
    ("density.parquet", "rows per pixel and category of the picture"),
    ("drift.parquet", "how new the rows of every refresh were, and what followed"),
    ("manifest.json", "every file of the run with its size and checksum"),
)
VERSIONS = ("lakemap", "dask", "faiss-cpu", "faiss-gpu", "numpy", "pyarrow", "torch", "zarr")


@dataclass(frozen=True)
class PublishSettings:
    """What the report depends on."""

    name: str
    gates: GatesConfig
    job: str
    kept: dict[str, Any]  # settings that a refresh compares with its own
    drift: DriftConfig


def settings(job: Job) -> PublishSettings:
    """Name, gates and the job's text, less cluster and metrics, on which nothing depends."""
    plain = replace(job, cluster=ClusterConfig(), metrics=MetricsConfig())
    return PublishSettings(job.name, job.gates, to_yaml(plain), job_settings(job), job.drift)


def estimate(_: Job, __: Shape) -> Estimate:
    """One task holds the raster of all categories a few times."""
    raster = (COLOURED_LABELS + 1) * PIXELS * PIXELS * 8
    return Estimate(1, PROCESS_BYTES + 6 * raster, 4 << 20)


def check_gates(gates: GatesConfig, metrics: Mapping[str, Any]) -> None:
    """Refuse when a measured figure does not pass its gate."""
    for gate in judge(gates, metrics):
        if MOST.get(gate.name, gate.name) in metrics and not gate.passed:
            found = "not measured" if gate.found is None else f"{gate.found:.4f}"
            needs, cure = f"the job needs {gate.needed:g}", "improve the map or lower"
            if gate.at_most:
                needs, cure = f"the job allows {gate.needed:g}", "look at the lake or raise"
            raise GateError(
                f"gate {gate.name}: {found}, {needs}; nothing was published, "
                f"CURRENT is as it was; {cure} gates.{gate.name}"
            )


def judge(gates: GatesConfig, metrics: Mapping[str, Any]) -> list[Gate]:
    """Every gate the job sets, with what was found; those of refreshes only where they apply."""
    found: list[Gate] = []
    for name, needed in asdict(gates).items():
        measured, at_most = MOST.get(name, name), name in MOST
        if needed is None or (at_most and measured not in metrics):
            continue
        value = metrics.get(measured)
        passed = value is not None and (value <= needed if at_most else value >= needed)
        found.append(Gate(name, needed, value, passed, at_most))
    return found


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


def share_lost(n_now: int, n_before: int) -> float:
    """The share of the rows of the map that it has no more."""
    return max(0.0, 1 - n_now / max(1, n_before))


def do_part(context: Context[PublishSettings], _: Partition, __: Progress) -> Part:
    """The report, the picture, the metrics and the job, as files."""
    metrics = gather_metrics(context) | {"trained_in": run_name(context.folder)}
    raster = _raster(context)
    picture = draw_map(raster, context.settings.name)
    report = _report(context, metrics, picture)
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
        SNAPSHOT: encode_snapshot(_snapshot(context)),
    }
    return Part(metrics["rows_mapped"], files=files, tables=tables)


def _side_by_side(context: Context[PublishSettings], raster: Raster) -> bytes:
    """The published map beside this one, with the ways of rows that are on both."""
    run, moved = context.inputs["published"].folder, context.read("displacement")
    table = moved.table(moved.records[0], "moved")
    ways = np.stack([table[name].to_numpy() for name in table.column_names], axis=1)
    return draw_moved(published_raster(run, PIXELS), raster, ways)


def _snapshot(context: Context[PublishSettings]) -> PublishedMap:
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
        categories=categories(embed),
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


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of the counts, by name."""
    totals: Counter[str] = Counter()
    for found in counts:
        totals.update(found)
    return dict(totals)


def _raster(context: Context[PublishSettings]) -> Raster:
    survey = context.read("survey")
    names = categories(context.read("embed"))
    counts = np.zeros((len(names), PIXELS, PIXELS), np.int64)
    for record in survey.records:
        counts += survey.arrays(record).read("counts")
    x0, x1, y0, y1 = context.read("train").manifest.metrics["extent"]
    return Raster(counts, names, (x0, x1, y0, y1), survey.manifest.metrics["n_outside"])


def _report(context: Context[PublishSettings], metrics: dict[str, Any], picture: bytes) -> Report:
    ingest, train = context.read("ingest"), context.read("train")
    telemetry = train.table(train.records[0], "telemetry")
    return Report(
        name=context.settings.name,
        run_id=run_name(context.folder),
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        picture=picture,
        curves=draw_curves({name: telemetry[name].to_numpy() for name in telemetry.column_names}),
        stages=tuple(
            stage_row(name, ref, context)
            for name, ref in context.inputs.items()
            if name != "published"
        ),
        metrics=metric_rows(metrics),
        gates=tuple(judge(context.settings.gates, metrics)),
        rows=RowCount(
            read=metrics["rows_read"],
            mapped=metrics["rows_mapped"],
            quarantined=metrics["rows_quarantined"],
            trained=metrics["rows_trained"],
            held_out=metrics["rows_held_out"],
        ),
        quarantine=count_reasons(map_parts(ingest, context.read("embed"))),
        quarantine_examples=bad_rows(ingest),
        warnings=tuple(ingest.manifest.facts["warnings"]),
        files=FILES,
        job=context.settings.job,
        versions=installed_versions(),
    )


def metric_rows(metrics: Mapping[str, Any]) -> tuple[Metric, ...]:
    """The qualities of the map, those that were measured first."""
    recall_interval = (metrics["recall_low"], metrics["recall_high"])
    measured_on = f"; on {metrics['n_queries']:,} {metrics['evaluated_on']}"
    rows = [
        Metric(
            name,
            metrics[name],
            meaning if name == "recall" else meaning + measured_on,
            recall_interval if name == "recall" else None,
        )
        for name, meaning in MEANINGS.items()
    ]
    return tuple(sorted(rows, key=lambda row: row.value is None))


def stage_row(name: str, ref: StoreRef, context: Context[Any]) -> StageRow:
    """What a step of the run did."""
    manifest, timing = context.read(name).manifest, load_timing(ref.folder)
    return StageRow(
        name=name,
        n_parts=len(manifest.records),
        n_rows=manifest.n_rows,
        seconds=timing.task_seconds,
        wall_seconds=timing.wall_seconds,
        rows_per_second=manifest.n_rows / max(timing.wall_seconds, 1e-9),
        peak_bytes=timing.peak_bytes,
        store=f"{name}/{manifest.fingerprint}",
    )


def count_reasons(parts: Iterable[MapPart]) -> tuple[tuple[str, int], ...]:
    """Rows in the quarantine by reason; together they are all rows that are not on the map."""
    return tuple(add_counts(part.reasons for part in parts).items())


def bad_rows(ingest: Store) -> tuple[tuple[str, int, str, str], ...]:
    """The first rows of the quarantine."""
    found: list[tuple[str, int, str, str]] = []
    for record in ingest.records:
        if record.metrics["n_bad"] and len(found) < SHOWN_BAD_ROWS:
            for row in ingest.table(record, "quarantine").to_pylist():
                found.append((row["file"], row["row"], row["id"] or "", row["reason"]))
    return tuple(found[:SHOWN_BAD_ROWS])


def installed_versions() -> tuple[tuple[str, str], ...]:
    """Versions of what the results may depend on."""
    installed = {
        dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()
    }
    return tuple((name, installed[name]) for name in VERSIONS if name in installed)


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

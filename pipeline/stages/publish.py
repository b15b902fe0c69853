"""publish: picture, report and metrics of a run; then the run itself, and CURRENT to point at it.

A run's folder is made of links to (on object stores: copies of) the stores' files, so the stores
can be removed once it is published. Its manifest is written last, CURRENT after that.
"""

import importlib.metadata
import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from pipeline.config import ClusterConfig, GatesConfig, Job, MetricsConfig, to_yaml
from pipeline.curves import draw_curves
from pipeline.errors import GateError, StageError, StoreError
from pipeline.lake import CHANGED
from pipeline.manifest import Part, Store
from pipeline.partitions import Partition
from pipeline.picture import Raster, draw_map
from pipeline.report import Gate, Metric, Report, RowCount, StageRow, render_report
from pipeline.runner import Report as Progress
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
FORMAT = 1
MEANINGS = {
    "accuracy": "labels guessed right from a row's nearest rows on the map",
    "trustworthiness": "map neighbours that are neighbours in the lake (1 is best)",
    "recall": "share of the true nearest neighbours that the kNN graph holds",
    "continuity": "lake neighbours that are neighbours on the map (1 is best)",
    "neighbor_recall": "share of a row's nearest rows that are also nearest on the map",
}
FILES = (
    ("map/", "every row's place: id, x, y, label and further columns where asked for (Parquet)"),
    ("model/", "the encoder: weights, settings and a digest (safetensors and JSON)"),
    ("map.png", "the picture above"),
    ("metrics.json", "the figures of this page, for programs"),
    ("quarantine/", "rows that could not be mapped, with the reason (Parquet)"),
    ("job.yaml", "the job, defaults included"),
    ("manifest.json", "every file of the run with its size and checksum"),
)
VERSIONS = ("lakemap", "dask", "faiss-cpu", "faiss-gpu", "numpy", "pyarrow", "torch", "zarr")


@dataclass(frozen=True)
class PublishSettings:
    """What the report depends on."""

    name: str
    gates: GatesConfig
    job: str


def settings(job: Job) -> PublishSettings:
    """Name, gates and the job's text, less cluster and metrics, on which nothing depends."""
    plain = replace(job, cluster=ClusterConfig(), metrics=MetricsConfig())
    return PublishSettings(job.name, job.gates, to_yaml(plain))


def estimate(_: Job, __: Shape) -> Estimate:
    """One task holds the raster of all categories a few times."""
    raster = (COLOURED_LABELS + 1) * PIXELS * PIXELS * 8
    return Estimate(1, PROCESS_BYTES + 6 * raster, 4 << 20)


def check_gates(gates: GatesConfig, metrics: Mapping[str, Any]) -> None:
    """Refuse when a measured quality is below its gate."""
    for gate in judge(gates, metrics):
        if gate.name in metrics and not gate.passed:
            found = "not measured" if gate.found is None else f"{gate.found:.4f}"
            raise GateError(
                f"gate {gate.name}: {found}, the job needs {gate.needed:g}; nothing was published, "
                f"CURRENT is as it was; improve the map or lower gates.{gate.name}"
            )


def judge(gates: GatesConfig, metrics: Mapping[str, Any]) -> list[Gate]:
    """Every gate the job sets, with what was found."""
    found = {name: metrics.get(name) for name in MEANINGS}
    return [
        Gate(name, needed, found[name], found[name] is not None and found[name] >= needed)
        for name, needed in asdict(gates).items()
        if needed is not None
    ]


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
    return rows | cells | recall | affinity | training | quality


def do_part(context: Context[PublishSettings], _: Partition, __: Progress) -> Part:
    """The report, the picture, the metrics and the job, as files."""
    metrics = gather_metrics(context)
    picture = draw_map(_raster(context), context.settings.name)
    page = render_report(_report(context, metrics, picture))
    files = {
        "map.png": picture,
        "report.html": page.encode(),
        "metrics.json": json.dumps(metrics, indent=1, sort_keys=True).encode(),
        "job.yaml": context.settings.job.encode(),
    }
    return Part(metrics["rows_mapped"], files=files)


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
        run_id=run_id(context.folder),
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        picture=picture,
        curves=draw_curves({name: telemetry[name].to_numpy() for name in telemetry.column_names}),
        stages=tuple(_stage_row(name, ref, context) for name, ref in context.inputs.items()),
        metrics=_metric_rows(metrics),
        gates=tuple(judge(context.settings.gates, metrics)),
        rows=RowCount(
            read=metrics["rows_read"],
            mapped=metrics["rows_mapped"],
            quarantined=metrics["rows_quarantined"],
            trained=metrics["rows_trained"],
            held_out=metrics["rows_held_out"],
        ),
        quarantine=_reasons(ingest, context.read("embed")),
        quarantine_examples=_bad_rows(ingest),
        warnings=tuple(ingest.manifest.facts["warnings"]),
        files=FILES,
        job=context.settings.job,
        versions=_versions(),
    )


def _metric_rows(metrics: dict[str, Any]) -> tuple[Metric, ...]:
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
    return tuple(sorted(rows, key=lambda row: row.value is None))  # what was measured first


def _stage_row(name: str, ref: StoreRef, context: Context[PublishSettings]) -> StageRow:
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


def _reasons(ingest: Store, embed: Store) -> tuple[tuple[str, int], ...]:
    """Rows in the quarantine by reason; together they are all rows that are not on the map."""
    reasons = Counter(ingest.manifest.metrics["reasons"])
    lost = embed.manifest.metrics
    reasons[CHANGED] += lost["n_changed"]
    reasons[NOT_FINITE] += lost["n_unmapped"] - lost["n_changed"]
    return tuple((reason, count) for reason, count in reasons.items() if count)


def _bad_rows(ingest: Store) -> tuple[tuple[str, int, str, str], ...]:
    """The first rows of the quarantine."""
    found: list[tuple[str, int, str, str]] = []
    for record in ingest.records:
        if record.metrics["n_bad"] and len(found) < SHOWN_BAD_ROWS:
            for row in ingest.table(record, "quarantine").to_pylist():
                found.append((row["file"], row["row"], row["id"] or "", row["reason"]))
    return tuple(found[:SHOWN_BAD_ROWS])


def _versions() -> tuple[tuple[str, str], ...]:
    installed = {
        dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()
    }
    return tuple((name, installed[name]) for name in VERSIONS if name in installed)


def run_id(folder: Folder) -> str:
    """The run's name: the fingerprint of all it is made of."""
    return folder.url.rsplit("/", 1)[1]


PUBLISH = Stage(
    name="publish",
    version=1,
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


def release(root: Folder, stores: Mapping[str, Store]) -> tuple[Folder, bool]:
    """The published run's folder, and whether anything had to be done."""
    name = run_id(stores["publish"].folder)
    run = root.join(f"runs/{name}")
    pointer = json.dumps({"run": name, "manifest": f"runs/{name}/manifest.json", "format": FORMAT})
    if run.find("manifest.json") is None:
        _link_files(run, stores)
    elif root.find("CURRENT") == pointer.encode():
        return run, False
    root.put("CURRENT", pointer.encode())
    return run, True


def _link_files(run: Folder, stores: Mapping[str, Store]) -> None:
    """Bring every file of the run to its folder, then write its manifest."""
    files = list(_run_files(stores))
    present = run.list()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda file: _link(file, run, file.name in present), files))
    sizes = run.list()
    for file in files:
        if sizes.get(file.name) != file.size:
            raise _damaged(
                file, f"it has {sizes.get(file.name)} bytes, its commit says {file.size}"
            )
    listed = {file.name: {"bytes": file.size, "crc32": file.crc32} for file in files}
    metrics = json.loads(stores["publish"].file(stores["publish"].records[0], "metrics.json"))
    manifest = {
        "format": FORMAT,
        "run": run_id(run),
        "files": listed,
        "metrics": metrics,
        "stores": {name: store.manifest.fingerprint for name, store in stores.items()},
    }
    run.create("manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode())


@dataclass(frozen=True)
class RunFile:
    """A file of a run: where it comes from, what it is called there."""

    folder: Folder
    key: str
    name: str
    size: int
    crc32: int


def _link(file: RunFile, run: Folder, present: bool) -> None:
    """Bring one file to the run's folder."""
    if present:  # from a release cut short: a link made over itself would leave a second name
        run.delete(file.name)
    try:
        file.folder.copy_to(file.key, run, file.name)
    except FileNotFoundError as error:
        raise _damaged(file, "it is missing") from error


def _damaged(file: RunFile, what: str) -> StoreError:
    place = f"{file.folder.url}/{file.key}"
    return StoreError(f"{place} is damaged: {what}; remove {file.folder.url} and run again")


def _run_files(stores: Mapping[str, Store]) -> list[RunFile]:
    """All files of a run."""
    return [
        RunFile(
            store.folder,
            f"{record.key}/{name}",
            target,
            record.objects[name],
            record.crcs[name],
        )
        for stage in ("embed", "ingest", "train", "publish")
        for store in [stores[stage]]
        for record in store.records
        for name in record.objects
        for target in [_run_name(stage, name, record.partition.index)]
        if target is not None
    ]


def _run_name(stage: str, name: str, index: int) -> str | None:
    """What an object of a store is called in a run; None if it is not part of it."""
    if stage == "embed" and name.startswith("map"):  # map.parquet, or map/key=value.parquet
        return f"{name.removesuffix('.parquet')}/{index:06d}.parquet"
    return {
        ("embed", "unmapped.parquet"): f"quarantine/embed-{index:06d}.parquet",
        ("ingest", "quarantine.parquet"): f"quarantine/ingest-{index:06d}.parquet",
        ("train", "encoder.safetensors"): "model/encoder.safetensors",
        ("train", "encoder.json"): "model/encoder.json",
        ("train", "telemetry.parquet"): "telemetry.parquet",
        ("publish", "map.png"): "map.png",
        ("publish", "report.html"): "report.html",
        ("publish", "metrics.json"): "metrics.json",
        ("publish", "job.yaml"): "job.yaml",
    }.get((stage, name))

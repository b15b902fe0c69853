"""What the reports of a run and of a refresh say alike: steps, qualities, rows, files, versions."""

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipeline.config import DriftConfig, GatesConfig
from pipeline.gates import judge
from pipeline.manifest import Store
from pipeline.published import MapPart, add_counts
from pipeline.report import Metric, Report, RowCount, StageRow
from pipeline.runs import run_name
from pipeline.stage import Context, StoreRef, load_timing

SHOWN_BAD_ROWS = 20
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
    ("snapshot.json", "of which rows of which files of the lake every map file is"),
    ("density.parquet", "rows per pixel and category of the picture"),
    ("drift.parquet", "how new the rows of every refresh were, and what followed"),
    ("manifest.json", "every file of the run with its size and checksum"),
)
VERSIONS = ("lakemap", "dask", "faiss-cpu", "faiss-gpu", "numpy", "pyarrow", "torch", "zarr")
NO_STEPS = ("published", "today")  # what a last step reads beside the steps before it


@dataclass(frozen=True)
class PublishSettings:
    """What the report depends on."""

    name: str
    gates: GatesConfig
    job: str
    kept: dict[str, Any]  # settings that a refresh compares with its own
    drift: DriftConfig


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


def make_report(
    context: Context[PublishSettings],
    metrics: Mapping[str, Any],
    picture: bytes,
    parts: Iterable[MapPart],
) -> Report:
    """The report of the run whose last step this is; `parts` are all of its map."""
    ingest, config = context.read("ingest"), context.settings
    return Report(
        name=config.name,
        run_id=run_name(context.folder),
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        picture=picture,
        stages=tuple(
            stage_row(name, ref, context)
            for name, ref in context.inputs.items()
            if name not in NO_STEPS
        ),
        metrics=metric_rows(metrics),
        gates=tuple(judge(config.gates, metrics)),
        rows=RowCount(
            read=metrics["rows_read"],
            mapped=metrics["rows_mapped"],
            quarantined=metrics["rows_quarantined"],
            trained=metrics["rows_trained"],
            held_out=metrics["rows_held_out"],
        ),
        quarantine=count_reasons(parts),
        quarantine_examples=bad_rows(ingest),
        warnings=tuple(ingest.manifest.facts["warnings"]),
        files=FILES,
        job=config.job,
        versions=installed_versions(),
    )

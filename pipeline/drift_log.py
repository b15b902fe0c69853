"""Drift over refreshes: the table `drift.parquet` that runs hand on, and the report's section."""

import time
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pipeline.clock import write_time
from pipeline.config import DriftConfig
from pipeline.curves import draw_drift
from pipeline.report import Drift, Score
from pipeline.runs import load_manifest, read_file, run_name
from pipeline.stage import Context
from pipeline.stores import decode_table

LOG = "drift.parquet"
SCORES = {
    "novel_share": "share of new rows farther from training rows than 99% of those are: 0.01 if "
    "nothing has changed",
    "occupancy_shift": "how differently new rows and training rows fill the map, 0 to 1",
    "domain_auc": "how well a classifier tells new rows from training rows: 0.5 is not at all",
}
SCHEMA = pa.schema(
    [
        ("at", pa.string()),
        ("run", pa.string()),
        ("action", pa.string()),
        ("rows", pa.int64()),
        *((name, pa.float64()) for name in SCORES),
        ("verdict", pa.string()),
        ("displacement_median", pa.float64()),
        ("displacement_p95", pa.float64()),
    ]
)
VERDICTS = {
    "none": "The new rows are like those the encoder was trained on.",
    "unknown": "Too few new rows to judge by.",
}


def extend_log(context: Context[Any], metrics: Mapping[str, Any], action: str) -> pa.Table:
    """The published run's log and one row for this one."""
    run = context.inputs["published"].folder
    manifest = load_manifest(run)
    assert manifest is not None, "its snapshot was read"
    past = []
    if LOG in manifest["files"]:
        past = decode_table(read_file(run, manifest["files"], LOG)).to_pylist()
    moved = metrics if action == "retrain" else {}  # a refresh hands on what a retraining measured
    row = {
        "at": write_time(time.time()),
        "run": run_name(context.folder),
        "action": action,
        "rows": metrics.get("drift_rows", 0),
        **{name: metrics.get(name) for name in SCORES},
        "verdict": metrics.get("drift", "unknown"),
        **{name: moved.get(name) for name in ("displacement_median", "displacement_p95")},
    }
    return pa.Table.from_pylist([*past, row], SCHEMA)


def drift_section(config: DriftConfig, metrics: Mapping[str, Any], log: pa.Table) -> Drift:
    """What the report says of drift."""
    scores = [
        Score(
            name,
            metrics.get(name),
            getattr(config.warn, name),
            getattr(config.retrain, name),
            meaning,
        )
        for name, meaning in SCORES.items()
    ]
    return Drift(_say(metrics), tuple(scores), draw_drift(log.to_pydict()))


def _say(metrics: Mapping[str, Any]) -> str:
    """The verdict as a sentence."""
    verdict, reasons = metrics.get("drift", ""), ", ".join(metrics.get("drift_reasons", ()))
    if verdict == "warn":
        return f"Warning: {reasons}; the new rows are not like those the encoder was trained on."
    if verdict == "retrain":
        return f"The encoder was trained again: {reasons}."
    return VERDICTS.get(verdict, "The encoder was trained again because it was asked for.")

"""drift: whether new rows are like those the encoder was trained on, and how far a map has moved.

drift         the scores of a refresh's new rows, and what follows from them
displacement  the same rows on the published map and on that of an encoder trained again
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config import DriftConfig, Job
from pipeline.manifest import Part, Record
from pipeline.partitions import Partition
from pipeline.runner import Report
from pipeline.stage import PROCESS_BYTES, Context, Estimate, Shape, Stage, one_partition
from pipeline.stages.embed import DRIFT_ROWS

SCORES = ("novel_share", "occupancy_shift", "domain_auc")
COMPARED_ROWS = 5000


@dataclass(frozen=True)
class CompareSettings:
    """What the comparison of two maps depends on."""

    k: int
    seed: int


def drift_settings(job: Job) -> DriftConfig:
    """The thresholds."""
    return job.drift


def compare_settings(job: Job) -> CompareSettings:
    """Neighbours to compare, and the seed."""
    return CompareSettings(job.evaluate.k, job.evaluate.seed)


def estimate_drift(_: Job, shape: Shape) -> Estimate:
    """One task holds the drawn rows and the reference a few times."""
    return Estimate(1, PROCESS_BYTES + 4 * 4 * (DRIFT_ROWS + 4096) * (shape.width + 3), 4096)


def estimate_displacement(_: Job, shape: Shape) -> Estimate:
    """One task holds the sample, and distances of the rows it compares."""
    rows = 2 * shape.n_train * shape.row_bytes
    return Estimate(1, PROCESS_BYTES + rows + COMPARED_ROWS * (8 * shape.width + 80_000), 1 << 20)


def judge_drift(config: DriftConfig, scores: Mapping[str, float | None]) -> tuple[str, list[str]]:
    """What the scores call for (retrain, warn, none, or unknown), and those that do, as text."""
    for verdict, limits in (("retrain", config.retrain), ("warn", config.warn)):
        reasons = [
            f"{name} {found:.3f} is above {limit:g}"
            for name, limit in asdict(limits).items()
            for found in [scores[name]]
            if limit is not None and found is not None and found > limit
        ]
        if reasons:
            return verdict, reasons
    return ("unknown" if scores["novel_share"] is None else "none"), []


def drift_part(context: Context[DriftConfig], _: Partition, __: Report) -> Part:
    """The scores of all new rows."""
    from pipeline.comparison import score_drift  # noqa: PLC0415 - loads torch; the driver needs none

    return score_drift(context)


def displacement_part(context: Context[CompareSettings], _: Partition, __: Report) -> Part:
    """How far rows have moved."""
    from pipeline.comparison import measure_displacement  # noqa: PLC0415 - loads torch as well

    return measure_displacement(context)


def first_metrics(_: Context[Any], records: list[Record]) -> dict[str, Any]:
    """The metrics of the only task."""
    return records[0].metrics


DRIFT = Stage(
    name="drift",
    version=1,
    reads=("encoder", "embed"),
    settings=drift_settings,
    estimate=estimate_drift,
    prepare=one_partition,
    do_part=drift_part,
    finish=first_metrics,
)
DISPLACEMENT = Stage(
    name="displacement",
    version=1,
    reads=("ingest", "sample", "train", "published"),
    settings=compare_settings,
    estimate=estimate_displacement,
    prepare=one_partition,
    do_part=displacement_part,
    finish=first_metrics,
)

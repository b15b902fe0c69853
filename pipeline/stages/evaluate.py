"""evaluate: how good the map is, measured on the map itself.

survey    one pass over the map: rows per pixel and category, and the places of seeded rows
evaluate  kNN accuracy, trustworthiness, continuity and neighbour recall of those rows
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.config import EvaluateConfig, Job
from pipeline.kernels.metrics import continuity, knn_accuracy, neighbor_recall, trustworthiness
from pipeline.kernels.neighbors import widen
from pipeline.kernels.sampling import draw_positions
from pipeline.manifest import Part, Plan, Record, Store, open_store
from pipeline.partitions import Partition
from pipeline.picture import OTHER_NAME, rasterize
from pipeline.runner import Report
from pipeline.stage import (
    PROCESS_BYTES,
    Context,
    Estimate,
    Shape,
    Stage,
    StoreRef,
    one_partition,
)
from pipeline.stages.embed import COLOURED_LABELS, label_text, read_map

PIXELS = 800
MAP_FILES_PER_TASK = 32


@dataclass(frozen=True)
class SurveySettings:
    """What the survey depends on."""

    reference_rows: int
    seed: int


@dataclass(frozen=True)
class EvaluateSettings:
    """What the metrics depend on."""

    evaluate: EvaluateConfig
    metric: str


class Wanted(NamedTuple):
    """Rows to look up: partition of the lake, rank among its good rows, number in their set."""

    partition: NDArray[np.int64]
    rank: NDArray[np.int64]
    number: NDArray[np.int64]


def survey_settings(job: Job) -> SurveySettings:
    """The survey's settings."""
    return SurveySettings(job.evaluate.reference_rows, job.evaluate.seed)


def evaluate_settings(job: Job) -> EvaluateSettings:
    """The metrics' settings."""
    return EvaluateSettings(job.evaluate, job.neighbors.metric)


def estimate_survey(_: Job, shape: Shape) -> Estimate:
    """One task holds the raster of all categories, its encoding and one map file."""
    raster = (COLOURED_LABELS + 1) * PIXELS * PIXELS * 4
    n_parts = -(-shape.n_partitions // MAP_FILES_PER_TASK)
    task = PROCESS_BYTES + 3 * raster + shape.partition_rows * 100 + shape.n_train * 16
    return Estimate(n_parts, task, n_parts * (1 << 20))


def estimate_evaluate(job: Job, shape: Shape) -> Estimate:
    """One task holds the measuring rows and blocks of their distance matrix."""
    rows = job.evaluate.rows
    return Estimate(1, PROCESS_BYTES + rows * (shape.width * 12 + 80_000), 1000)


def prepare_survey(context: Context[SurveySettings]) -> Plan:
    """Runs of map files; start and stop are partition numbers."""
    n_files = len(context.read("embed").records)
    starts = range(0, n_files, MAP_FILES_PER_TASK)
    parts = [
        Partition(index, start, min(start + MAP_FILES_PER_TASK, n_files))
        for index, start in enumerate(starts)
    ]
    return Plan(parts)


def categories(embed: Store) -> tuple[str, ...]:
    """Names of the categories to colour by; a single empty one where there are no labels."""
    labels = tuple(embed.manifest.metrics["labels"])
    if not labels:
        return ("",)
    return (*labels, OTHER_NAME) if embed.manifest.metrics["n_labels"] > len(labels) else labels


@lru_cache(maxsize=4)
def _wanted(ref: StoreRef, prefix: str, n_rows: int | None, seed: int) -> Wanted:
    """Seeded rows (all if n_rows is None) of the sample's training or measuring rows."""
    sample = open_store(ref.folder, ref.digest)
    blocks = [sample.arrays(record) for record in sample.records]
    partition = np.concatenate([block.read(f"{prefix}partition") for block in blocks])
    rank = np.concatenate([block.read(f"{prefix}rank") for block in blocks])
    number = np.arange(len(rank))
    if n_rows is not None:
        number = np.sort(draw_positions(len(rank), n_rows, [seed, crc32(b"reference")]))
    return Wanted(partition[number], rank[number], number)


def survey_part(context: Context[SurveySettings], partition: Partition, _: Report) -> Part:
    """Rows per pixel and category of a run of map files, and the places of the wanted rows."""
    embed = context.read("embed")
    names = categories(embed)
    extent = tuple(context.read("train").manifest.metrics["extent"])
    counts = np.zeros((len(names), PIXELS, PIXELS), np.uint32)
    sample, config = context.inputs["sample"], context.settings
    wanted = {
        "reference": _wanted(sample, "", config.reference_rows, config.seed),
        "query": _wanted(sample, "evaluate_", None, config.seed),
    }
    points, n_rows = [], 0
    for index in range(partition.start, partition.stop):
        table = read_map(embed, embed.records[index])
        xy = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
        counts += rasterize(xy, category_codes(table, names), len(names), extent, PIXELS)
        points += [_look_up(embed, index, table, kind, rows) for kind, rows in wanted.items()]
        n_rows += len(xy)
    metrics = {"n_outside": n_rows - int(counts.sum(dtype=np.int64))}
    tables = {"points": pa.concat_tables(points)}
    return Part(n_rows, arrays={"counts": counts}, tables=tables, metrics=metrics)


def category_codes(table: pa.Table, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Category number of every row."""
    if names == ("",):
        return np.zeros(table.num_rows, np.int64)
    found = pc.index_in(label_text(table["label"]), value_set=pa.array(names))
    codes: NDArray[np.int64] = pc.fill_null(found, len(names) - 1).to_numpy().astype(np.int64)
    return codes


def _look_up(embed: Store, index: int, table: pa.Table, kind: str, rows: Wanted) -> pa.Table:
    """Place and label of the wanted rows of one map file."""
    inside = np.flatnonzero(rows.partition == index)
    rank, number = rows.rank[inside], rows.number[inside]
    if embed.records[index].metrics["n_unmapped"]:  # the file lacks these ranks
        lost = embed.table(embed.records[index], "unmapped")["row"].to_numpy()
        kept = ~np.isin(rank, lost)
        rank, number = rank[kept] - np.searchsorted(lost, rank[kept]), number[kept]
    taken = table.take(pa.array(rank))
    labels = taken["label"] if "label" in table.column_names else pa.nulls(len(rank))
    return pa.table(
        {
            "kind": pa.array([kind] * len(rank), pa.string()),
            "number": pa.array(number, pa.int64()),
            "x": taken["x"].combine_chunks(),
            "y": taken["y"].combine_chunks(),
            "label": pc.cast(labels, pa.string()),
        }
    )


def finish_survey(_: Context[SurveySettings], records: list[Record]) -> dict[str, Any]:
    """Rows that lie outside the picture's frame."""
    return {"n_outside": sum(record.metrics["n_outside"] for record in records)}


def evaluate_part(context: Context[EvaluateSettings], _: Partition, __: Report) -> Part:
    """All metrics."""
    config, sample, survey = (
        context.settings.evaluate,
        context.read("sample"),
        context.read("survey"),
    )
    points = pa.concat_tables([survey.table(record, "points") for record in survey.records])
    reference = points.filter(pc.equal(points["kind"], "reference"))
    query = points.filter(pc.equal(points["kind"], "query")).sort_by("number")
    vectors = np.concatenate(
        [sample.arrays(record).read("evaluate_vectors") for record in sample.records]
    )
    rows = widen(vectors[query["number"].to_numpy()], context.settings.metric)
    xy = _places(query)
    metrics: dict[str, Any] = {
        "trustworthiness": trustworthiness(rows, xy, config.trustworthiness_k),
        "continuity": continuity(rows, xy, config.trustworthiness_k),
        "neighbor_recall": neighbor_recall(rows, xy, config.k),
        "n_queries": len(rows),
        "evaluated_on": sample.manifest.facts["evaluated_on"],
        "accuracy": _accuracy(reference, query, sample.manifest.facts["evaluated_on"], config.k),
    }
    return Part(len(rows), metrics=metrics)


def _places(points: pa.Table) -> NDArray[np.float32]:
    return np.stack([points["x"].to_numpy(), points["y"].to_numpy()], axis=1)


def _accuracy(reference: pa.Table, query: pa.Table, evaluated_on: str, k: int) -> float | None:
    """kNN accuracy on the map of labelled queries among labelled training rows."""
    reference = reference.filter(pc.is_valid(reference["label"]))
    query = query.filter(pc.is_valid(query["label"]))
    if reference.num_rows <= k or not query.num_rows:
        return None
    labels = [*reference["label"].to_pylist(), *query["label"].to_pylist()]
    codes = np.unique(labels, return_inverse=True)[1]
    known, asked = codes[: reference.num_rows], codes[reference.num_rows :]
    if evaluated_on == "training rows":
        places = _places(reference)
        return knn_accuracy(places, known, places, known, k, leave_one_out=True)
    return knn_accuracy(_places(reference), known, _places(query), asked, k)


def finish_evaluate(_: Context[EvaluateSettings], records: list[Record]) -> dict[str, Any]:
    """The metrics."""
    return records[0].metrics


SURVEY = Stage(
    name="survey",
    version=1,
    reads=("sample", "train", "embed"),
    settings=survey_settings,
    estimate=estimate_survey,
    prepare=prepare_survey,
    do_part=survey_part,
    finish=finish_survey,
)
EVALUATE = Stage(
    name="evaluate",
    version=1,
    reads=("sample", "survey"),
    settings=evaluate_settings,
    estimate=estimate_evaluate,
    prepare=one_partition,
    do_part=evaluate_part,
    finish=finish_evaluate,
)

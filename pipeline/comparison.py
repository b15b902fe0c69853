"""New rows against those the encoder was trained on, and the same rows on two maps."""

from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from encoders.reference import count_tiles, diameter
from encoders.restart import LANDMARK_NOVELTY
from pipeline.config import DriftConfig
from pipeline.kernels.drift import displacement, domain_auc, occupancy_shift
from pipeline.kernels.sampling import draw_positions
from pipeline.manifest import Part, Store
from pipeline.model import load_model
from pipeline.placing import load_encoder, load_reference
from pipeline.published import load_snapshot
from pipeline.stage import Context
from pipeline.stages.drift import COMPARED_ROWS, SCORES, CompareSettings, judge_drift

CLASSIFIED_ROWS = 2000  # of each kind: more take longer and say the same
FEWEST_COMPARED = 100


def score_drift(context: Context[DriftConfig]) -> Part:
    """The scores of all new rows; none where there are too few to judge by."""
    embed, config = context.read("embed"), context.settings
    n_rows = embed.n_rows
    metrics: dict[str, Any] = dict.fromkeys(SCORES)
    drawn = _drawn_rows(embed)
    if n_rows >= config.rows and len(drawn) >= 20:
        reference = load_reference(context.inputs["encoder"])
        assert reference is not None, "the step carries one"
        tiles = count_tiles(drawn[:, :2], reference.extent)
        order = np.random.default_rng([config.seed, crc32(b"drift")]).permutation(len(drawn))
        view = drawn[order[:CLASSIFIED_ROWS], 2:]
        metrics = {
            "novel_share": sum(r.metrics["n_novel"] for r in embed.records) / n_rows,
            "occupancy_shift": occupancy_shift(reference.tiles, tiles, config.seed),
            "domain_auc": domain_auc(reference.rows[:CLASSIFIED_ROWS], view, config.seed),
        }
    verdict, reasons = judge_drift(config, metrics)
    metrics |= {"drift": verdict, "drift_reasons": reasons, "drift_rows": n_rows}
    return Part(n_rows, metrics=metrics)


def _drawn_rows(embed: Store) -> NDArray[np.float32]:
    """Place and view of the rows drawn from all partitions."""
    blocks = [
        embed.arrays(record).read("drawn")
        for record in embed.records
        if any(name.startswith("arrays/drawn/") for name in record.objects)
    ]
    return np.concatenate(blocks) if blocks else np.empty((0, 3), np.float32)


def measure_displacement(context: Context[CompareSettings]) -> Part:
    """How far rows of the sample that were on the published map have moved."""
    sample, seed = context.read("sample"), context.settings.seed
    earlier, reference = load_model(context.inputs["published"])
    rows = sample.rows("vectors", 0, sample.n_rows)
    number, rule = np.flatnonzero(_stayed(context)), "rows of files that stayed"
    if len(number) < FEWEST_COMPARED:
        number = np.flatnonzero(reference.score(rows) < LANDMARK_NOVELTY)
        rule = "rows that the published encoder knew"
    drawn = draw_positions(len(number), COMPARED_ROWS, [seed, crc32(b"displacement")])
    rows = rows[np.sort(number[drawn])]
    old, new = earlier.embed(rows), load_encoder(context.inputs["train"]).embed(rows)
    metrics: dict[str, Any] = {"compared_rows": len(rows), "compared_on": rule}
    if len(rows) > context.settings.k:
        found = displacement(old, new, diameter(reference.extent), context.settings.k)
        metrics |= {
            "displacement_median": found.median,
            "displacement_p95": found.p95,
            "neighbor_overlap": found.overlap,
        }
    columns = {"old_x": old[:, 0], "old_y": old[:, 1], "new_x": new[:, 0], "new_y": new[:, 1]}
    return Part(len(rows), tables={"moved": pa.table(columns)}, metrics=metrics)


def _stayed(context: Context[CompareSettings]) -> NDArray[np.bool_]:
    """Which rows of the sample are of files that are as they were when the map was published."""
    ingest, sample = context.read("ingest"), context.read("sample")
    then = load_snapshot(context.inputs["published"].folder).files
    now = {path: tuple(entry) for path, entry in ingest.manifest.facts["files"].items()}
    partition = np.concatenate([sample.arrays(r).read("partition") for r in sample.records])
    rank = np.concatenate([sample.arrays(r).read("rank") for r in sample.records])
    stayed = np.zeros(len(rank), bool)
    for index in np.unique(partition):
        counts = ingest.records[index].metrics["n_good"]
        same = np.array([path in now and now[path] == then.get(path) for path in counts])
        inside = partition == index
        ends = np.cumsum(list(counts.values()))
        stayed[inside] = same[np.searchsorted(ends, rank[inside], side="right")]
    return stayed

"""sample: which rows are drawn, and that they are those rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from pipeline.manifest import Store
from pipeline.stages import sample
from tests.data import LABELLED, Lake, make_blobs, make_job, read_array, run_until, write_parquet

N_ROWS, N_BAD, HELD_OUT_EVERY = 900, 9, 6


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return write_parquet(
        tmp_path / "lake", *make_blobs(N_ROWS), n_bad=N_BAD, held_out_every=HELD_OUT_EVERY
    )


def draw_from(lake: Lake, output: Path, **sections: Any) -> dict[str, Store]:
    sections["input"] = {"max_bad_fraction": 0.1, **sections.get("input", {})}
    return run_until(make_job(lake.path, output, **sections), "sample")


def rows_of(stores: dict[str, Store], lake: Lake, prefix: str = "") -> NDArray[np.int64]:
    """Row numbers in the lake of the sample's rows, from partition and rank."""
    starts = np.cumsum([0, *(record.n_rows for record in stores["ingest"].records)])
    partition = read_array(stores["sample"], f"{prefix}partition")
    rank = read_array(stores["sample"], f"{prefix}rank")
    rows: NDArray[np.int64] = lake.good[starts[partition] + rank]
    return rows


def test_the_sample_has_the_rows_it_says(lake: Lake, tmp_path: Path) -> None:
    stores = draw_from(lake, tmp_path / "maps", sample={"rows": 300}, input=LABELLED)
    train, measure = rows_of(stores, lake), rows_of(stores, lake, "evaluate_")
    assert len(stores["sample"].records) > 2
    assert len(train) == len(set(train)) == stores["sample"].n_rows == 300
    assert len(measure) == len(set(measure)) == 120
    assert (read_array(stores["sample"], "vectors") == lake.vectors[train]).all()
    assert (read_array(stores["sample"], "evaluate_vectors") == lake.vectors[measure]).all()


def test_held_out_rows_measure_and_never_train(lake: Lake, tmp_path: Path) -> None:
    stores = draw_from(lake, tmp_path / "maps", sample={"rows": 10_000}, input=LABELLED)
    train, measure = rows_of(stores, lake), rows_of(stores, lake, "evaluate_")
    assert set(train) == set(lake.good[~lake.held_out[lake.good]])  # all, as they fit
    assert lake.held_out[measure].all()
    assert len(measure) == 120
    assert stores["sample"].manifest.facts["evaluated_on"] == "held-out rows"


def test_rows_outside_the_sample_measure_where_none_is_held_out(lake: Lake, tmp_path: Path) -> None:
    stores = draw_from(lake, tmp_path / "maps", sample={"rows": 600})
    train, measure = rows_of(stores, lake), rows_of(stores, lake, "evaluate_")
    assert (len(train), len(measure)) == (600, 120)
    assert not set(train) & set(measure)
    assert lake.held_out[train].any()  # the column is not named, so it means nothing
    assert stores["sample"].manifest.facts["evaluated_on"] == "rows outside the sample"


def test_training_rows_measure_where_all_rows_train(lake: Lake, tmp_path: Path) -> None:
    stores = draw_from(lake, tmp_path / "maps", sample={"rows": N_ROWS})
    train, measure = rows_of(stores, lake), rows_of(stores, lake, "evaluate_")
    assert (train == lake.good).all()
    assert len(set(measure)) == 120
    assert stores["sample"].manifest.facts["evaluated_on"] == "training rows"


def test_the_draw_does_not_depend_on_the_partitions(lake: Lake, tmp_path: Path) -> None:
    found = []
    for partition_bytes in (1 << 16, 1 << 17, 1 << 20):
        stores = draw_from(
            lake, tmp_path / "maps", input=LABELLED | {"partition_bytes": partition_bytes}
        )
        found.append((rows_of(stores, lake).tolist(), rows_of(stores, lake, "evaluate_").tolist()))
    assert found[0] == found[1] == found[2]


def test_another_seed_draws_other_rows(lake: Lake, tmp_path: Path) -> None:
    one, other = (
        set(rows_of(draw_from(lake, tmp_path / "maps", sample={"rows": 300, "seed": s}), lake))
        for s in (0, 1)
    )
    assert 60 < len(one & other) < 140  # 101 are expected of two independent draws


@pytest.mark.parametrize("n_holdout", [0, 40])
def test_every_row_is_drawn_equally_often(n_holdout: int, tmp_path: Path) -> None:
    source = make_job(tmp_path, tmp_path)
    counts = np.zeros((2, 80), np.int64)
    n_seeds = 2000
    for seed in range(n_seeds):
        config = sample.settings(source)
        config = sample.SampleSettings(config.source, 20, seed, 10)
        drawn = sample.draw(80, n_holdout, config)
        counts[0, drawn.train] += 1
        counts[1, drawn.evaluate] += 1
    assert stats.chisquare(counts[0]).pvalue > 1e-3
    assert stats.chisquare(counts[1, : n_holdout or 80]).pvalue > 1e-3
    assert counts.sum(axis=1).tolist() == [20 * n_seeds, 10 * n_seeds]

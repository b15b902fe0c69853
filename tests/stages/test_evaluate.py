"""evaluate: the survey's counts and places, the metrics against scikit-learn."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from numpy.typing import NDArray
from sklearn.manifold import trustworthiness
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from pipeline import placing
from pipeline.manifest import Store
from tests.data import (
    LABELLED,
    Finished,
    Lake,
    make_blobs,
    make_job,
    read_array,
    run_until,
    write_parquet,
)
from tests.stages.test_embed import LosesRows, read_map


def points_of(survey: Store, kind: str) -> pa.Table:
    tables = [survey.table(record, "points") for record in survey.records]
    points = pa.concat_tables(tables)
    return points.filter(pc.equal(points["kind"], kind)).sort_by("number")


def measuring_rows(stores: dict[str, Store], lake: Lake, prefix: str) -> NDArray[np.int64]:
    """Row numbers in the lake, in the order of the sample."""
    starts = np.cumsum([0, *(record.n_rows for record in stores["ingest"].records)])
    partition = read_array(stores["sample"], f"{prefix}partition")
    rows: NDArray[np.int64] = lake.good[
        starts[partition] + read_array(stores["sample"], f"{prefix}rank")
    ]
    return rows


def places(table: pa.Table) -> NDArray[np.float32]:
    return np.column_stack([table["x"].to_numpy(), table["y"].to_numpy()])


def check(stores: dict[str, Store], lake: Lake, config: Any) -> dict[str, Any]:
    """The metrics, after comparing them with scikit-learn's on the published places."""
    table = read_map(stores["embed"])
    place = dict(zip(table["id"].to_pylist(), places(table), strict=True))

    def find(rows: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
        mapped = np.array([row for row in rows if lake.ids[row] in place])
        return mapped, np.array([place[lake.ids[row]] for row in mapped])

    query, query_xy = find(measuring_rows(stores, lake, "evaluate_"))
    numbers = points_of(stores["survey"], "reference")["number"].to_numpy()
    train = measuring_rows(stores, lake, "")
    assert len(numbers) == len(set(numbers)) <= config.reference_rows
    known, known_xy = find(train[numbers])

    metrics = stores["evaluate"].manifest.metrics
    vectors = lake.vectors[query].astype(np.float64)
    k = config.trustworthiness_k
    expected = trustworthiness(vectors, query_xy.astype(np.float64), n_neighbors=k)
    assert metrics["trustworthiness"] == pytest.approx(expected, abs=1e-9)
    expected = trustworthiness(query_xy.astype(np.float64), vectors, n_neighbors=k)
    assert metrics["continuity"] == pytest.approx(expected, abs=1e-9)
    assert metrics["n_queries"] == len(query)

    if metrics["evaluated_on"] == "training rows":
        query, query_xy = known, known_xy
        guesses = _guess_without_own(known_xy, lake.labels[known], config.k)
    else:
        classifier = KNeighborsClassifier(config.k).fit(known_xy, lake.labels[known])
        guesses = classifier.predict(query_xy).tolist()
    accuracy = (np.array(guesses) == lake.labels[query]).mean()
    # Of equal votes scikit-learn takes the smaller label, we the nearer one.
    assert metrics["accuracy"] == pytest.approx(accuracy, abs=0.02)
    return metrics


def _guess_without_own(xy: NDArray[Any], labels: NDArray[Any], k: int) -> list[int]:
    """The commonest label among the k nearest others."""
    nearest = NearestNeighbors(n_neighbors=k).fit(xy).kneighbors(return_distance=False)
    return [int(np.bincount(labels[others]).argmax()) for others in nearest]


NAMES = ("ingest", "sample", "embed", "survey", "evaluate")


def test_held_out_rows_measure(done: Finished) -> None:
    stores = {name: done.store(name) for name in NAMES}
    metrics = check(stores, done.lake, done.job.evaluate)
    assert metrics["evaluated_on"] == "held-out rows"
    assert metrics["n_queries"] == 120
    assert done.lake.held_out[measuring_rows(stores, done.lake, "evaluate_")].all()


@pytest.mark.parametrize(
    ("rows", "evaluated_on"), [(250, "rows outside the sample"), (400, "training rows")]
)
def test_without_held_out_rows(rows: int, evaluated_on: str, tmp_path: Path) -> None:
    blobs = make_blobs(400)
    labels = blobs.labels // 2  # blobs that share a label, and noise below, make guesses fail
    labels[::7] = 4
    lake = write_parquet(tmp_path / "lake", blobs.vectors, labels)
    job = make_job(lake.path, tmp_path / "maps", input={"label": "blob"}, sample={"rows": rows})
    metrics = check(run_until(job, "evaluate"), lake, job.evaluate)
    assert metrics["evaluated_on"] == evaluated_on
    assert 0.3 < metrics["accuracy"] < 0.95


def test_without_labels_there_is_no_accuracy(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(150).vectors)
    stores = run_until(make_job(lake.path, tmp_path / "maps", train={"steps": 2}), "evaluate")
    assert stores["evaluate"].manifest.metrics["accuracy"] is None
    counts = read_array(stores["survey"], "counts")
    assert counts.shape[0] == len(stores["survey"].records)  # one category each
    assert counts.sum() == 150


def test_the_survey_counts_every_row_in_its_category(done: Finished) -> None:
    survey = done.store("survey")
    assert len(survey.records) > 1
    counts = sum(survey.arrays(record).read("counts").astype(np.int64) for record in survey.records)
    per_label = np.bincount(done.lake.labels[done.lake.good], minlength=5)
    outside = survey.manifest.metrics["n_outside"]
    table = read_map(done.store("embed"))
    x0, x1, y0, y1 = done.store("train").manifest.metrics["extent"]
    x, y = table["x"].to_numpy(), table["y"].to_numpy()
    inside = (x0 <= x) & (x <= x1) & (y0 <= y) & (y <= y1)
    assert outside == (~inside).sum()
    labels = done.lake.labels[done.lake.good]
    assert np.asarray(counts).sum(axis=(1, 2)).tolist() == np.bincount(labels[inside]).tolist()
    assert per_label.sum() == survey.n_rows


def test_rows_without_a_place_leave_the_others_where_they_are(
    done: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks count good rows, map files lack the unmapped ones: places must not slip."""
    lake = done.lake
    measuring = measuring_rows({name: done.store(name) for name in NAMES}, lake, "evaluate_")
    lost = np.union1d(lake.good[[0, 1, 2, 400]], measuring[5:8])
    encoder = placing.load_encoder(done.refs["train"])
    monkeypatch.setattr(placing, "load_encoder", lambda _: LosesRows(encoder, lake.vectors[lost]))
    job = make_job(
        lake.path, tmp_path / "maps", input=LABELLED, neighbors={"cells": 5, "overlap": 2}
    )
    stores = run_until(job, "evaluate")
    metrics = check(stores, lake, job.evaluate)
    assert metrics["n_queries"] == 120 - len(np.intersect1d(lost, measuring))
    assert stores["embed"].manifest.metrics["n_unmapped"] == len(lost)

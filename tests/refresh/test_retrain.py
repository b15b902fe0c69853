"""Drift in refreshes: new rows are judged, and where they are too new the encoder trains again."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from encoders.artifact import Encoder
from jobs import refresh, retrain
from pipeline import history
from pipeline.config import Job
from pipeline.errors import ConfigError, GateError, InputError
from pipeline.published import load_snapshot
from pipeline.runner import SerialRunner
from pipeline.stores import Folder
from tests.data import (
    Blobs,
    Recorder,
    call_cli,
    make_blobs,
    one_try,
    write_job,
)
from tests.refresh.nights import refresh_job

SCORES = ("novel_share", "occupancy_shift", "domain_auc")
QUICK: dict[str, Any] = {
    "input": {"label": "blob"},
    "train": {"steps": 20},
    "gates": {"trustworthiness": None, "displacement": None},
}
ROWS = make_blobs(2200, n_blobs=6)
NEW_BLOB = 0  # sorts before the others, whose colours stay


def write_rows(path: Path, rows: NDArray[np.int64]) -> None:
    """A file of those of ROWS."""
    table = pa.table(
        {
            "item": rows,
            "embedding": pa.array(ROWS.vectors[rows].tolist(), pa.list_(pa.float32())),
            "blob": ROWS.labels[rows],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


KNOWN, NEW = (np.flatnonzero((ROWS.labels == NEW_BLOB) == is_new) for is_new in (False, True))


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Four files of known blobs."""
    for index in range(4):
        write_rows(tmp_path / f"lake/f{index}.parquet", KNOWN[300 * index : 300 * (index + 1)])
    return tmp_path / "lake"


@pytest.fixture
def quick() -> dict[str, Any]:
    return QUICK


def read_map(run: Path) -> pa.Table:
    return pq.read_table(run / "map").sort_by("id")


def check_places(run: Path) -> None:
    """Every row of the map is where the run's encoder puts it."""
    table = read_map(run)
    xy = Encoder.load(run / "model").embed(ROWS.vectors[table["id"].to_numpy()])
    assert np.array_equal(table["x"].to_numpy(), xy[:, 0])
    assert np.array_equal(table["y"].to_numpy(), xy[:, 1])


def actions(job: Job) -> list[str]:
    return [entry.action for entry in history.entries(Folder(job.output))]


def test_rows_like_the_others_are_no_drift(job: Job, lake: Path) -> None:
    write_rows(lake / "new.parquet", KNOWN[1200:1600])
    published = refresh_job(job)
    found, run = published.metrics, Path(published.run.url)
    assert found["drift"] == "none"
    assert found["drift_rows"] == 400
    assert found["novel_share"] < 0.03
    assert found["occupancy_shift"] < 0.2
    assert found["domain_auc"] < 0.6
    assert actions(job) == ["run", "refresh"]
    table = read_map(run)
    judged = np.isin(table["id"].to_numpy(), KNOWN[1200:1600])
    novelty = table["novelty"].to_numpy(zero_copy_only=False)
    assert table.schema.field("novelty").type == pa.float32()
    assert np.array_equal(np.isfinite(novelty), judged)
    assert np.nanmean(novelty) == pytest.approx(0.5, abs=0.08)
    assert (novelty[judged] > 0.99).mean() == pytest.approx(found["novel_share"])


def test_the_log_of_drift_is_handed_on(job: Job, lake: Path) -> None:
    for night in range(3):
        write_rows(lake / f"n{night}.parquet", KNOWN[1200 + 200 * night :][:200])
        published = refresh_job(job)
    log = pq.read_table(Path(published.run.url) / "drift.parquet").to_pylist()
    runs = [entry.run for entry in history.entries(Folder(job.output))]
    assert [row["run"] for row in log] == runs[1:]
    assert {row["action"] for row in log} == {"refresh"}
    assert [row["rows"] for row in log] == [200, 200, 200]
    last = {name: published.metrics[name] for name in SCORES}
    assert {name: log[-1][name] for name in SCORES} == last
    page = (Path(published.run.url) / "report.html").read_text()
    assert '<section id="drift">' in page
    assert "like those the encoder was trained on" in page
    assert '<section id="displacement">' not in page


def test_a_new_cluster_trains_the_encoder_again(
    job: Job, lake: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(lake / "new.parquet", NEW)
    before, seen = history.current_run(Folder(job.output)), Recorder()
    with caplog.at_level(logging.WARNING, "lakemap"):
        published = refresh_job(job, seen)
    assert "drift: novel_share 1.000 is above 0.05; the encoder is trained again" in caplog.text
    assert seen.ran[:4] == ["encoder", "ingest", "embed", "drift"]
    assert "tally" not in seen.ran
    assert seen.ran[-1] == "publish"
    found, run = published.metrics, Path(published.run.url)
    assert found["drift"] == "retrain"
    assert min(found["occupancy_shift"], found["domain_auc"]) > 0.5
    assert actions(job) == ["run", "retrain"]
    check_places(run)
    table = read_map(run)
    assert table.num_rows == 1200 + len(NEW) == found["rows_mapped"]
    assert table["novelty"].null_count == table.num_rows
    header = json.loads((run / "model/encoder.json").read_text())
    assert header["info"]["earlier"] == before
    assert load_snapshot(published.run).trained_in == run.name
    shown = load_snapshot(Folder(job.output).join(f"runs/{before}")).categories
    assert load_snapshot(published.run).categories == (*shown, str(NEW_BLOB))
    assert 0 <= found["displacement_median"] <= found["displacement_p95"]
    assert found["compared_on"] == "rows of files that stayed"
    assert 0 < found["neighbor_overlap"] <= 1
    (row,) = pq.read_table(run / "drift.parquet").to_pylist()
    assert (row["action"], row["verdict"], row["run"]) == ("retrain", "retrain", run.name)
    assert row["displacement_p95"] == found["displacement_p95"]
    page = (run / "report.html").read_text()
    assert '<section id="displacement">' in page
    assert "The encoder was trained again: novel_share 1.000 is above 0.05." in page
    assert (run / "displacement.png").read_bytes().startswith(b"\x89PNG")
    assert not refresh_job(job).changed  # and the next night finds nothing to do


def test_a_retrained_map_is_refreshed_like_any_other(job: Job, lake: Path) -> None:
    write_rows(lake / "new.parquet", NEW[:250])
    refresh_job(job)
    write_rows(lake / "more.parquet", NEW[250:])
    write_rows(lake / "known.parquet", KNOWN[1200:1400])
    published = refresh_job(job)
    assert actions(job) == ["run", "retrain", "refresh"]
    assert published.metrics["novel_share"] < 0.05
    check_places(Path(published.run.url))
    log = pq.read_table(Path(published.run.url) / "drift.parquet").to_pylist()
    assert [row["verdict"] for row in log] == ["retrain", "none"]
    assert log[1]["displacement_p95"] is None


def test_drift_below_the_retraining_only_warns(
    job: Job, lake: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_rows(lake / "new.parquet", np.concatenate([NEW[:10], KNOWN[1200:1490]]))
    with caplog.at_level(logging.WARNING, "lakemap"):
        published = refresh_job(job)
    assert "is above 0.03; look at the map" in caplog.text
    assert 0.03 < published.metrics["novel_share"] < 0.05
    assert actions(job) == ["run", "refresh"]
    page = (Path(published.run.url) / "report.html").read_text()
    assert "Warning: novel_share 0.0" in page


def test_too_few_rows_are_not_judged(job: Job, lake: Path) -> None:
    write_rows(lake / "new.parquet", NEW[:199])
    published = refresh_job(job)
    assert published.metrics["drift"] == "unknown"
    assert [published.metrics[name] for name in SCORES] == [None] * 3
    (lake / "new.parquet").unlink()
    published = refresh_job(job)  # and no new rows at all
    assert published.metrics["drift_rows"] == 0
    log = pq.read_table(Path(published.run.url) / "drift.parquet")
    assert log["verdict"].to_pylist() == ["unknown", "unknown"]


def test_retraining_when_asked_for(
    lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path / "job.yaml", lake, tmp_path / "maps", **QUICK)
    assert call_cli(capsys, "run", path).code == 0
    ran = call_cli(capsys, "refresh", path, "--retrain", "--json")
    assert ran.code == 0
    found = json.loads(ran.out)
    assert found["changed"]
    assert found["metrics"]["compared_rows"] == 500
    assert "novel_share" not in found["metrics"]
    log = history.entries(Folder(str(tmp_path / "maps")))
    assert [entry.action for entry in log] == ["run", "retrain"]
    check_places(tmp_path / "maps/runs" / log[-1].run)
    page = (tmp_path / "maps/runs" / log[-1].run / "report.html").read_text()
    assert "because it was asked for" in page
    ran = call_cli(capsys, "refresh", path)
    assert "nothing to do" in ran.out


def test_a_retraining_that_moves_rows_too_far_is_refused(job: Job, lake: Path) -> None:
    write_rows(lake / "new.parquet", NEW)
    strict = replace(job, gates=replace(job.gates, displacement=1e-6))
    seen = Recorder()
    with pytest.raises(
        GateError, match=r"gate displacement: 0\.\d+, the job allows 1e-06; nothing"
    ):
        refresh_job(strict, seen)
    assert seen.ran[-1] == "displacement"  # before the lake is embedded
    assert actions(job) == ["run"]
    refresh_job(job)
    assert actions(job) == ["run", "retrain"]


def test_a_retraining_that_loses_rows_is_refused(job: Job, lake: Path) -> None:
    for index in range(1, 4):
        (lake / f"f{index}.parquet").unlink()
    with pytest.raises(GateError, match=r"gate rows_lost: 0\.7500, the job allows 0\.5"):
        refresh_job(job, again=True)
    assert actions(job) == ["run"]


class Stopping(Recorder):
    """An observer that ends the run after a stage."""

    def stage_finished(self, name: str, *rest: Any, **more: Any) -> None:
        super().stage_finished(name, *rest, **more)
        if name == "displacement":
            raise KeyboardInterrupt


def test_a_retraining_cut_short_goes_on_where_it_was(job: Job, lake: Path) -> None:
    write_rows(lake / "new.parquet", NEW)
    with pytest.raises(KeyboardInterrupt):
        refresh_job(job, Stopping())
    seen = Recorder()
    published = refresh_job(job, seen)
    assert "train" in seen.skipped
    assert seen.ran == ["embed", "survey", "evaluate", "publish"]
    check_places(Path(published.run.url))


def test_where_every_file_was_written_anew_known_rows_are_compared(job: Job, lake: Path) -> None:
    for path in lake.iterdir():
        path.rename(path.with_name(f"again-{path.name}"))
    write_rows(lake / "new.parquet", NEW)
    found = refresh_job(job, again=True).metrics
    assert found["compared_on"] == "rows that the published encoder knew"
    assert found["compared_rows"] > 300


def test_workers_that_are_too_small_to_train_are_noticed_before(job: Job, lake: Path) -> None:
    write_rows(lake / "new.parquet", NEW)
    with pytest.raises(ConfigError, match="one task needs"):
        refresh.run(job, SerialRunner(task_bytes=1 << 20), Recorder())
    assert actions(job) == ["run"]


def test_a_published_run_without_a_reference_is_named(job: Job, lake: Path) -> None:
    write_rows(lake / "new.parquet", NEW)
    run = Path(job.output) / "runs" / str(history.current_run(Folder(job.output)))
    (run / "model/reference.safetensors").unlink()
    after = history.head(Folder(job.output))
    assert after is not None
    with pytest.raises(InputError, match=r"reference\.safetensors is missing; an earlier version"):
        retrain.run(job, after, None, one_try(), Recorder())


def test_blobs_are_what_they_should_be() -> None:
    assert isinstance(ROWS, Blobs)
    assert len(NEW) > 300

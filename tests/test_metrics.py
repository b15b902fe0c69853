"""The text file for Prometheus: what a run, a failed one and a single stage leave in it."""

import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families

from jobs import flow, metrics
from jobs.metrics import Figures, exit_code, read_figures, recorded, write_figures
from pipeline.config import Job
from pipeline.errors import ConfigError, GateError, StoreError
from pipeline.job_file import load_job
from tests.data import call_cli, make_blobs, make_job, small_blocks, write_job, write_parquet

MEASURED = {"rows_read": 300, "rows_mapped": 298, "rows_quarantined": 2, "recall": 0.97}
Capture = pytest.CaptureFixture[str]


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def time(self) -> float:
        self.seconds += 5
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(metrics, "time", found)
    return found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path, tmp_path / "maps", metrics={"textfile": "blobs.prom"})


def values(path: Path) -> dict[str, float]:
    return read_figures(path).values


def succeed(job: Job, found: dict[str, Any]) -> None:
    with recorded(job) as record:
        record.succeeded(found)


def fail(job: Job, error: BaseException) -> None:
    with pytest.raises(type(error)), recorded(job):
        raise error


def test_a_run_that_ended_well(job: Job, tmp_path: Path, clock: Clock) -> None:
    succeed(job, MEASURED | {"accuracy": None, "loss": 1.5, "evaluated_on": "rows held out"})
    path = tmp_path / "blobs.prom"
    assert values(path) == MEASURED | {
        "last_exit_code": 0,
        "last_run_seconds": 5,
        "last_success_timestamp_seconds": 1010,
    }
    assert list(tmp_path.iterdir()) == [path]  # nothing of the writing is left
    assert path.stat().st_mode & stat.S_IROTH  # node exporter is another user


def test_a_parser_of_their_own_reads_it(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "blobs.prom"
    write_figures(path, 'a "map"\\n', Figures({"recall": 0.5, "last_exit_code": 3}, {"train": 7}))
    families = list(text_string_to_metric_families(path.read_text()))
    assert {(family.name, family.type) for family in families} == {
        ("lakemap_recall", "gauge"),
        ("lakemap_last_exit_code", "gauge"),
        ("lakemap_stage_seconds", "gauge"),
    }
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["map"] for sample in samples} == {'a "map"\\n'}
    assert read_figures(path) == Figures({"recall": 0.5, "last_exit_code": 3}, {"train": 7})


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GateError("gate recall"), 3),
        (StoreError("disk"), 4),
        (ConfigError("job"), 2),
        (ZeroDivisionError(), 1),
        (typer.Exit(130), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_failure_keeps_the_last_success(
    error: BaseException, code: int, job: Job, tmp_path: Path, clock: Clock
) -> None:
    assert exit_code(error) == code
    succeed(job, MEASURED)
    fail(job, error)
    assert values(tmp_path / "blobs.prom") == MEASURED | {
        "last_exit_code": code,
        "last_run_seconds": 5,
        "last_success_timestamp_seconds": 1010,
        "last_failure_timestamp_seconds": 1020,
    }
    succeed(job, MEASURED)
    found = values(tmp_path / "blobs.prom")
    assert (found["last_exit_code"], found["last_success_timestamp_seconds"]) == (0, 1030)
    assert found["last_failure_timestamp_seconds"] == 1020


def test_figures_of_an_earlier_map_go(job: Job, tmp_path: Path) -> None:
    drift = {"novel_share": 0.1, "domain_auc": 0.7, "displacement_p95": 0.02}
    succeed(job, MEASURED | drift)
    assert values(tmp_path / "blobs.prom").items() >= drift.items()
    succeed(job, MEASURED | {"recall": float("nan")})
    assert not values(tmp_path / "blobs.prom").keys() & {*drift, "recall"}


@pytest.mark.parametrize("content", [b"no figures {", b"\xff\xfe", b""])
def test_a_damaged_file_is_replaced(content: bytes, job: Job, tmp_path: Path) -> None:
    path = tmp_path / "blobs.prom"
    path.write_bytes(content)
    succeed(job, MEASURED)
    assert values(path)["rows_mapped"] == 298


def test_a_place_that_cannot_be_written(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = make_job(tmp_path, tmp_path / "maps", metrics={"textfile": "nowhere/blobs.prom"})
    with pytest.raises(ConfigError, match=r"nowhere is not a folder.*make it, or name another"):
        succeed(lost, MEASURED)
    caplog.set_level(logging.WARNING, "lakemap")
    (tmp_path / "blobs.prom").mkdir()  # too late to refuse: the run is done
    succeed(job, MEASURED)
    assert "metrics.textfile" in caplog.text
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("textfile", ["metrics.txt", "s3://bucket/job.prom"])
def test_a_name_that_node_exporter_would_not_read(textfile: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics.textfile is .*must be a path that ends in"):
        make_job(tmp_path, tmp_path / "maps", metrics={"textfile": textfile})


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    succeed(make_job(tmp_path, tmp_path / "maps"), MEASURED)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_leaves_it(tmp_path: Path, capsys: Capture) -> None:
    """Stage by stage, a run with nothing to do, a run that a gate refuses."""
    write_parquet(tmp_path / "lake", *make_blobs(300), n_bad=2, n_files=2)
    (tmp_path / "textfiles").mkdir()
    path = tmp_path / "textfiles/blobs.prom"
    job = write_job(
        tmp_path / "job.yaml",
        tmp_path / "lake",
        tmp_path / "maps",
        train={"steps": 5},
        gates={"trustworthiness": None},
        metrics={"textfile": "textfiles/blobs.prom"},
    )
    assert load_job(job).metrics.textfile == str(path)
    with small_blocks():
        for group in flow.GROUPS:
            assert call_cli(capsys, "stage", group, job).code == 0
            done = "last_success_timestamp_seconds" in values(path)
            assert done == (group == "publish")
        found = read_figures(path)
        assert list(found.seconds) == [stage.name for stage in flow.STAGES]
        current = json.loads((tmp_path / "maps/CURRENT").read_bytes())["run"]
        published = json.loads((tmp_path / f"maps/runs/{current}/metrics.json").read_bytes())
        assert found.values["rows_quarantined"] == 2
        for name in ("rows_mapped", "recall", "trustworthiness"):
            assert found.values[name] == published[name]

        path.unlink()
        assert call_cli(capsys, "run", job).out.startswith("nothing to do")
        assert read_figures(path).seconds == found.seconds
        success = values(path)["last_success_timestamp_seconds"]
        assert call_cli(capsys, "run", job, "--set", "gates.trustworthiness=1").code == 3
        assert values(path)["last_exit_code"] == 3
        assert values(path)["last_failure_timestamp_seconds"] > success
        assert values(path)["last_success_timestamp_seconds"] == success

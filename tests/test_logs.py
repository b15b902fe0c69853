"""Log lines as JSON: every line on standard error is one object, whoever writes it."""

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs import flow
from jobs.logs import JsonFormatter, JsonLines, fields, print_error
from tests.data import make_blobs, run_process, write_job, write_parquet


def read_lines(text: str) -> list[dict[str, Any]]:
    """The objects; anything else on a line is an error."""
    return [json.loads(line) for line in text.splitlines()]


def test_a_record_is_one_line() -> None:
    record = logging.LogRecord("lakemap", logging.WARNING, "", 0, "%s\nrows", ("é",), None)
    record.created = 1_700_000_000.25
    assert json.loads(JsonFormatter().format(record)) == {
        "time": "2023-11-14T22:13:20.250+00:00",
        "level": "warning",
        "event": "line",
        "message": "é\nrows",
    }
    assert "\n" not in JsonFormatter().format(record)
    vars(record).update(fields("progress", stage="embed", rows=7))
    found = json.loads(JsonFormatter().format(record))
    assert (found["event"], found["stage"], found["rows"]) == ("progress", "embed", 7)


def test_a_traceback_stays_on_the_line() -> None:
    try:
        raise ValueError("from inside")
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord("lakemap", logging.ERROR, "", 0, "failed", (), info)
    (found,) = read_lines(JsonFormatter().format(record))
    assert "ValueError: from inside" in found["traceback"]


def test_what_others_write_becomes_objects() -> None:
    target = io.StringIO()
    lines = JsonLines(target)
    assert lines.writable()
    lines.write("Usage: lake")
    lines.write("map\n\nsecond\nthi")
    assert [found["message"] for found in read_lines(target.getvalue())] == [
        "Usage: lakemap",
        "second",
    ]
    lines.flush()
    assert read_lines(target.getvalue())[-1]["message"] == "thi"
    lines.flush()
    assert len(read_lines(target.getvalue())) == 3


def test_an_error_line_is_plain_unless_json_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lakemap")
    target = io.StringIO()
    monkeypatch.setattr(sys, "stderr", target)
    print_error("lakemap: gate recall", 3)
    assert target.getvalue() == "lakemap: gate recall\n"
    monkeypatch.setattr(sys, "stderr", JsonLines(target))
    print_error("lakemap: gate recall", 3)
    (record,) = caplog.records
    assert vars(record)["fields"] == {"event": "failed", "exit_code": 3}


def test_a_whole_run_and_a_refused_one(tmp_path: Path) -> None:
    write_parquet(tmp_path / "lake", *make_blobs(300), n_bad=2, n_files=2)
    job = write_job(
        tmp_path / "job.yaml", tmp_path / "lake", tmp_path / "maps", train={"steps": 5},
        gates={"trustworthiness": None},
    )  # fmt: skip
    ran = run_process("run", job, "--log-json")
    lines = read_lines(ran.err)
    assert (ran.code, lines[-1]["event"], lines[-1]["exit_code"]) == (0, "ended", 0)
    assert all({"time", "level", "event", "message"} <= line.keys() for line in lines)
    finished = {line["stage"]: line for line in lines if line["event"] == "stage_finished"}
    assert list(finished) == [stage.name for stage in flow.STAGES]
    assert (finished["embed"]["rows"], finished["ingest"]["n_bad"]) == (298, 2)
    assert finished["embed"]["seconds"] > 0
    started = {line["stage"]: line for line in lines if line["event"] == "stage_started"}
    assert (started["embed"]["partitions"], started["embed"]["partitions_done"]) == (2, 0)

    refused = run_process("run", job, "--log-json", "--set", "gates.trustworthiness=1")
    *_, failed, ended = read_lines(refused.err)
    assert (refused.code, failed["exit_code"], ended["exit_code"]) == (3, 3, 3)
    assert (failed["event"], failed["level"]) == ("failed", "error")
    assert failed["message"].startswith("lakemap: gate trustworthiness: ")

    wrong = run_process("run", "--log-json")  # the command line's own message
    lines = read_lines(wrong.err)
    assert (wrong.code, lines[-1]["exit_code"]) == (2, 2)
    assert any("Missing argument" in line["message"] for line in lines)

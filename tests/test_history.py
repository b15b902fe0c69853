"""The publish log: one winner, CURRENT follows, earlier runs come back."""

import json
import time
from pathlib import Path

import pytest

from jobs.metrics import read_figures
from pipeline import history
from pipeline.errors import BusyError, InputError, StoreError
from pipeline.history import Entry
from pipeline.stores import Folder
from tests.data import Ran, call_cli, make_blobs, tree, write_job, write_parquet

Capture = pytest.CaptureFixture[str]


def pointed_at(root: Folder) -> str:
    return str(json.loads(root.get("CURRENT"))["run"])


def test_publications_follow_one_another(folder: Folder) -> None:
    assert history.head(folder) is None
    assert history.start(folder) is None
    assert history.entries(folder) == []
    assert history.publish(folder, None, "one", "run", 10)
    first = history.start(folder)
    assert first is not None
    assert (first.number, first.run, first.previous, first.rows) == (1, "one", None, 10)
    assert not history.publish(folder, first, "one", "run", 10)  # it is already
    assert history.publish(folder, first, "two", "refresh", 12)
    assert [entry.run for entry in history.entries(folder)] == ["one", "two"]
    assert history.current_run(folder) == pointed_at(folder) == "two"


def test_of_two_publishers_one_wins(folder: Folder) -> None:
    history.publish(folder, None, "base", "run", 1)
    seen = history.start(folder)
    history.publish(folder, seen, "fast", "refresh", 2)
    with pytest.raises(
        BusyError, match=r"run fast was published meanwhile .* run slow is not"
    ) as e:
        history.publish(folder, seen, "slow", "refresh", 3)
    assert e.value.exit_code == 5
    assert history.current_run(folder) == pointed_at(folder) == "fast"
    assert len(history.entries(folder)) == 2


def test_a_pointer_that_a_crash_left_behind_is_put_right(folder: Folder) -> None:
    history.publish(folder, None, "one", "run", 1)
    old = folder.get("CURRENT")
    history.publish(folder, history.head(folder), "two", "run", 1)
    folder.put("CURRENT", old)
    assert history.current_run(folder) == "two"  # readers are never misled
    history.start(folder)
    assert pointed_at(folder) == "two"


def test_an_output_of_an_older_version_is_adopted(folder: Folder) -> None:
    folder.put("CURRENT", b'{"run": "old", "manifest": "runs/old/manifest.json", "format": 1}')
    seen = history.start(folder)
    assert seen == Entry(0, "old", "run", "", None, 0)
    history.publish(folder, seen, "new", "run", 5)
    (entry,) = history.entries(folder)
    assert (entry.number, entry.run, entry.previous) == (1, "new", "old")
    assert history.run_before([entry], "new") == "old"
    folder.put("CURRENT", b"[]")
    folder.delete("history/000001.json")
    with pytest.raises(InputError, match="CURRENT: names no run; correct it"):
        history.head(folder)


def test_a_clock_that_went_backwards(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    history.publish(folder, None, "late", "run", 1)
    monkeypatch.setattr(time, "time", lambda: now)
    message = (
        r"history/000001.json: written at 2\S+Z, but the clock of this machine says 2\S+Z; set"
    )
    with pytest.raises(StoreError, match=message):
        history.start(folder)
    with pytest.raises(StoreError, match=message):
        history.seen(folder)
    assert history.current_run(folder) == "late"  # looking is allowed


def test_damaged_records_are_named(folder: Folder) -> None:
    folder.put("history/000001.json", b"{}")
    with pytest.raises(StoreError, match=r"history/000001.json: not a record of a publication"):
        history.head(folder)
    entry = '{"number":1,"run":"a","action":"run","at":"","previous":null,"rows":1,"format":9}'
    folder.put("history/000001.json", entry.encode())
    with pytest.raises(StoreError, match=r"000001.json: format 9, this version reads 1"):
        history.head(folder)


def entry(number: int, run: str, action: history.Action, previous: str | None) -> Entry:
    return Entry(number, run, action, "2026-01-01T00:00:00Z", previous, 1)


def test_the_run_before() -> None:
    log = [
        entry(1, "a", "run", None),
        entry(2, "b", "refresh", "a"),
        entry(3, "c", "refresh", "b"),
        entry(4, "b", "rollback", "c"),
    ]
    assert history.run_before(log, "b") == "a"  # not c, which was rolled back
    log.append(entry(5, "d", "refresh", "b"))
    assert history.run_before(log, "d") == "b"
    assert history.run_before(log, "a") is None


def test_rollback_and_history_on_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    def call(*words: str | Path) -> Ran:
        return call_cli(capsys, *words)

    blobs = make_blobs(420)
    write_parquet(tmp_path / "lake", blobs.vectors[:300], n_files=3)
    job = write_job(
        tmp_path / "job.yaml",
        tmp_path / "lake",
        tmp_path / "maps",
        train={"steps": 4},
        gates={"trustworthiness": None},
        metrics={"textfile": "blobs.prom"},
    )
    nothing = call("rollback", job)
    assert (nothing.code, "no published map" in nothing.err) == (2, True)
    runs = [json.loads(call("run", job, "--json").out)["run"]]
    for night in range(2):
        more = write_parquet(tmp_path / f"more{night}", blobs.vectors[300 + 60 * night :][:60])
        for file in more.path.iterdir():
            file.rename(tmp_path / f"lake/night{night}-{file.name}")
        ran = call("refresh", job, "--json")
        assert ran.code == 0, ran.err
        runs.append(json.loads(ran.out)["run"])
    assert len(set(runs)) == 3

    log = json.loads(call("history", job, "--json").out)
    assert [(e["run"], e["action"], e["rows"]) for e in log] == [
        (runs[0], "run", 300),
        (runs[1], "refresh", 360),
        (runs[2], "refresh", 420),
    ]
    assert all(run in call("history", job).out for run in runs)
    before = tree(tmp_path / "maps/runs")
    ran = call("rollback", job)
    assert ran.out == f"published: {runs[1]} (360 rows) in place of {runs[2]}\n"
    assert "360 rows mapped" in call("report", job).out
    assert read_figures(tmp_path / "blobs.prom").values["rows_mapped"] == 360
    assert tree(tmp_path / "maps/runs") == before
    assert call("rollback", job).out.startswith(f"published: {runs[0]} (300 rows)")
    last = call("rollback", job)
    assert (last.code, "no run was published before" in last.err) == (2, True)
    assert read_figures(tmp_path / "blobs.prom").values["last_exit_code"] == 2
    assert "is the published one" in call("rollback", job, runs[0]).err
    assert "is not there" in call("rollback", job, "0123456789abcdef").err

    again = call("refresh", job, "--json")  # from the map that was rolled back to
    assert json.loads(again.out)["metrics"]["rows_mapped"] == 420
    assert json.loads(again.out)["metrics"]["trained_in"] == runs[0]
    assert call("rollback", job, runs[2]).code == 0
    assert pointed_at(Folder(str(tmp_path / "maps"))) == runs[2]
    actions = [e["action"] for e in json.loads(call("history", job, "--json").out)]
    assert actions == ["run", "refresh", "refresh", "rollback", "rollback", "refresh", "rollback"]
    assert not list((tmp_path / "maps/leases").iterdir())

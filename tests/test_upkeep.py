"""verify and gc: damage of every kind is found and named, and nothing that is needed is removed."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.status import used_stores
from pipeline import history
from pipeline.job_file import load_job
from pipeline.manifest import find_store
from pipeline.stores import Folder
from pipeline.upkeep import collect, verify
from tests.data import LABELLED, call_cli, digests, make_blobs, write_job, write_parquet
from tests.faults import flip_bit, remove, truncate

Capture = pytest.CaptureFixture[str]
LONG_AGO = 1_000_000.0


@pytest.fixture
def job(tmp_path: Path, capsys: Capture) -> Path:
    """A job that has been run."""
    lake = write_parquet(tmp_path / "lake", *make_blobs(600), n_bad=2)
    path = write_job(tmp_path / "job.yaml", lake.path, tmp_path / "maps", input=LABELLED)
    ran = call_cli(capsys, "run", path)
    assert ran.code == 0, ran.err
    return path


@pytest.fixture
def maps(job: Path) -> Path:
    return job.parent / "maps"


def age(root: Path, seconds: float = LONG_AGO) -> None:
    """Make everything below root that much older."""
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - seconds, time.time() - seconds))


def a_map(maps: Path) -> Path:
    return sorted(maps.glob("stores/embed/*/data/*/map.parquet"))[0]


def test_a_sound_output_is_said_to_be_sound(job: Path, maps: Path, capsys: Capture) -> None:
    ran = call_cli(capsys, "verify", job)
    assert ran.code == 0
    found = verify(Folder(str(maps)))
    assert found.damaged == ()
    assert found.n_rows == 598
    stored = [path for path in maps.glob("stores/*/*/data/**/*") if path.is_file()]
    published = [path for path in maps.glob("runs/*/**/*") if path.is_file()]
    assert found.n_files == len(stored) + len(published) - 1  # less the run's manifest
    assert f"{found.n_files:,} files read" in ran.out


@pytest.mark.parametrize(
    ("damage", "what"),
    [(flip_bit, "checksum differs"), (truncate, "bytes, its record says"), (remove, "missing")],
)
def test_damage_is_named(
    damage: Callable[[Path], None], what: str, job: Path, maps: Path, capsys: Capture
) -> None:
    path = a_map(maps)
    damage(path)
    ran = call_cli(capsys, "verify", job)
    assert ran.code == 4
    assert [line for line in ran.out.splitlines() if str(path) in line and what in line]
    (line,) = ran.err.splitlines()
    assert "files are damaged; lakemap run" in line
    assert verify(Folder(str(maps))).damaged


def test_a_table_with_other_rows_than_its_record_says(maps: Path) -> None:
    (commit,) = sorted(maps.glob("stores/embed/*/commits/*.json"))[:1]
    record = json.loads(commit.read_bytes())
    record["record"]["n_rows"] += 1
    commit.write_text(json.dumps(record))
    (line,) = verify(Folder(str(maps))).damaged
    assert "rows, its record says" in line


def test_what_is_needed_is_never_collected(job: Path, maps: Path, capsys: Capture) -> None:
    age(maps)
    before = digests(maps)
    ran = call_cli(capsys, "gc", job, "--min-age-hours", "0")
    assert ran.out == "0 files, 0 B, removed\n"
    assert digests(maps) == before


def test_orphans_are_collected_and_nothing_else(job: Path, maps: Path, capsys: Capture) -> None:
    needed = digests(maps)
    store = find_store(Folder(str(next(maps.glob("stores/ingest/*")))))
    assert store is not None
    orphan = Path(f"{store.folder.url}/data/000000-deadbeefdeadbeef/quarantine.parquet")
    orphan.parent.mkdir()
    orphan.write_bytes(b"lost")
    half_made = maps / "runs/0123456789abcdef/map/000000.parquet"
    half_made.parent.mkdir(parents=True)
    half_made.write_bytes(b"cut short")
    changed = ["--set", "train.steps=31"]
    assert call_cli(capsys, "stage", "train", job, *changed).code == 0  # of other settings
    lost = digests(maps).keys() - needed.keys()
    assert len(lost) > 5

    root, used = Folder(str(maps)), used_stores(load_job(job))
    assert collect(root, used, time.time() - 3600, delete=True).n_files == 0  # all too young
    age(maps)
    dry = call_cli(capsys, "gc", job, "--dry-run")
    assert dry.out.splitlines()[-1].endswith("would be removed")
    assert "runs/0123456789abcdef" in dry.out
    assert digests(maps).keys() == needed.keys() | lost
    kept = call_cli(capsys, "gc", job, "--dry-run", *changed).out
    assert "stores/train" not in kept  # with those settings the store is the job's
    assert "stores/train" in dry.out

    ran = call_cli(capsys, "gc", job)
    assert ran.code == 0
    assert f"{len(lost):,} files" in ran.out
    assert digests(maps) == needed
    assert verify(root).damaged == ()
    assert "nothing to do" in call_cli(capsys, "run", job).out


def test_old_runs_go_and_the_map_stays(job: Path, maps: Path, capsys: Capture) -> None:
    lake = job.parent / "lake"
    for night in range(3):
        shutil.copy(lake / "part-0.parquet", lake / f"night-{night}.parquet")
        ran = call_cli(capsys, "refresh", job)
        assert ran.code == 0, ran.err
    log = history.entries(Folder(str(maps)))
    assert len(list((maps / "runs").iterdir())) == len(log) == 4
    age(maps)
    assert call_cli(capsys, "gc", job).out == "0 files, 0 B, removed\n"  # a week of runs stays
    newest = maps / "runs" / log[-1].run
    before = digests(newest)
    dry = call_cli(capsys, "gc", job, "--keep-runs", "2", "--dry-run").out
    assert f"runs/{log[0].run}" in dry
    assert "stores/train" in dry  # of the first run, which goes
    (maps / "runs" / log[0].run / "manifest.json").touch()  # one of today
    assert f"runs/{log[0].run}" not in call_cli(capsys, "gc", job, "--keep-runs", "2").out
    age(maps)
    assert call_cli(capsys, "gc", job, "--keep-runs", "2").code == 0
    kept = {path.name for path in (maps / "runs").iterdir() if list(path.rglob("*.json"))}
    assert kept == {log[-1].run, log[-2].run}
    assert digests(newest) == before
    assert call_cli(capsys, "verify", job).code == 0
    gone = call_cli(capsys, "rollback", job, log[0].run)
    assert (gone.code, "removed by lakemap gc" in gone.err) == (2, True)
    assert call_cli(capsys, "rollback", job).code == 0
    assert "nothing to do" not in call_cli(capsys, "refresh", job).out


def test_a_history_that_cannot_be_read_is_damage(job: Path, maps: Path, capsys: Capture) -> None:
    (maps / "history/000001.json").write_text("?")
    ran = call_cli(capsys, "verify", job)
    assert ran.code == 4
    assert "history/000001.json: not a record of a publication" in ran.out
    (maps / "history/000001.json").unlink()
    (run,) = (maps / "runs").iterdir()
    (run / "manifest.json").unlink()
    assert "it is the published run" in call_cli(capsys, "verify", job).out

"""refresh: the map follows the lake, rows that stay do not move, and nothing else is touched."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from encoders.artifact import Encoder
from jobs import flow, refresh
from pipeline import history
from pipeline.config import Job
from pipeline.published import load_snapshot
from pipeline.runner import Runner
from pipeline.stores import Folder
from tests.data import (
    Blobs,
    Recorder,
    call_cli,
    make_blobs,
    make_job,
    run_job,
    run_process,
    tree,
    write_job,
    write_zarr,
)
from tests.refresh.nights import (
    QUICK,
    change_lake,
    check_density,
    check_run,
    expect_map,
    read_places,
    refresh_job,
    some,
    write_file,
)

STEPS = ["encoder", "ingest", "embed", "drift", "tally", "republish"]


def test_the_map_follows_the_lake(job: Job, lake: Path) -> None:
    before = Path(job.output) / "runs" / str(history.current_run(Folder(job.output)))
    inodes = {path.name: path.stat().st_ino for path in (before / "map").iterdir()}
    known = load_snapshot(Folder(str(before)))
    old_tree = tree(before)
    change_lake(lake)
    seen = Recorder()
    published = refresh_job(job, seen)
    assert seen.ran == STEPS
    assert published.changed
    check_run(published, lake)
    assert tree(before) == old_tree

    run = Path(published.run.url)
    files = {path.name: path.stat().st_ino for path in (run / "map").iterdir()}
    touched = {"f0.parquet", "f4.parquet"}
    stays = {
        Path(name).name
        for part in known.parts
        if not touched & {piece.path for piece in part.pieces}
        for name in part.map_files
    }
    assert stays
    assert {name: inodes[name] for name in stays} == {
        name: inode for name, inode in files.items() if name in inodes
    }
    assert min(int(name[:6]) for name in files.keys() - stays) >= len(known.parts)
    metrics = published.metrics
    counts = {name: metrics[f"files_{name}"] for name in ("new", "changed", "removed", "kept")}
    assert counts == {"new": 1, "changed": 1, "removed": 1, "kept": 4}
    assert (metrics["rows_new"], metrics["rows_changed"], metrics["rows_removed"]) == (150, 130, 90)
    assert metrics["rows_bad"] >= 2
    assert metrics["trained_in"] == before.name
    old = json.loads((before / "metrics.json").read_bytes())
    assert (metrics["trustworthiness"], metrics["recall"]) == (
        old["trustworthiness"],
        old["recall"],
    )
    page = (run / "report.html").read_text()
    assert "What changed" in page
    assert f"Measured when the encoder was trained, in run <code>{before.name}" in page


def test_a_refresh_that_has_nothing_to_do_writes_nothing(
    lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path / "job.yaml", lake, tmp_path / "maps", **QUICK)
    first = call_cli(capsys, "refresh", path, "--json")  # no map yet: the whole run
    assert first.code == 0, first.err
    assert json.loads(first.out)["changed"] is True
    before = tree(tmp_path)
    again = call_cli(capsys, "refresh", path)
    assert again.code == 0
    assert again.out.startswith("nothing to do: the published map is up to date\n")
    assert tree(tmp_path) == before
    (lake / "_SUCCESS").touch()  # not of the lake
    assert call_cli(capsys, "refresh", path).code == 0
    assert tree(tmp_path / "maps") == {
        name.removeprefix("maps/"): entry
        for name, entry in before.items()
        if name.startswith("maps/")
    }


def test_night_after_night_without_stores(job: Job, lake: Path) -> None:
    given: set[int] = set()
    for night in range(3):
        shutil.rmtree(Path(job.output) / "stores")  # the run's folder is all a refresh needs
        write_file(lake / f"n{night}.parquet", some(60, 20 + night), 20_000 + 100 * night)
        published = refresh_job(job)
        check_run(published, lake)
        given |= {part.number for part in load_snapshot(published.run).parts}
    assert [entry.action for entry in history.entries(Folder(job.output))] == [
        "run",
        *["refresh"] * 3,
    ]
    (lake / "n1.parquet").unlink()
    published = refresh_job(job)
    check_run(published, lake)
    assert published.metrics["rows_removed"] == 60
    given |= {part.number for part in load_snapshot(published.run).parts}
    write_file(lake / "n4.parquet", some(60, 24), 24_000)
    published = refresh_job(job)
    check_run(published, lake)
    numbers = [part.number for part in load_snapshot(published.run).parts]
    assert len(set(numbers)) == len(numbers)
    assert sum(number not in given for number in numbers) == 1  # none is given twice


def test_workers_make_the_same_map(job: Job, lake: Path, dask_runner: Runner) -> None:
    change_lake(lake)
    published = refresh.run(job, dask_runner, Recorder())
    check_run(published, lake)
    (lake / "f5.parquet").unlink()
    (lake / "f3.parquet").unlink()
    check_run(refresh.run(job, dask_runner, Recorder()), lake)


@pytest.mark.slow
def test_of_two_refreshes_started_at_once_one_does_the_work(lake: Path, tmp_path: Path) -> None:
    path = write_job(tmp_path / "job.yaml", lake, tmp_path / "maps", **QUICK)
    assert run_process("run", path).code == 0
    change_lake(lake)
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda _: run_process("refresh", path), range(2)))
    assert sorted(ran.code for ran in ended) in ([0, 5], [0, 0]), ended
    for ran in ended:
        if ran.code == 5:
            assert "lakemap refresh is at work here" in ran.err
    root = Folder(str(tmp_path / "maps"))
    assert [entry.action for entry in history.entries(root)] == ["run", "refresh"]
    run = tmp_path / "maps/runs" / str(history.current_run(root))
    assert read_places(run) == expect_map(run, lake)
    assert root.list("leases") == {}


def test_only_removed_files(job: Job, lake: Path) -> None:
    seen = Recorder()
    (lake / "f5.parquet").unlink()
    published = refresh_job(job, seen)
    check_run(published, lake)
    assert published.metrics["files_removed"] == 1


def test_files_without_rows_are_nothing_to_do(job: Job, lake: Path) -> None:
    base = refresh.find_base(job)
    assert base is not None
    write_file(lake / "g.parquet", some(0), 0)
    assert refresh.find_work(job, base) is None
    assert not refresh_job(job).changed


def test_a_crash_half_way_is_resumed(job: Job, lake: Path) -> None:
    change_lake(lake)

    class Crash(Recorder):
        def part_done(self, name: str, commit: Any) -> None:
            super().part_done(name, commit)
            if name == "embed":
                raise RuntimeError("power cut")

    log = history.entries(Folder(job.output))
    with pytest.raises(RuntimeError, match="power cut"):
        refresh_job(job, Crash())
    assert history.entries(Folder(job.output)) == log
    seen = Recorder()
    published = refresh_job(job, seen)
    assert seen.skipped == ["encoder", "ingest"]
    check_run(published, lake)


@pytest.mark.parametrize(
    "form",
    [
        {"embed": {"spatial_key": True}},
        {"embed": {"partition_by": "label"}},
        {"embed": {"columns": ["test"]}},
    ],
)
def test_map_files_of_every_form(form: dict[str, Any], lake: Path, tmp_path: Path) -> None:
    plain = make_job(lake, tmp_path / "maps", **QUICK)
    run_job(plain)
    job = make_job(lake, tmp_path / "maps", **QUICK, **form)
    published = refresh_job(job)  # all files in another form, no row at another place
    check_run(published, lake)
    assert published.metrics["rows_again"] == published.metrics["rows_read"]
    assert not refresh_job(job).changed
    change_lake(lake)
    check_run(refresh_job(job), lake)


def test_new_labels_get_colours_and_old_ones_keep_theirs(job: Job, lake: Path) -> None:
    first = load_snapshot(
        Folder(job.output).join(f"runs/{history.current_run(Folder(job.output))}")
    )
    rows = some(50, 31)
    write_file(lake / "z.parquet", Blobs(rows.vectors, rows.labels + 70), 30_000)
    published = refresh_job(job)
    check_run(published, lake)
    found = load_snapshot(published.run)
    assert found.categories[: len(first.categories)] == first.categories
    assert len(found.categories) == len(first.categories) + len(np.unique(rows.labels))
    many = some(120, 32)
    write_file(lake / "zz.parquet", Blobs(many.vectors, np.arange(120) + 100), 40_000)
    published = refresh_job(job)
    check_run(published, lake)
    assert load_snapshot(published.run).categories[-1] == "(other)"


@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_array_that_grows_changes_and_shrinks(version: Any, tmp_path: Path) -> None:
    blobs = make_blobs(1400)
    lake = write_zarr(tmp_path / "lake", Blobs(blobs.vectors[:950], blobs.labels[:950]), version)
    job = make_job(lake.path, tmp_path / "maps", **QUICK | {"input": {"label": "blob"}})
    run_job(job)
    group: Any = zarr.open_group(lake.path, mode="r+", zarr_format=version)

    def check(n_rows: int, vectors: Any) -> flow.Published:
        published = refresh_job(job)
        places = read_places(Path(published.run.url))
        xy = Encoder.load(Path(published.run.url) / "model").embed(vectors[:n_rows])
        ids = range(10_000, 10_000 + n_rows)
        assert places == dict(zip(ids, map(tuple, xy.tolist()), strict=True))
        check_density(Path(published.run.url))
        assert not refresh_job(job).changed
        return published

    for name, values in (("embedding", blobs.vectors), ("blob", blobs.labels)):
        group[name].resize((1400, *values.shape[1:]))
        group[name][950:] = values[950:]
    group["item"].resize((1400,))
    group["item"][950:] = np.arange(950, 1400) + 10_000
    grown = check(1400, blobs.vectors)
    assert grown.metrics["rows_new"] == 450
    assert grown.metrics["rows_kept"] >= 512

    other = blobs.vectors.copy()
    other[300:400] += 1
    group["embedding"][300:400] = other[300:400]
    changed = check(1400, other)
    assert changed.metrics["rows_changed"] < 600
    assert changed.metrics["files_changed"] == 1

    for name, values in (("embedding", blobs.vectors), ("blob", blobs.labels)):
        group[name].resize((700, *values.shape[1:]))
    group["item"].resize((700,))
    assert check(700, other).metrics["rows_removed"] == 700

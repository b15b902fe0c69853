"""refresh: the map follows the lake, rows that stay do not move, and nothing else is touched."""

import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import zarr

from encoders.artifact import Encoder
from jobs import flow, refresh
from pipeline import history
from pipeline.config import Job
from pipeline.errors import ConfigError, GateError, InputError, LakemapError, StoreError
from pipeline.lake import InputFile, take_snapshot
from pipeline.partitions import Piece
from pipeline.picture import rasterize
from pipeline.published import encode_snapshot, load_snapshot, read_density
from pipeline.runner import Runner
from pipeline.stages.evaluate import PIXELS, category_codes
from pipeline.stages.ingest import lake_source
from pipeline.stores import Folder
from tests.data import (
    WIDTH,
    Blobs,
    Recorder,
    call_cli,
    make_blobs,
    make_job,
    one_try,
    run_job,
    run_process,
    small_blocks,
    tree,
    write_job,
    write_zarr,
)

QUICK: dict[str, Any] = {
    "input": {"label": "blob", "holdout": "test", "max_bad_fraction": 0.05},
    "train": {"steps": 4},
    "gates": {"trustworthiness": None},
    "drift": {"retrain": {"novel_share": None}},  # other seeds have other blobs
}
STEPS = ["encoder", "ingest", "embed", "drift", "tally", "republish"]


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def write_file(path: Path, rows: Blobs, first_id: int, n_bad: int = 0) -> None:
    """One file of a lake; its first rows are bad."""
    lists: list[Any] = rows.vectors.tolist()
    lists[:n_bad] = [None] * n_bad
    table = pa.table(
        {
            "item": np.arange(first_id, first_id + len(lists)),
            "embedding": pa.array(lists, pa.list_(pa.float32())),
            "blob": rows.labels,
            "test": np.arange(len(lists)) % 7 == 0,
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def some(n_rows: int, seed: int = 0) -> Blobs:
    return make_blobs(n_rows, seed=seed)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Six files, of which partitions of 256 rows hold one or two or a part."""
    for index, n_rows in enumerate((120, 100, 300, 40, 90, 260)):
        write_file(
            tmp_path / f"lake/f{index}.parquet", some(n_rows, index), 1000 * index, index % 2
        )
    return tmp_path / "lake"


@pytest.fixture
def job(lake: Path, tmp_path: Path) -> Job:
    """A job whose map is published."""
    made = make_job(lake, tmp_path / "maps", **QUICK)
    run_job(made)
    return made


def refresh_job(job: Job, seen: Recorder | None = None) -> flow.Published:
    return refresh.run(job, one_try(), seen or Recorder())


def change_lake(lake: Path) -> None:
    """A new file, a removed one, one that is written anew with other rows."""
    write_file(lake / "f1b.parquet", some(150, 11), 7000, 2)
    (lake / "f4.parquet").unlink()
    write_file(lake / "f0.parquet", some(130, 12), 8000)


def expect_map(run: Path, lake: Path) -> dict[Any, tuple[float, float]]:
    """The map of the lake as it is that the run's encoder makes from the beginning."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted(lake.glob("*.parquet"))])
    table = table.filter(pc.is_valid(table["embedding"]))
    vectors = np.array(table["embedding"].to_pylist(), np.float32).reshape(-1, WIDTH)
    xy = Encoder.load(run / "model").embed(vectors)
    return dict(zip(table["item"].to_pylist(), map(tuple, xy.tolist()), strict=True))


def read_places(run: Path) -> dict[Any, tuple[float, float]]:
    """Place by id; no id may come twice."""
    table = pq.read_table(run / "map")
    ids = table["id"].to_pylist()
    assert len(set(ids)) == len(ids)
    xy = zip(table["x"].to_pylist(), table["y"].to_pylist(), strict=True)
    return dict(zip(ids, xy, strict=True))


def check_run(published: flow.Published, lake: Path) -> None:
    """The run is the map of the lake, row for row, and its records are those of its files."""
    run = Path(published.run.url)
    assert read_places(run) == expect_map(run, lake)
    metrics = json.loads((run / "metrics.json").read_bytes())
    assert metrics == published.metrics
    n_rows = sum(pq.read_metadata(path).num_rows for path in lake.glob("*.parquet"))
    assert metrics["rows_read"] == n_rows == metrics["rows_mapped"] + metrics["rows_quarantined"]
    quarantine = [pq.read_metadata(path).num_rows for path in run.glob("quarantine/*.parquet")]
    assert sum(quarantine) == metrics["rows_quarantined"]
    listed = json.loads((run / "manifest.json").read_bytes())["files"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == {
        name: size for name, (size, _) in tree(run, ("manifest.json",)).items()
    }
    check_density(run)


def check_density(run: Path) -> None:
    """Rows per pixel, updated file by file, are those of the whole map."""
    known, table = load_snapshot(Folder(str(run))), pq.read_table(run / "map")
    xy = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
    codes = category_codes(table, known.categories)
    counts = rasterize(xy, codes, len(known.categories), known.extent, PIXELS)
    found = read_density((run / "density.parquet").read_bytes(), len(known.categories), PIXELS)
    assert (found == counts).all()
    if known.labels is not None:
        labels = pc.value_counts(pc.cast(table["label"], pa.string())).to_pylist()
        assert known.labels == {pair["values"]: pair["counts"] for pair in labels}


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


def damage_encoder(run: Path) -> None:
    """An encoder of an older format, whole otherwise."""
    path, listing = run / "model/encoder.json", run / "manifest.json"
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    relist(listing, path, "model/encoder.json")


def relist(listing: Path, path: Path, name: str) -> None:
    """Have the manifest say what the file is now."""
    manifest = json.loads(listing.read_bytes())
    data = path.read_bytes()
    manifest["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    listing.write_text(json.dumps(manifest))


def older_snapshot(run: Path) -> None:
    path = run / "snapshot.json"
    path.write_text(path.read_text().replace('"format":1', '"format":0'))
    relist(run / "manifest.json", path, "snapshot.json")


def forget_snapshot(run: Path) -> None:
    """As an older version left it."""
    (run / "snapshot.json").unlink()
    manifest = json.loads((run / "manifest.json").read_bytes())
    del manifest["files"]["snapshot.json"]
    (run / "manifest.json").write_text(json.dumps(manifest))


BAD_RUNS: list[tuple[Callable[[Path], object], type[LakemapError], str]] = [
    (damage_encoder, InputError, r"model: encoder: format 1, this version reads 2; .*lakemap run"),
    (older_snapshot, InputError, r"snapshot.json: format 0, this version reads 1; lakemap run"),
    (forget_snapshot, InputError, r"published by an older format; lakemap run publishes anew"),
    (lambda run: (run / "snapshot.json").unlink(), StoreError, r"snapshot.json is missing; lakema"),
    (lambda run: (run / "snapshot.json").write_text("{}"), StoreError, r"json is damaged: it dif"),
    (
        lambda run: (run / "manifest.json").unlink(),
        InputError,
        r"the published run has no manifest",
    ),
    (lambda run: (run / "map/000001.parquet").unlink(), StoreError, r"000001.parquet is damaged: "),
]


@pytest.mark.parametrize(("damage", "kind", "message"), BAD_RUNS)
def test_a_published_run_that_cannot_be_refreshed(
    damage: Callable[[Path], object], kind: type[LakemapError], message: str, job: Job, lake: Path
) -> None:
    root = Folder(job.output)
    run = Path(job.output) / "runs" / str(history.current_run(root))
    load_snapshot.cache_clear()
    damage(run)
    log = history.entries(root)
    write_file(lake / "g.parquet", some(20), 9000)
    with pytest.raises(kind, match=message):
        refresh_job(job)
    assert history.entries(root) == log


def test_another_job_and_other_settings_are_refused(job: Job, lake: Path, tmp_path: Path) -> None:
    shutil.copytree(lake, tmp_path / "other")
    before = tree(tmp_path)
    stranger = replace(job, name="stranger")
    with pytest.raises(
        InputError, match=r"holds the map 'blobs' of .*/lake, this job is 'stranger'"
    ):
        refresh_job(stranger)
    elsewhere = replace(job, input=replace(job.input, path=str(tmp_path / "other")))
    with pytest.raises(InputError, match=r"this job is 'blobs' of .*/other; name another output"):
        refresh_job(elsewhere)
    longer = replace(job, train=replace(job.train, steps=5))
    with pytest.raises(
        ConfigError, match=r"train.steps is 5, the published encoder .* with 4; cha"
    ):
        refresh_job(longer)
    column = replace(job, input=replace(job.input, vector="other"))
    with pytest.raises(ConfigError, match=r"input.vector is other, the published encoder was made"):
        refresh_job(column)
    assert tree(tmp_path) == before
    free = replace(job, input=replace(job.input, max_bad_fraction=0.5, on_change="skip"))
    assert not refresh_job(free).changed


def test_gates_keep_the_old_map(job: Job, lake: Path) -> None:
    root = Folder(job.output)
    log = history.entries(root)
    write_file(lake / "bad.parquet", some(100, 40), 50_000, n_bad=6)
    with pytest.raises(GateError, match=r"6 of \d+ new rows are bad \(\d\.\d+%\), at most 5.00%"):
        refresh_job(job)
    (lake / "bad.parquet").unlink()
    for name in ("f2", "f5"):
        (lake / f"{name}.parquet").unlink()
    with pytest.raises(
        GateError, match=r"gate rows_lost: 0\.6\d+, the job allows 0.5; nothing was"
    ):
        refresh_job(job)
    assert history.entries(root) == log
    assert history.current_run(root) == log[-1].run
    brave = replace(job, gates=replace(job.gates, rows_lost=0.7))
    check_run(refresh_job(brave), lake)


def test_an_undecodable_file_is_named(job: Job, lake: Path) -> None:
    (lake / "broken.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(InputError, match=r"broken.parquet: not a Parquet file"):
        refresh_job(job)
    (lake / "broken.parquet").unlink()
    strings = pa.table({"item": ["a"], "embedding": [[1.0] * WIDTH], "blob": [1], "test": [False]})
    pq.write_table(strings, lake / "strings.parquet")
    with pytest.raises(InputError, match=r"column 'item' is string, but int64 in f0.parquet"):
        refresh_job(job)


def test_rows_of_another_width_are_bad(job: Job, lake: Path) -> None:
    rows = make_blobs(4, WIDTH + 1)
    write_file(lake / "wide.parquet", rows, 60_000)
    write_file(lake / "wider.parquet", some(200, 50), 61_000)
    published = refresh_job(job)
    assert published.metrics["rows_bad"] >= 4
    reasons = {pair["reason"] for path in Path(published.run.url).glob("quarantine/*.parquet")
               for pair in pq.read_table(path).to_pylist()}  # fmt: skip
    assert f"width {WIDTH + 1}, expected {WIDTH}" in reasons


def test_ten_thousand_files(tmp_path: Path) -> None:
    """A night on which nothing happened costs seconds: no footer is read, no file opened."""
    lake = tmp_path / "lake"
    write_file(lake / "a.parquet", some(200), 0)
    job = make_job(lake, tmp_path / "maps", **QUICK)
    run = Path(run_job(job).run.url)
    for index in range(1, 10_000):
        os.link(lake / "a.parquet", lake / f"a{index:05d}.parquet")
    pretend_mapped(run, lake_files(job))
    before, started = tree(tmp_path / "maps"), time.monotonic()
    base = refresh.find_base(job)
    assert base is not None
    assert refresh.find_work(job, base) is None
    assert time.monotonic() - started < 5
    assert tree(tmp_path / "maps") == before

    write_file(lake / "b.parquet", some(50, 1), 1000)
    started = time.monotonic()
    work = refresh.find_work(job, base)
    assert work is not None
    assert time.monotonic() - started < 5
    assert (work.delta.changes.files_new, work.delta.changes.files_kept) == (1, 10_000)
    assert [file.path for file in work.delta.files] == ["b.parquet"]


def lake_files(job: Job) -> list[InputFile]:
    return list(take_snapshot(lake_source(job)).files)


def pretend_mapped(run: Path, files: list[InputFile]) -> None:
    """Have the run's snapshot tell of these files, each with 200 rows in a partition of 100."""
    known = load_snapshot(Folder(str(run)))
    parts = tuple(
        replace(
            known.parts[0],
            number=start,
            pieces=tuple(Piece(file.path, 0, 0, 200) for file in files[start : start + 100]),
            n_mapped=200 * 100,
        )
        for start in range(0, len(files), 100)
    )
    listed = {file.path: (file.size, file.etag) for file in files}
    (run / "snapshot.json").write_bytes(
        encode_snapshot(replace(known, files=listed, parts=parts, next_number=len(files)))
    )
    relist(run / "manifest.json", run / "snapshot.json", "snapshot.json")
    load_snapshot.cache_clear()

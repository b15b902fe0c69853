"""The flow: what is done, what is not done again, what is refused, whoever does the work."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster

from encoders.artifact import Encoder
from jobs import flow
from jobs.cluster import DaskRunner
from jobs.sites.site import Site
from jobs.status import run_steps
from pipeline import placing
from pipeline.config import Job
from pipeline.errors import ConfigError, GateError, InputError
from pipeline.manifest import Manifest, Timing
from tests.data import (
    LABELLED,
    Finished,
    Lake,
    Recorder,
    finish_run,
    make_blobs,
    make_job,
    one_try,
    results,
    run_job,
    run_until,
    shrink_blocks,
    small_blocks,
    tree,
    write_parquet,
    write_zarr,
)
from tests.stages.test_embed import LosesRows

NAMES = [stage.name for stage in flow.STAGES]
QUICK: dict[str, Any] = {"train": {"steps": 4}, "gates": {"trustworthiness": None}}


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finish_run(tmp_path_factory)


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


def current(output: Path) -> str:
    return str(json.loads((output / "CURRENT").read_bytes())["run"])


def test_a_second_run_changes_nothing(done: Finished) -> None:
    before, seen = tree(done.root), Recorder()
    again = run_job(done.job, seen)
    assert (again.run, again.changed) == (done.published.run, False)
    assert again.metrics == done.published.metrics
    assert (seen.ran, seen.skipped) == ([], NAMES)
    assert tree(done.root) == before


def test_gates_and_name_redo_the_publish_step_alone(done: Finished, tmp_path: Path) -> None:
    shutil.copytree(done.root / "stores", tmp_path / "maps/stores", copy_function=os.link)
    settings: dict[str, Any] = {"input": LABELLED, "neighbors": {"cells": 5, "overlap": 2}}
    first = run_job(make_job(done.lake.path, tmp_path / "maps", **settings))
    before, seen = tree(tmp_path / "maps", ("CURRENT",)), Recorder()
    job = make_job(done.lake.path, tmp_path / "maps", **settings, gates={"recall": 0.5})
    second = run_job(job, seen)
    assert seen.ran == ["publish"]
    assert second.run != first.run
    assert current(tmp_path / "maps") == second.run.url.rsplit("/", 1)[1]
    assert tree(tmp_path / "maps").items() >= before.items()  # the older run is still there


@pytest.mark.parametrize(
    ("section", "change", "touched"),
    [
        ("gates", {"recall": 0.1}, {"publish"}),
        ("train", {"steps": 31}, {"draw", "edges", "train", "publish"}),
        ("affinity", {"perplexity": 4}, {"affinity", "publish"}),
        ("cluster", {"kind": "local", "workers": 3, "memory": "1GiB"}, set()),
        ("metrics", {"textfile": "blobs.prom"}, set()),
    ],
)
def test_a_setting_touches_the_stages_it_is_for(
    section: str, change: dict[str, Any], touched: set[str], tmp_path: Path
) -> None:
    """Of their own; that those after them follow is in the contract of the stages."""
    sections: dict[str, Any] = {"edges": {"samples": None}}
    one = make_job(tmp_path, tmp_path / "maps", **sections)
    other = make_job(tmp_path, tmp_path / "maps", **sections, **{section: change})
    assert {s.name for s in flow.STAGES if s.settings(one) != s.settings(other)} == touched


def test_the_life_of_a_lake(tmp_path: Path) -> None:
    """A run, a refused one, an added file, stores removed: CURRENT is always a whole run."""
    blobs, output = make_blobs(400), tmp_path / "maps"
    write_parquet(tmp_path / "lake", blobs.vectors[:300], n_files=2)
    job = make_job(tmp_path / "lake", output, **QUICK)
    first = run_job(job)
    pointer = (output / "CURRENT").read_bytes()

    strict = replace(job, gates=replace(job.gates, trustworthiness=1.0))
    with pytest.raises(GateError, match=r"gate trustworthiness: 0\.\d+, the job needs 1; nothing"):
        run_job(strict)
    assert (output / "CURRENT").read_bytes() == pointer
    assert len(list((output / "runs").iterdir())) == 1

    more = write_parquet(tmp_path / "more", blobs.vectors[300:], n_files=1)
    (more.path / "part-0.parquet").rename(tmp_path / "lake/part-2.parquet")
    before, seen = tree(Path(first.run.url)), Recorder()
    second = run_job(job, seen)
    assert seen.ran == NAMES
    assert (first.metrics["rows_mapped"], second.metrics["rows_mapped"]) == (300, 400)
    assert tree(Path(first.run.url)) == before
    assert current(output) == Path(second.run.url).name != Path(first.run.url).name

    shutil.rmtree(output / "stores")
    run = output / "runs" / current(output)
    table = pq.read_table(run / "map")
    xy = Encoder.load(run / "model").embed(blobs.vectors)
    assert (np.column_stack([table["x"], table["y"]]) == xy).all()
    assert set(json.loads((run / "manifest.json").read_bytes())["files"]) == set(
        tree(run, ("manifest.json",))
    )


class Meddler(Recorder):
    """Touches a file of the lake once a stage has finished."""

    def __init__(self, stage: str, file: Path) -> None:
        super().__init__()
        self._stage, self._file = stage, file

    def stage_finished(self, name: str, manifest: Manifest, timing: Timing, skipped: bool) -> None:
        super().stage_finished(name, manifest, timing, skipped)
        if name == self._stage:
            os.utime(self._file, ns=(1, 1))


@pytest.mark.parametrize("stage", ["ingest", "train"])
def test_a_file_that_changes_during_the_run_is_named(stage: str, tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(300).vectors, n_files=3)
    job = make_job(lake.path, tmp_path / "maps", **QUICK)
    with pytest.raises(InputError, match=r"part-2\.parquet: file changed since the run began"):
        run_job(job, Meddler(stage, lake.path / "part-2.parquet"))
    assert not (tmp_path / "maps/CURRENT").exists()
    assert run_job(job).metrics["rows_mapped"] == 300


def test_rows_without_a_place_are_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(300).vectors, n_bad=3)
    job = make_job(lake.path, tmp_path / "maps", **QUICK)
    lost = lake.good[[0, 7, 296]]
    load_encoder = placing.load_encoder
    monkeypatch.setattr(
        placing, "load_encoder", lambda ref: LosesRows(load_encoder(ref), lake.vectors[lost])
    )
    published = run_job(job)
    rows = {key: n for key, n in published.metrics.items() if key.startswith("rows_")}
    assert rows == {
        "rows_read": 300,
        "rows_mapped": 294,
        "rows_quarantined": 6,
        "rows_held_out": 0,
        "rows_trained": 297,
    }
    run = Path(published.run.url)
    assert pq.read_table(run / "map").num_rows == 294
    aside = pq.read_table(run / "quarantine")
    assert set(aside["id"].to_pylist()) == {str(lake.ids[row]) for row in [*lost, *lake.bad]}
    assert sum("embed-" in file.name for file in (run / "quarantine").iterdir()) == 2


def test_too_few_rows_to_measure_on_are_refused_before_training(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(300).vectors, held_out_every=30)
    job = make_job(lake.path, tmp_path / "maps", input=LABELLED)
    seen = Recorder()
    with pytest.raises(InputError, match=r"10 held-out rows to measure the map on, .* need 13;"):
        run_job(job, seen)
    assert seen.ran == ["ingest", "sample"]


def test_too_few_rows_to_train_on(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(100).vectors, held_out_every=1)
    job = make_job(lake.path, tmp_path / "maps", input=LABELLED)
    with pytest.raises(InputError, match=r"0 rows to train on, neighbors.k 15 needs 16;"):
        run_job(job)


def test_one_stage_alone_needs_those_before_it(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(100).vectors)
    job = make_job(lake.path, tmp_path / "maps", **QUICK)
    with pytest.raises(ConfigError, match="stage neighbors: ingest is not finished; run the stage"):
        flow.run(job, one_try(), Recorder(), "neighbors")
    seen = Recorder()
    assert flow.run(job, one_try(), seen, "ingest") is None
    assert seen.ran == ["ingest"]


def test_status_tells_how_far_a_job_is(done: Finished, tmp_path: Path) -> None:
    assert {(s.state, s.n_done) for s in run_steps(done.job)[:1]} == {("done", 4)}
    assert [s.state for s in run_steps(done.job)] == ["done"] * len(NAMES)

    job = make_job(done.lake.path, tmp_path / "maps", input=LABELLED)
    assert [s.state for s in run_steps(job)] == ["waiting"] * len(NAMES)
    assert not (tmp_path / "maps").exists()
    run_until(job, "sample")
    store = next((tmp_path / "maps/stores/sample").iterdir())
    (store / "manifest.json").unlink()
    (store / "commits/000001.json").unlink()
    found = run_steps(job)
    assert [s.state for s in found] == ["done", "partial"] + ["waiting"] * (len(NAMES) - 2)
    n_parts = found[1].n_parts
    assert (found[1].name, found[1].n_done, n_parts > 2) == ("sample", n_parts - 1, True)


def test_preflight_foresees_what_is_made(done: Finished) -> None:
    needs, lake = flow.preflight(done.job), done.lake
    assert (needs.shape.n_rows, needs.shape.width, needs.shape.n_train) == (1000, 64, 500)
    assert (needs.n_files, needs.shape.n_partitions) == (4, len(done.store("ingest").records))
    assert needs.lake_bytes == sum(file.stat().st_size for file in lake.path.iterdir())
    assert list(needs.estimates) == NAMES
    data = sum(size for name, (size, _) in tree(done.root / "stores").items() if "/data/" in name)
    assert data < needs.store_bytes


def test_a_shortage_says_what_to_change(done: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    job, needs = done.job, flow.preflight(done.job)
    plenty = 1 << 40
    assert flow.find_shortage(job, needs, plenty, plenty) is None
    assert flow.find_shortage(job, needs, needs.task_bytes, needs.train_bytes) is None
    line = flow.find_shortage(job, needs, needs.task_bytes - 1, plenty)
    assert line is not None
    assert "one task needs" in line
    assert "raise cluster.memory" in line
    assert "lower input.partition_bytes" in line
    line = flow.find_shortage(job, needs, plenty, needs.train_bytes - 1)
    assert line is not None
    assert line.startswith("train: 500 rows need")
    assert "lower sample.rows" in line
    monkeypatch.setattr(flow, "free_bytes", lambda _: 1000)
    line = flow.find_shortage(job, needs, plenty, plenty)
    assert line is not None
    assert "0 MiB are free" in line


def make_hive(path: Path, blobs: Any) -> Lake:
    """A lake of folders blob=0, blob=1, …; the label is in the folder's name alone."""
    order = np.argsort(blobs.labels, kind="stable")
    vectors, labels = blobs.vectors[order], blobs.labels[order]
    ids = np.arange(len(vectors)) + 10_000
    for label in np.unique(labels):
        inside = labels == label
        (path / f"blob={label}").mkdir(parents=True)
        lists = pa.array(vectors[inside].tolist(), pa.list_(pa.float32()))
        table = pa.table({"item": ids[inside], "embedding": lists})
        pq.write_table(table, path / f"blob={label}/data.parquet")
    return Lake(path, vectors, labels, np.zeros(len(vectors), bool), {})


def make_columns(path: Path, blobs: Any) -> Lake:
    """A lake whose vectors are five columns of different types."""
    path.mkdir()
    vectors = np.ascontiguousarray(blobs.vectors[:, :5]).round()
    lake = Lake(path, vectors, blobs.labels, np.zeros(len(vectors), bool), {})
    kinds = ["float32", "float64", "int16", "float32", "int64"]
    columns: dict[str, Any] = {f"c{i}": vectors[:, i].astype(kind) for i, kind in enumerate(kinds)}
    pq.write_table(
        pa.table({"item": lake.ids, "blob": blobs.labels, **columns}), path / "a.parquet"
    )
    return lake


def make_bytes(path: Path, blobs: Any) -> Lake:
    """A lake of uint8 vectors."""
    low, high = blobs.vectors.min(), blobs.vectors.max()
    scaled = (255 * (blobs.vectors - low) / (high - low)).astype(np.uint8)
    return write_parquet(path, scaled, blobs.labels, n_files=2)


FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "zarr2": (lambda path, blobs: write_zarr(path, blobs, 2), {}),
    "zarr3": (lambda path, blobs: write_zarr(path, blobs, 3), {}),
    "hive": (make_hive, {}),
    "bytes": (make_bytes, {}),
    "columns": (make_columns, {"vector": [f"c{i}" for i in range(5)]}),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_kind_of_lake_becomes_a_map(kind: str, tmp_path: Path) -> None:
    write, settings = FORMATS[kind]
    lake: Lake = write(tmp_path / "lake", make_blobs(300))
    job = make_job(
        lake.path,
        tmp_path / "maps",
        input={"label": "blob", **settings},
        sample={"rows": 200},
        train={"steps": 20},
        gates={"trustworthiness": None},
    )
    published = run_job(job)
    metrics = published.metrics
    assert (metrics["rows_mapped"], metrics["rows_quarantined"]) == (300, 0)
    assert metrics["recall"] == 1
    assert metrics["accuracy"] > 0.6  # of five blobs
    table = pq.read_table(Path(published.run.url) / "map")
    found = dict(zip(table["id"].to_pylist(), table["label"].to_pylist(), strict=True))
    expected = zip(lake.ids.tolist(), lake.labels.tolist(), strict=True)
    assert {name: int(label) for name, label in found.items()} == dict(expected)
    xy = Encoder.load(Path(published.run.url) / "model").embed(lake.vectors)
    order = np.argsort(table["id"].to_numpy())
    assert (table["x"].to_numpy()[order] == xy[:, 0]).all()


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", *make_blobs(700), n_bad=5, held_out_every=5)
    job = make_job(
        lake.path, tmp_path / "maps", input=LABELLED, neighbors={"cells": 4, "overlap": 2}
    )
    found = []
    for n_workers in (0, 1, 2):
        run_with(job, n_workers)
        found.append(results(tmp_path / "maps"))
        (tmp_path / "maps").rename(tmp_path / f"maps-{n_workers}")
    serial, one, two = found
    assert len(serial) > 100
    assert any("/map/" in name for name in serial)
    assert any("/model/" in name for name in serial)
    assert serial == one
    assert serial == two


def run_with(job: Job, n_workers: int) -> None:
    """Run the job on that many worker processes; 0 is this one."""
    if not n_workers:
        run_job(job)
        return
    with (
        LocalCluster(
            n_workers=n_workers, threads_per_worker=1, dashboard_address="127.0.0.1:0"
        ) as cluster,
        Client(cluster) as client,
    ):
        client.run(shrink_blocks)
        runner = DaskRunner(Site(client, "look", same_host=True), retries=0, wait_seconds=60)
        published = flow.run(job, runner, Recorder())
    assert published is not None
    assert published.changed

"""Files of the lake that change while a run reads them: noticed, named, and skipped if asked."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs import flow
from pipeline.config import Job
from pipeline.errors import InputError
from pipeline.lake import CHANGED
from tests.data import (
    LABELLED,
    Lake,
    Recorder,
    make_blobs,
    make_job,
    one_try,
    run_job,
    write_parquet,
    write_zarr,
)

STAGES = ("ingest", "sample", "embed")


class Meddler(Recorder):
    """Changes the lake when a stage begins."""

    def __init__(self, stage: str, change: Callable[[], object]) -> None:
        super().__init__()
        self._stage, self._change = stage, change

    def stage_started(self, name: str, *_: int) -> None:
        super().stage_started(name)
        if name == self._stage:
            self._change()


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """Four files; partitions of 256 rows hold parts of two of them."""
    return write_parquet(tmp_path / "lake", *make_blobs(1000), n_bad=4, held_out_every=8)


def rewrite(path: Path) -> None:
    """The same rows once more, in a file of another size."""
    pq.write_table(pq.read_table(path), path, compression="none")


def run_meddled(job: Job, stage: str, change: Callable[[], object]) -> flow.Published:
    found = flow.run(job, one_try(), Meddler(stage, change))
    assert found is not None
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_changed_file_ends_the_run_and_is_named(stage: str, lake: Lake, tmp_path: Path) -> None:
    job = make_job(lake.path, tmp_path / "maps", input=LABELLED)
    path = lake.path / "part-2.parquet"
    message = rf"input {path}: file changed since the run began; start a new run"
    with pytest.raises(InputError, match=message) as raised:
        run_meddled(job, stage, lambda: rewrite(path))
    assert raised.value.exit_code == 2
    assert not (tmp_path / "maps/CURRENT").exists()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", [rewrite, Path.unlink])
def test_a_changed_file_is_left_for_the_next_run(
    stage: str, change: Callable[[Path], None], lake: Lake, tmp_path: Path
) -> None:
    job = make_job(lake.path, tmp_path / "maps", input={**LABELLED, "on_change": "skip"})
    path = lake.path / "part-2.parquet"
    rows = pq.read_table(path)
    found = run_meddled(job, stage, lambda: change(path))
    table = pq.read_table(Path(found.run.url) / "map")
    skipped = set(rows["item"].to_pylist())
    good = set(lake.ids[lake.good].tolist())
    assert sorted(table["id"].to_pylist()) == sorted(good - skipped)
    metrics = found.metrics
    assert metrics["rows_read"] == 1000
    assert metrics["rows_mapped"] + metrics["rows_quarantined"] == 1000
    reasons = pq.read_table(Path(found.run.url) / "quarantine")["reason"].to_pylist()
    assert reasons.count(CHANGED) == 1000 - metrics["rows_mapped"] - 4 + bad_in(lake, stage)
    assert CHANGED in (Path(found.run.url) / "report.html").read_text()

    if change is rewrite:
        again = run_job(job)
        assert again.metrics["rows_mapped"] == len(good)


@pytest.mark.parametrize("embed", [{}, {"spatial_key": True, "partition_by": "label"}])
def test_a_partition_whose_files_all_changed_has_no_map(
    embed: dict[str, object], tmp_path: Path
) -> None:
    lake = write_parquet(tmp_path / "lake", *make_blobs(1000))
    source = {**LABELLED, "on_change": "skip", "partition_bytes": 1 << 16}
    job = make_job(lake.path, tmp_path / "maps", input=source, embed=embed)

    def rewrite_all_but_one() -> None:
        for number in (1, 2, 3):
            rewrite(lake.path / f"part-{number}.parquet")

    found = run_meddled(job, "embed", rewrite_all_but_one)
    files = sorted((Path(found.run.url) / "map").rglob("*.parquet"))
    rows = [pq.read_metadata(path).num_rows for path in files]
    assert min(rows) > 0
    kinds = {pq.read_schema(path).field("id").type for path in files}
    assert kinds == {pq.read_schema(lake.path / "part-0.parquet").field("item").type}
    assert sum(rows) == found.metrics["rows_mapped"] == 250


def bad_in(lake: Lake, stage: str) -> int:
    """Bad rows of the third file: ingest knew them as such if it read the file."""
    inside = [row for row in lake.bad if 500 <= row < 750]
    return len(inside) if stage == "ingest" else 0


def test_quality_is_measured_on_the_rows_that_are_there(lake: Lake, tmp_path: Path) -> None:
    job = make_job(lake.path, tmp_path / "maps", input={**LABELLED, "on_change": "skip"})
    whole = run_job(job)
    elsewhere = make_job(lake.path, tmp_path / "more", input={**LABELLED, "on_change": "skip"})
    found = run_meddled(elsewhere, "embed", lambda: rewrite(lake.path / "part-0.parquet"))
    assert found.metrics["n_queries"] < whole.metrics["n_queries"]
    assert found.metrics["trustworthiness"] == pytest.approx(
        whole.metrics["trustworthiness"], abs=0.1
    )
    manifest = json.loads((Path(found.run.url) / "manifest.json").read_bytes())
    assert manifest["metrics"]["rows_quarantined"] >= 250


def test_a_changed_chunk_loses_its_partition(tmp_path: Path) -> None:
    lake = write_zarr(tmp_path / "lake", make_blobs(1000), 3)
    source = {"id": "item", "on_change": "skip"}
    job = make_job(lake.path, tmp_path / "maps", input=source)
    chunk = lake.path / "embedding/c/3/0"

    def damage() -> None:
        chunk.write_bytes(chunk.read_bytes() + b"?")

    found = run_meddled(job, "embed", damage)
    table = pq.read_table(Path(found.run.url) / "map")
    lost = np.setdiff1d(lake.ids, table["id"].to_numpy()) - lake.ids[0]
    assert {300, 399} <= set(lost.tolist())
    assert len(lost) == 1000 - found.metrics["rows_mapped"] < 400

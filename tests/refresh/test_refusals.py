"""What a refresh refuses: the published map stays, and one line says why."""

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from encoders.artifact import FORMAT
from pipeline import history
from pipeline.config import Job
from pipeline.errors import ConfigError, GateError, InputError, LakemapError, StoreError
from pipeline.published import load_snapshot
from pipeline.stores import Folder
from tests.data import (
    WIDTH,
    make_blobs,
    tree,
)
from tests.refresh.nights import (
    check_run,
    refresh_job,
    some,
    write_file,
)


def damage_encoder(run: Path) -> None:
    """An encoder of an older format, whole otherwise."""
    path, listing = run / "model/encoder.json", run / "manifest.json"
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
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
    (damage_encoder, InputError, rf"encoder: format 1, this version reads {FORMAT}; .*lakemap run"),
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

"""Damage in a finished store: the one task that wrote it is done again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import flow
from pipeline.errors import DamagedError
from pipeline.manifest import find_store
from pipeline.stores import BUCKET_FILE
from tests.data import (
    Recorder,
    digests,
    make_blobs,
    make_job,
    one_try,
    run_until,
    small_blocks,
    write_parquet,
)
from tests.faults import flip_bit, remove, truncate

REWRITTEN = ("timing.json", "000001.json")  # times, and the commit of the partition done again
QUICK: dict[str, Any] = {"train": {"steps": 4}, "gates": {"trustworthiness": None}}


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


@pytest.mark.parametrize("damage", [truncate, flip_bit, remove])
@pytest.mark.parametrize(("step", "group"), [("assign", "neighbors"), ("transpose", None)])
def test_only_the_task_that_wrote_a_damaged_file_is_done_again(
    step: str, group: str | None, damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(flow.log, "warning", lambda text, *values: lines.append(text % values))
    lake = write_parquet(tmp_path / "lake", make_blobs(600).vectors)
    cells = {"cells": 5, "overlap": 2}
    job = make_job(lake.path, tmp_path / "maps", neighbors=cells, **QUICK)
    store = run_until(job, step)[step]
    before = digests(Path(store.folder.url), REWRITTEN)
    file = Path(store.folder.url) / store.records[1].key / BUCKET_FILE
    damage(file)
    seen = Recorder()
    flow.run(job, one_try(), seen, group)
    (again,) = seen.commits[step]
    assert again.record.partition.index == 1
    assert digests(Path(store.folder.url), REWRITTEN) == before
    (line,) = lines
    assert f"{file} is damaged" in line
    assert line.endswith("; its task is done again")


def test_a_file_that_stays_damaged_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(200).vectors)
    job = make_job(lake.path, tmp_path / "maps", **QUICK)
    store = run_until(job, "assign")["assign"]
    file = Path(store.folder.url) / store.records[0].key / BUCKET_FILE
    file.unlink()
    monkeypatch.setattr(flow, "forget_part", lambda _: None)
    with pytest.raises(
        DamagedError, match=r"buckets.bin is damaged: it is missing; remove "
    ) as error:
        flow.run(job, one_try(), Recorder(), "neighbors")
    assert error.value.exit_code == 4


def test_a_stage_alone_leaves_the_stages_before_it_as_they_are(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(200).vectors)
    job = make_job(lake.path, tmp_path / "maps", **QUICK)
    store = run_until(job, "transpose")["transpose"]
    file = Path(store.folder.url) / store.records[0].key / BUCKET_FILE
    neighbors = run_until(job, "neighbors")["neighbors"]
    ids = Path(neighbors.folder.url) / neighbors.records[0].key / "arrays/ids/c/0/0"
    ids.unlink()
    with pytest.raises(DamagedError, match=r"ids/c/0/0 is damaged: it is missing; remove "):
        flow.run(job, one_try(), Recorder(), "symmetrize")
    assert file.exists()
    assert find_store(neighbors.folder) is not None

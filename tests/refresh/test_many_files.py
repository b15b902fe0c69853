"""A night on which nothing happened costs little, however many files the lake has."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import refresh
from pipeline.config import Job
from pipeline.lake import InputFile, parquet, take_snapshot
from pipeline.lake.files import Root
from pipeline.partitions import Piece
from pipeline.published import encode_snapshot, load_snapshot
from pipeline.stages.ingest import lake_source
from pipeline.stores import Folder
from tests.data import (
    make_job,
    run_job,
    tree,
)
from tests.refresh.nights import QUICK, some, write_file
from tests.refresh.test_refusals import relist


def test_of_ten_thousand_files_only_new_ones_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = tmp_path / "lake"
    write_file(lake / "a.parquet", some(200), 0)
    job = make_job(lake, tmp_path / "maps", **QUICK)
    run = Path(run_job(job).run.url)
    for index in range(1, 10_000):
        os.link(lake / "a.parquet", lake / f"a{index:05d}.parquet")
    pretend_mapped(run, lake_files(job))
    before, opened = tree(tmp_path / "maps"), list[str]()
    open_one = parquet.open_parquet

    def note(root: Root, path: str, *rest: Any) -> Any:
        opened.append(path)
        return open_one(root, path, *rest)

    monkeypatch.setattr(parquet, "open_parquet", note)
    base = refresh.find_base(job)
    assert base is not None
    assert refresh.find_work(job, base) is None
    assert not opened
    assert tree(tmp_path / "maps") == before

    write_file(lake / "b.parquet", some(50, 1), 1000)
    work = refresh.find_work(job, base)
    assert work is not None
    assert (work.delta.changes.files_new, work.delta.changes.files_kept) == (1, 10_000)
    assert [file.path for file in work.delta.files] == ["b.parquet"]
    assert set(opened) == {"a.parquet", "b.parquet"}  # the first knows the columns


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

"""ingest: counts and quarantine against what was written."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.errors import InputError
from pipeline.stage import StoreRef, run_stage
from pipeline.stages.ingest import INGEST
from pipeline.stores import Folder
from tests.data import (
    FIRST_ID,
    Finished,
    Recorder,
    make_blobs,
    make_job,
    one_try,
    run_until,
    write_parquet,
)


def test_counts_are_those_of_the_lake(done: Finished) -> None:
    store, lake = done.store("ingest"), done.lake
    metrics = store.manifest.metrics
    reasons = Counter(reason.split(" at position")[0] for reason in lake.bad.values())
    assert metrics["n_bad"] == len(lake.bad) == 10
    assert metrics["n_good"] == store.n_rows == len(lake.good)
    assert metrics["n_holdout"] == lake.held_out[lake.good].sum()
    assert metrics["reasons"] == reasons
    assert metrics["identical"] is False
    assert store.manifest.facts["n_rows"] == len(lake.vectors)
    assert (store.manifest.facts["width"], store.manifest.facts["dtype"]) == (64, "float32")


def test_the_quarantine_names_every_bad_row(done: Finished) -> None:
    store, lake = done.store("ingest"), done.lake
    tables = [
        store.table(record, "quarantine") for record in store.records if record.metrics["n_bad"]
    ]
    found = pa.concat_tables(tables).to_pylist()
    rows_per_file = len(lake.vectors) // 4
    assert found == [
        {
            "file": f"part-{row // rows_per_file}.parquet",
            "row": row % rows_per_file,
            "id": str(row + FIRST_ID),
            "reason": lake.bad[row],
        }
        for row in sorted(lake.bad)
    ]


def test_partitions_cover_every_row_once_within_the_bytes(done: Finished) -> None:
    parts = [record.partition for record in done.store("ingest").records]
    assert len(parts) > 3
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == len(done.lake.vectors)
    assert max(part.n_rows for part in parts) * 64 * 4 <= done.job.input.partition_bytes


def test_the_lake_is_not_copied(done: Finished) -> None:
    objects = {name for record in done.store("ingest").records for name in record.objects}
    assert objects == {"quarantine.parquet"}


@pytest.mark.parametrize("different", [[], [0], [299], range(300, 600)])
def test_identical_rows_are_noticed_over_all_partitions(
    different: Sequence[int], tmp_path: Path
) -> None:
    vectors = np.ones((600, 64), np.float32)
    vectors[list(different), -1] = 2  # the last are two whole files, each of equal rows
    lake = write_parquet(tmp_path / "lake", vectors, n_bad=2)
    store = run_until(make_job(lake.path, tmp_path / "maps"), "ingest")["ingest"]
    assert len(store.records) > 2
    assert store.manifest.metrics["identical"] is (not different)


def test_zero_rows_are_bad_only_where_the_metric_is_cosine(tmp_path: Path) -> None:
    vectors = make_blobs(200).vectors
    vectors[[3, 150]] = 0
    lake = write_parquet(tmp_path / "lake", vectors)
    for metric, reasons in (("euclidean", {}), ("cosine", {"zero vector": 2})):
        job = make_job(lake.path, tmp_path / "maps", neighbors={"metric": metric})
        assert run_until(job, "ingest")["ingest"].manifest.metrics["reasons"] == reasons


def test_a_lake_that_changed_since_the_start_is_refused(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(100).vectors)
    job = make_job(lake.path, tmp_path / "maps")
    refs = {"lake": StoreRef(Folder(job.input.path), "an older snapshot")}
    with pytest.raises(InputError, match="lake: changed while the run was starting"):
        run_stage(INGEST, refs, Folder(job.output), job, one_try(), Recorder())

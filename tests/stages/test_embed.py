"""embed: every good row once, with its id and label, at a place that is its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from numpy.typing import NDArray

from encoders.artifact import Encoder
from pipeline import placing
from pipeline.manifest import Store, open_store
from pipeline.stage import StoreRef, run_stage
from pipeline.stages import embed
from pipeline.stages.embed import EMBED, MOST_LABELS
from pipeline.stores import Folder
from tests.data import (
    LABELLED,
    Finished,
    Recorder,
    lake_ref,
    make_blobs,
    make_job,
    one_try,
    run_until,
    write_parquet,
)


def read_map(store: Store) -> pa.Table:
    return pa.concat_tables([store.table(record, "map") for record in store.records])


def test_every_good_row_is_there_once_with_its_label(done: Finished) -> None:
    table, lake = read_map(done.store("embed")), done.lake
    assert table.column_names == ["id", "x", "y", "label", "novelty"]
    assert table["novelty"].null_count == table.num_rows  # their encoder was trained on them
    assert table["id"].to_pylist() == lake.ids[lake.good].tolist()
    assert table["label"].to_pylist() == lake.labels[lake.good].tolist()
    assert pc.all(pc.is_finite(table["x"])).as_py()
    metrics = done.store("embed").manifest.metrics
    assert (metrics["n_mapped"], metrics["n_unmapped"]) == (len(lake.good), 0)
    assert (metrics["labels"], metrics["n_labels"]) == (["0", "1", "2", "3", "4"], 5)


def test_places_are_the_encoders(done: Finished) -> None:
    table, store = read_map(done.store("embed")), done.store("train")
    names = ("encoder.safetensors", "encoder.json")
    encoder = Encoder.from_files({name: store.file(store.records[0], name) for name in names})
    xy = encoder.embed(done.lake.vectors[done.lake.good])
    assert (table["x"].to_numpy() == xy[:, 0]).all()
    assert (table["y"].to_numpy() == xy[:, 1]).all()


@pytest.mark.parametrize("partition_bytes", [1 << 17, 1 << 20])
def test_a_place_does_not_depend_on_the_partition(
    partition_bytes: int, done: Finished, tmp_path: Path
) -> None:
    job = make_job(
        done.lake.path,
        tmp_path / "maps",
        input={**LABELLED, "partition_bytes": partition_bytes},
    )
    ingest = run_until(job, "ingest")["ingest"]
    assert len(ingest.records) != len(done.store("ingest").records)
    found = embed_with(done, job, ingest)
    assert read_map(found).equals(read_map(done.store("embed")))  # to the bit


def embed_with(done: Finished, job: Any, ingest: Store) -> Store:
    """The map of the job's partitions under the finished run's encoder."""
    refs = {
        "lake": lake_ref(job),
        "ingest": StoreRef(ingest.folder, ingest.manifest.digest),
        "train": done.refs["train"],
    }
    inputs = {name: refs[name] for name in EMBED.reads}
    ref = run_stage(EMBED, inputs, Folder(job.output), job, one_try(), Recorder())
    return open_store(ref.folder, ref.digest)


class LosesRows:
    """An encoder that has no place for some rows."""

    def __init__(self, encoder: Encoder, lost: NDArray[Any]) -> None:
        self._encoder = encoder
        self._lost = lost

    def embed(self, rows: NDArray[Any]) -> NDArray[Any]:
        xy = self._encoder.embed(rows)
        is_lost = (rows[:, None] == self._lost).all(axis=2).any(axis=1)
        xy[is_lost, np.arange(is_lost.sum()) % 2] = np.nan
        return xy


def test_rows_without_a_place_are_set_aside(
    done: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = done.lake
    lost = lake.good[[5, 6, 300, 989]]
    encoder = placing.load_encoder(done.refs["train"])
    monkeypatch.setattr(placing, "load_encoder", lambda _: LosesRows(encoder, lake.vectors[lost]))
    job = make_job(lake.path, tmp_path / "maps", input=LABELLED)
    store = embed_with(done, job, run_until(job, "ingest")["ingest"])

    whole, table = read_map(done.store("embed")), read_map(store)
    kept = pc.invert(pc.is_in(whole["id"], pa.array(lake.ids[lost])))
    assert table.equals(whole.filter(kept))
    metrics = store.manifest.metrics
    assert (metrics["n_mapped"], metrics["n_unmapped"]) == (len(lake.good) - 4, 4)
    aside = [store.table(r, "unmapped") for r in store.records if r.metrics["n_unmapped"]]
    found = pa.concat_tables(aside).to_pylist()
    assert [row["id"] for row in found] == [str(lake.ids[row]) for row in lost]
    assert {row["reason"] for row in found} == {"coordinates not finite"}
    assert [row["row"] for row in found][:2] == [5, 6]  # the rank among the partition's good rows


@pytest.mark.parametrize(
    ("labels", "shown", "n_labels"),
    [
        (np.array([10, 9, 2, 2]), ["2", "9", "10"], 3),
        (np.array(["b", "a", None, "b"], object), ["(none)", "a", "b"], 3),
        (np.arange(30), [str(label) for label in range(20)], 30),
        (np.arange(MOST_LABELS + 1), [], 0),
    ],
)
def test_labels_to_colour_by(
    labels: NDArray[Any], shown: list[str], n_labels: int, done: Finished, tmp_path: Path
) -> None:
    values = np.resize(labels, max(len(labels), 40))
    table = pa.table({"label": pa.array(values.tolist())})
    record = done.store("embed").records[0]
    counted = {"labels": embed._count_labels(table), "n_unmapped": 0, "n_changed": 0}
    found = embed.finish(None, [replace(record, metrics=counted)])  # type: ignore[arg-type]
    assert (found["labels"], found["n_labels"]) == (shown, n_labels)


def test_without_names_a_row_is_called_by_file_and_number(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", make_blobs(120).vectors, n_files=2)
    job = make_job(lake.path, tmp_path / "maps", input={"id": None}, train={"steps": 1})
    table = read_map(run_until(job, "embed")["embed"])
    assert table.column_names == ["id", "x", "y", "novelty"]
    assert table["id"].to_pylist() == [
        f"part-{n}.parquet:{row}" for n in (0, 1) for row in range(60)
    ]

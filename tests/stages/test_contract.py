"""What every stage owes: skip, resume, redo what a setting touches, name what is damaged."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import flow
from pipeline.errors import InputError, LakemapError, StageError, StoreError
from pipeline.manifest import Commit, Part, find_store, open_store
from pipeline.partitions import Partition
from pipeline.runner import Report, SerialRunner, Task
from pipeline.stage import Context, Stage, StoreRef, run_stage
from pipeline.stores import Folder
from tests.data import (
    LABELLED,
    Finished,
    Recorder,
    digests,
    lake_ref,
    make_blobs,
    make_job,
    one_try,
    run_until,
    tree,
    write_parquet,
)

NAMES = [stage.name for stage in flow.STAGES]
each_stage = pytest.mark.parametrize("stage", flow.STAGES, ids=NAMES)

Damage = Callable[[Path], None]


class LastFirst(SerialRunner):
    """Runs the partitions backwards: no result may depend on their order."""

    def map(
        self,
        name: str,
        task: Task,
        parts: Iterable[Partition],
        report: Report,
        *,
        whole_machine: bool = False,
    ) -> Iterator[Commit]:
        yield from super().map(name, task, list(parts)[::-1], report, whole_machine=whole_machine)


def inputs_of(stage: Stage[Any], refs: Mapping[str, StoreRef]) -> dict[str, StoreRef]:
    return {name: refs[name] for name in stage.reads}


def watched(stage: Stage[Any], told: Callable[[Partition], None]) -> Stage[Any]:
    """The stage; `told` is called before each partition."""
    do_part = stage.do_part

    def wrapped(context: Context[Any], partition: Partition, report: Report) -> Part:
        told(partition)
        return do_part(context, partition, report)

    return replace(stage, do_part=wrapped)


def once(act: Callable[[Partition], None]) -> Callable[[Partition], None]:
    """Acts at the first call only."""
    waiting = [act]

    def told(partition: Partition) -> None:
        while waiting:
            waiting.pop()(partition)

    return told


class Calls(list[int]):
    """Notes the partitions; dies at `fail_at`."""

    fail_at = -1

    def __call__(self, partition: Partition) -> None:
        self.append(partition.index)
        if partition.index == self.fail_at:
            raise RuntimeError("the machine is gone")


@each_stage
def test_a_rerun_does_nothing(stage: Stage[Any], done: Finished) -> None:
    before, called, seen = tree(done.root), Calls(), Recorder()
    root, inputs = Folder(done.job.output), inputs_of(stage, done.refs)
    ref = run_stage(watched(stage, called), inputs, root, done.job, one_try(), seen)
    assert ref == done.refs[stage.name]
    assert (called, seen.ran, seen.skipped) == ([], [], [stage.name])
    assert tree(done.root) == before


@each_stage
def test_a_crashed_stage_resumes_to_the_same_bytes(
    stage: Stage[Any], done: Finished, tmp_path: Path
) -> None:
    inputs, root, job = inputs_of(stage, done.refs), Folder(str(tmp_path)), done.job
    n_parts = len(done.store(stage.name).records)
    called = Calls()
    called.fail_at = crash = n_parts // 2
    with pytest.raises(StageError, match=rf"{stage.name}: partition {crash} .* machine is gone"):
        run_stage(watched(stage, called), inputs, root, job, one_try(), Recorder())
    assert called == list(range(crash + 1))

    (folder,) = (tmp_path / "stores" / stage.name).iterdir()
    assert find_store(Folder(str(folder))) is None
    committed = tree(folder / "commits")
    assert len(committed) == crash

    called = Calls()
    runner = LastFirst(1 << 40, retries=0)
    run_stage(watched(stage, called), inputs, root, job, runner, Recorder())
    assert called == list(range(crash, n_parts))[::-1]
    assert tree(folder / "commits").items() >= committed.items()
    assert contents(folder) == contents(Path(done.refs[stage.name].folder.url))


def contents(store: Path) -> dict[str, str]:
    """Digests of data and manifest; of the publish step without the report, which tells a time."""
    if store.parent.name != "publish":
        found = digests(store, ("timing.json",))
        return {name: digest for name, digest in found.items() if not name.startswith("commits/")}
    (data,) = (store / "data").iterdir()
    return digests(data, ("report.html",))


# Of what a stage reads, one object; the lake and the ledger of ingest are for their own tests.
READ_OBJECTS = [
    ("centroids", "sample", "arrays/vectors/c/0/0"),
    ("assign", "sample", "arrays/vectors/c/0/0"),
    ("assign", "centroids", "arrays/centroids/c/0/0"),
    ("search", "centroids", "arrays/groups/c/0"),
    ("search", "assign", "buckets.bin"),
    ("search", "assign", "buckets.json"),
    ("neighbors", "search", "buckets.bin"),
    ("recall", "sample", "arrays/vectors/c/0/0"),
    ("recall", "neighbors", "arrays/distances/c/0/0"),
    ("affinity", "neighbors", "arrays/distances/c/0/0"),
    ("transpose", "affinity", "arrays/values/c/0/0"),
    ("transpose", "neighbors", "arrays/ids/c/0/0"),
    ("symmetrize", "transpose", "buckets.bin"),
    ("symmetrize", "neighbors", "arrays/ids/c/0/0"),
    ("draw", "symmetrize", "arrays/values/c/0"),
    ("edges", "draw", "buckets.bin"),
    ("train", "sample", "arrays/vectors/c/0/0"),
    ("train", "edges", "arrays/tails/c/0"),
    ("embed", "train", "encoder.safetensors"),
    ("survey", "sample", "arrays/rank/c/0"),
    ("survey", "embed", "map.parquet"),
    ("evaluate", "sample", "arrays/evaluate_vectors/c/0/0"),
    ("evaluate", "survey", "points.parquet"),
    ("publish", "survey", "arrays/counts/c/0/0/0"),
    ("publish", "train", "telemetry.parquet"),
    ("publish", "ingest", "quarantine.parquet"),
]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def run_damaged(
    done: Finished, tmp_path: Path, stage_name: str, source: str, name: str, damage: Damage
) -> tuple[LakemapError, Path]:
    """The error of the stage on a copy of its input in which one object is damaged."""
    original = Path(done.refs[source].folder.url)
    copy = tmp_path / "input" / source / original.name
    shutil.copytree(original, copy)
    record = done.store(source).records[0]
    damaged = copy / record.key / name
    damage(damaged)
    stage = flow.STAGES[NAMES.index(stage_name)]
    changed = {source: StoreRef(Folder(str(copy)), done.refs[source].digest)}
    inputs = inputs_of(stage, done.refs) | changed
    with pytest.raises(LakemapError, match="is damaged") as caught:
        run_stage(stage, inputs, Folder(str(tmp_path)), done.job, one_try(), Recorder())
    return caught.value, damaged


def test_every_stage_has_its_input_damaged() -> None:
    assert {stage for stage, _, _ in READ_OBJECTS} == set(NAMES) - {"ingest", "sample"}


@pytest.mark.parametrize(("stage", "source", "name"), READ_OBJECTS)
def test_a_truncated_or_missing_object_is_named(
    stage: str, source: str, name: str, done: Finished, tmp_path: Path
) -> None:
    for number, damage in enumerate((truncate, remove)):
        error, damaged = run_damaged(done, tmp_path / str(number), stage, source, name, damage)
        assert isinstance(error, StoreError)
        assert error.exit_code == 4
        assert str(damaged) in str(error)
        assert ("it is missing" in str(error)) == (damage is remove)
        assert f"remove {tmp_path / str(number)}/input/{source}/" in str(error)


@pytest.mark.parametrize(
    ("stage", "source", "name"),
    [
        ("neighbors", "search", "buckets.bin"),
        ("edges", "draw", "buckets.bin"),
        ("embed", "train", "encoder.safetensors"),
        ("embed", "train", "encoder.json"),
    ],
)
def test_a_changed_byte_is_noticed(
    stage: str, source: str, name: str, done: Finished, tmp_path: Path
) -> None:
    error, damaged = run_damaged(done, tmp_path, stage, source, name, flip)
    assert isinstance(error, StoreError)
    assert str(damaged).split("/c/")[0] in str(error)


@pytest.mark.parametrize("what", ["changed", "vanished"])
def test_a_lake_file_lost_during_a_stage_is_named(what: str, tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", *make_blobs(300), n_files=2)
    job = make_job(lake.path, tmp_path / "maps", train={"steps": 1})
    file, aside = lake.path / "part-1.parquet", tmp_path / "aside"

    def lose(_: Partition) -> None:
        file.rename(aside)
        if what == "changed":
            file.write_bytes(aside.read_bytes()[:-1])

    refs = {"lake": lake_ref(job)}
    for stage in flow.STAGES[: NAMES.index("embed") + 1]:
        arguments = (inputs_of(stage, refs), Folder(job.output), job, one_try(), Recorder())
        if stage.name in ("ingest", "sample", "embed"):
            with pytest.raises(InputError, match=rf"part-1\.parquet: file {what}") as caught:
                run_stage(watched(stage, once(lose)), *arguments)
            assert caught.value.exit_code == 2
            aside.rename(file)  # as it was: same inode, same times
        refs[stage.name] = run_stage(stage, *arguments)


@pytest.mark.parametrize(
    ("damage", "match"),
    [(truncate, r"manifest\.json: not a manifest record"), (remove, "changed or removed")],
)
def test_a_damaged_ledger_is_named(damage: Damage, match: str, tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", *make_blobs(100), n_files=1)
    job = make_job(lake.path, tmp_path / "maps")
    store = run_until(job, "ingest")["ingest"]
    folder, refs = store.folder, {"ingest": StoreRef(store.folder, store.manifest.digest)}
    open_store.cache_clear()
    damage(Path(folder.url) / "manifest.json")
    stage = flow.STAGES[NAMES.index("sample")]
    with pytest.raises(StoreError, match=match) as caught:
        run_stage(stage, refs, Folder(job.output), job, one_try(), Recorder())
    assert folder.url in str(caught.value)


def from_stage(name: str) -> set[str]:
    """The step and all after it, publish apart."""
    return set(NAMES[NAMES.index(name) : -1])


@pytest.mark.parametrize(
    ("section", "change", "redone"),
    [
        ("input", {"partition_bytes": 1 << 17}, from_stage("ingest")),
        ("sample", {"seed": 1}, from_stage("sample")),
        ("neighbors", {"overlap": 3}, from_stage("centroids")),
        ("neighbors", {"k": 16}, from_stage("centroids")),
        ("neighbors", {"recall": 0.9}, from_stage("centroids")),
        ("neighbors", {"recall_queries": 50}, {"recall"}),
        ("affinity", {"perplexity": 4}, from_stage("affinity")),
        ("edges", {"negatives": 3}, from_stage("edges")),
        ("train", {"learning_rate": 0.002}, from_stage("train")),
        ("evaluate", {"reference_rows": 200}, {"survey", "evaluate"}),
        ("evaluate", {"k": 4}, {"evaluate"}),
        ("gates", {"recall": 0.8}, set()),
        ("cluster", {"retries": 1}, set()),
    ],
)
def test_a_changed_setting_redoes_what_depends_on_it(
    section: str, change: dict[str, Any], redone: set[str], done: Finished, tmp_path: Path
) -> None:
    shutil.copytree(done.root / "stores", tmp_path / "maps/stores", copy_function=os.link)
    before = tree(tmp_path / "maps")
    settings: dict[str, dict[str, Any]] = {
        "input": dict(LABELLED),
        "neighbors": {"cells": 5, "overlap": 2},
    }
    settings[section] = {**settings.get(section, {}), **change}
    seen = Recorder()
    run_until(make_job(done.lake.path, tmp_path / "maps", **settings), "evaluate", seen)
    assert set(seen.ran) == redone
    assert set(seen.skipped) == set(NAMES) - redone - {"publish"}
    assert tree(tmp_path / "maps").items() >= before.items()
    assert len(list((tmp_path / "maps/stores/recall").iterdir())) == 1 + ("recall" in redone)

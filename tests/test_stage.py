import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from pipeline import stage as module
from pipeline.errors import StageError, StoreError
from pipeline.manifest import (
    Commit,
    Effort,
    Part,
    Plan,
    Record,
    commit_part,
    find_store,
    load_commits,
    load_plan,
)
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report, Runner, SerialRunner, Task
from pipeline.stage import (
    Context,
    Shape,
    Stage,
    StoreRef,
    forget_peak_memory,
    limited_threads,
    load_timing,
    locate,
    no_metrics,
    one_partition,
    peak_memory,
    run_part,
    run_stage,
)
from pipeline.stores import Folder
from tests.faults import DOUBLE, RAISE, TOY, Notes, Script, ToySettings, ignore_report, make_job

ONCE = SerialRunner(1 << 30, retries=0)
FIVE = dict.fromkeys(range(5), 1)


class Toy:
    """The toy stage in a folder of its own, with what happened to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.script = Script(root / "scripts/toy")
        self.notes = Notes()

    def run(
        self,
        stage: Stage[ToySettings] = TOY,
        inputs: Mapping[str, StoreRef] | None = None,
        runner: Runner = ONCE,
        **job: int,
    ) -> StoreRef:
        place = Folder(str(self.root))
        return run_stage(stage, inputs or {}, place, make_job(self.root, **job), runner, self.notes)

    def folder(self, stage: Stage[ToySettings] = TOY, **job: int) -> Folder:
        return locate(stage, {}, Folder(str(self.root)), make_job(self.root, **job))


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path)


def test_a_stage_leaves_a_finished_store(toy: Toy) -> None:
    ref = toy.run()
    assert ref.folder == toy.folder()
    store = find_store(ref.folder)
    assert store is not None
    manifest = store.manifest
    assert ref.digest == manifest.digest
    assert (manifest.stage, manifest.version, manifest.n_rows) == ("toy", 1, 20)
    assert manifest.fingerprint == ref.folder.url.rsplit("/", 1)[1]
    assert manifest.settings == {"n_rows": 20, "seed": 0}
    assert manifest.facts == {"offset": 0.5}
    assert [record.partition for record in store.records] == split_rows(20, 4)
    values = store.rows("values", 0, 20)
    assert values.shape == (20, 3)
    assert manifest.metrics == {"sum": pytest.approx(values.sum(), rel=1e-5), "offset": 0.5}
    assert toy.script.attempts() == FIVE


def test_the_observer_hears_everything(toy: Toy) -> None:
    toy.run()
    notes = toy.notes
    assert notes.started == [("toy", 5, 0, 20)]
    assert notes.done == [0, 1, 2, 3, 4]
    assert notes.progress == [("toy", 0.5, f"partition {index}") for index in range(5)]
    (name, manifest, timing, skipped) = notes.finished[0]
    assert (name, manifest.n_rows, skipped) == ("toy", 20, False)
    assert timing == load_timing(toy.folder())


def test_a_rerun_does_nothing(toy: Toy) -> None:
    first = toy.run()
    before = first.folder.list()
    manifest = first.folder.get("manifest.json")
    assert toy.run() == first
    assert toy.script.attempts() == FIVE
    assert (first.folder.list(), first.folder.get("manifest.json")) == (before, manifest)
    assert len(toy.notes.started) == 1
    assert [skipped for *_, skipped in toy.notes.finished] == [False, True]


@pytest.mark.parametrize("k", range(5))
def test_a_crash_at_any_partition_is_resumed(toy: Toy, tmp_path: Path, k: int) -> None:
    toy.script.write({k: [RAISE]})
    with pytest.raises(StageError, match=f"^toy: partition {k} .* failed 1 times: ValueError: scr"):
        toy.run()
    folder = toy.folder()
    assert find_store(folder) is None
    assert "manifest.json" not in folder.list()
    assert sorted(load_commits(folder)) == list(range(k))
    resumed = toy.run()
    assert toy.script.attempts() == FIVE | {k: 2}
    assert toy.notes.started == [("toy", 5, 0, 20), ("toy", 5, k, 20)]
    undisturbed = Toy(tmp_path / "undisturbed").run()
    assert resumed.digest == undisturbed.digest
    assert resumed.folder.get("manifest.json") == undisturbed.folder.get("manifest.json")


def test_other_settings_write_beside(toy: Toy) -> None:
    first = toy.run()
    manifest = first.folder.get("manifest.json")
    second = toy.run(seed=1)
    assert second.folder != first.folder
    assert second.digest != first.digest
    assert first.folder.get("manifest.json") == manifest
    assert toy.script.attempts() == dict.fromkeys(range(5), 2)
    assert toy.run() == first
    assert toy.script.attempts() == dict.fromkeys(range(5), 2)


def test_settings_of_other_stages_change_nothing(toy: Toy) -> None:
    job = make_job(toy.root)
    other = replace(
        job, train=replace(job.train, steps=7), cluster=replace(job.cluster, workers=7), name="x"
    )
    place = Folder(str(toy.root))
    assert locate(TOY, {}, place, job) == locate(TOY, {}, place, other)


def test_another_version_redoes(toy: Toy) -> None:
    first = toy.run()
    second = toy.run(replace(TOY, version=2))
    assert second.folder != first.folder
    assert toy.script.attempts() == dict.fromkeys(range(5), 2)


def test_another_input_redoes(toy: Toy) -> None:
    lake = Folder(str(toy.root / "lake"))
    first = toy.run(inputs={"lake": StoreRef(lake, "one")})
    again = toy.run(inputs={"lake": StoreRef(lake, "one")})
    other = toy.run(inputs={"lake": StoreRef(lake, "two")})
    assert again == first
    assert other.folder != first.folder
    assert other.digest != first.digest
    assert toy.script.attempts() == dict.fromkeys(range(5), 2)
    assert toy.notes.finished[-1][1].inputs == {"lake": "two"}


def test_a_stage_reads_the_one_before(toy: Toy) -> None:
    source = toy.run(seed=5)
    doubled = toy.run(DOUBLE, {"toy": source}, seed=5)
    stores = [find_store(ref.folder) for ref in (source, doubled)]
    before, after = [store.rows("values", 0, 20) for store in stores if store]
    np.testing.assert_array_equal(after, 2 * before)


def test_an_input_that_was_replaced_meanwhile_is_refused(toy: Toy) -> None:
    source = toy.run(seed=5)
    with pytest.raises(StoreError, match="changed or removed during the run; run again"):
        toy.run(DOUBLE, {"toy": replace(source, digest="other")}, seed=5)


def prepare_otherwise(_: Context[Any]) -> Plan:
    return Plan(split_rows(20, 10), {"offset": 99.0})


def test_a_resumed_run_keeps_the_first_plan(toy: Toy) -> None:
    toy.script.write({2: [RAISE]})
    with pytest.raises(StageError, match="partition 2"):
        toy.run()
    plan = load_plan(toy.folder())
    ref = toy.run(replace(TOY, prepare=prepare_otherwise))
    assert load_plan(ref.folder) == plan
    assert toy.notes.finished[-1][1].facts == {"offset": 0.5}
    assert toy.script.attempts() == FIVE | {2: 2}


def test_facts_reach_tasks_through_the_plan(toy: Toy) -> None:
    stage = replace(TOY, prepare=prepare_otherwise)
    store = find_store(toy.run(stage).folder)
    assert store is not None
    assert store.rows("values", 0, 20).min() >= 99


class ForgetfulRunner(SerialRunner):
    """A runner that loses the last partition."""

    def map(
        self,
        name: str,
        task: Task,
        parts: Iterable[Partition],
        report: Report,
        *,
        whole_machine: bool = False,
    ) -> Iterator[Commit]:
        yield from super().map(name, task, list(parts)[:-1], report, whole_machine=whole_machine)


def test_no_manifest_while_a_partition_is_missing(toy: Toy) -> None:
    with pytest.raises(StageError, match=r"^toy: 1 partitions have no commit; run again$"):
        toy.run(runner=ForgetfulRunner(1 << 30))
    assert find_store(toy.folder()) is None
    assert "timing.json" not in toy.folder().list()
    toy.run()
    assert toy.script.attempts() == FIVE


def test_finish_sees_all_records_before_the_manifest(toy: Toy) -> None:
    seen: list[list[int]] = []

    def finish(context: Context[Any], records: list[Record]) -> dict[str, Any]:
        assert "manifest.json" not in context.folder.list()
        seen.append([record.partition.index for record in records])
        return {}

    toy.run(replace(TOY, finish=finish))
    assert seen == [[0, 1, 2, 3, 4]]


def test_another_run_that_finishes_first_is_accepted(toy: Toy) -> None:
    def finish_late(context: Context[Any], records: list[Record]) -> dict[str, Any]:
        Toy(toy.root).run()
        return {"mine": 1.0}

    ref = toy.run(replace(TOY, finish=finish_late))
    store = find_store(ref.folder)
    assert store is not None
    assert ref.digest == store.manifest.digest
    assert toy.notes.finished[-1][1].metrics == store.manifest.metrics
    assert "mine" not in store.manifest.metrics
    assert toy.script.attempts() == FIVE


def test_a_partition_somebody_has_committed_is_not_done_again(toy: Toy) -> None:
    folder = toy.folder()
    part = Partition(2, 8, 12)
    context = Context(ToySettings(20, 0), {}, folder)
    theirs = commit_part(folder, part, Part(4, files={"a": b"1"}), Effort(1.0, 1))
    assert run_part(TOY, context, part, ignore_report)() == theirs
    assert toy.script.attempts() == {}


def test_a_task_without_a_plan_says_so(toy: Toy) -> None:
    context = Context(ToySettings(20, 0), {}, toy.folder())
    with pytest.raises(StoreError, match=r"plan\.json is missing; run again"):
        run_part(TOY, context, Partition(0, 0, 4), ignore_report)


def test_a_stage_of_no_partitions_finishes(toy: Toy) -> None:
    def prepare(_: Context[Any]) -> Plan:
        return Plan([])

    def finish(_: Context[Any], records: list[Record]) -> dict[str, Any]:
        return {"n": len(records)}

    ref = toy.run(replace(TOY, prepare=prepare, finish=finish))
    assert toy.notes.finished[-1][1].metrics == {"n": 0}
    assert load_timing(ref.folder).peak_bytes == 0


def test_timing_adds_up_what_tasks_cost(toy: Toy) -> None:
    ref = toy.run()
    efforts = [commit.effort for commit in load_commits(ref.folder).values()]
    timing = load_timing(ref.folder)
    assert timing.task_seconds == pytest.approx(sum(effort.seconds for effort in efforts))
    assert timing.peak_bytes == max(effort.peak_bytes for effort in efforts)
    assert timing.peak_bytes > 1 << 20
    assert timing.wall_seconds >= timing.task_seconds > 0
    assert "seconds" not in json.loads(ref.folder.get("manifest.json"))


def test_missing_timing_is_named(toy: Toy) -> None:
    folder = toy.run().folder
    folder.delete("timing.json")
    with pytest.raises(StoreError, match=r"timing\.json is missing; remove .* and run again"):
        toy.run()


def test_a_single_task_is_one_partition(toy: Toy) -> None:
    context = Context(ToySettings(20, 0), {}, toy.folder())
    assert one_partition(context).partitions == [Partition(0, 0, 1)]
    assert no_metrics(context, []) == {}


def test_the_shape_counts_blocks() -> None:
    shape = Shape(10**6, 10, 10**5, width=784, item_bytes=4, n_train=20_000)
    assert (shape.row_bytes, shape.block_rows, shape.n_blocks) == (3136, 8192, 3)
    wide = replace(shape, width=1 << 20, n_train=17)
    assert (wide.row_bytes, wide.block_rows, wide.n_blocks) == (4 << 20, 16, 2)


# Threads and memory of a task.


def thread_counts() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info()} | {torch.get_num_threads()}


@pytest.fixture
def _three_threads() -> Iterator[None]:
    """Three threads for every library, whatever the machine has."""
    before = torch.get_num_threads()
    with threadpool_limits(3):
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(before)


@pytest.mark.usefixtures("_three_threads")
def test_a_task_has_one_thread() -> None:
    assert thread_counts() == {3}
    with limited_threads(whole_machine=False):
        assert thread_counts() == {1}
    assert thread_counts() == {3}
    with pytest.raises(ValueError, match="from inside"), limited_threads(whole_machine=False):
        raise ValueError("from inside")
    assert thread_counts() == {3}


@pytest.mark.usefixtures("_three_threads")
def test_a_task_of_the_whole_machine_has_all_threads() -> None:
    with limited_threads(whole_machine=True):
        assert thread_counts() == {3}


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize(("whole_machine", "n_threads"), [(False, 1), (True, 3)])
def test_the_driver_limits_threads(toy: Toy, whole_machine: bool, n_threads: int) -> None:
    def do_part(_: Context[Any], part: Partition, __: Report) -> Part:
        return Part(part.n_rows, metrics={"sum": 0, "threads": sorted(thread_counts())})

    ref = toy.run(replace(TOY, do_part=do_part, whole_machine=whole_machine))
    store = find_store(ref.folder)
    assert store is not None
    assert {n for record in store.records for n in record.metrics["threads"]} == {n_threads}


def can_forget() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def allocate(n_bytes: int) -> None:
    """Touch pages fresh from the system: numpy's could be ones that the process already held."""
    with mmap.mmap(-1, n_bytes) as pages:
        np.frombuffer(pages, np.uint8).fill(1)


@pytest.mark.skipif(not can_forget(), reason="the system does not let go of the peak")
def test_peak_memory_is_that_since_the_reset() -> None:
    forget_peak_memory()
    before = peak_memory()
    allocate(200 << 20)
    high = peak_memory()
    assert high - before > 180 << 20
    forget_peak_memory()
    assert high - peak_memory() > 150 << 20


def test_peak_memory_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems other than Linux have no /proc; the peak is then that of the whole process."""
    allocate(8 << 20)
    found = peak_memory()
    monkeypatch.setattr(module, "Path", lambda _: Path("/nowhere/at/all"))
    forget_peak_memory()
    assert peak_memory() > 0.9 * found  # the two are not counted at the same moments

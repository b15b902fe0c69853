"""Our side of the graph benchmarks: a lake, a job, rounds on warm workers, one cold command.

Every round has an output folder of its own, into which the stores before the measured stage are
linked: what a worker keeps of an earlier round's stores does not help it in the next.
"""

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import measure
from benchmarks.silent import Silent
from jobs import flow
from jobs.cluster import open_runner
from pipeline.cluster_config import ClusterConfig
from pipeline.config import Job
from pipeline.job_file import load_job
from pipeline.manifest import Store, find_store
from pipeline.runner import Runner
from pipeline.stores import Folder

WORKERS = 2
PACKAGES = ("lakemap", "numpy", "numba", "faiss-cpu", "faiss-gpu", "dask", "pyarrow")
BEFORE = ("ingest", "sample")
MEASURING = ("recall",)
JOB = """\
input: {{path: lake, vector: vector, id: row}}
output: maps
sample: {{rows: 1000000000}}
neighbors: {{k: {k}}}
affinity: {{perplexity: {perplexity}}}
gates: {{recall: null}}
cluster: {{workers: {workers}}}
"""


class Round(NamedTuple):
    """One run of some stages: all its seconds but those of measuring, and every step."""

    output: Path
    seconds: float
    steps: dict[str, measure.StageTime]

    @property
    def peak_bytes(self) -> int:
        """Peak resident memory of a worker in any step that counts."""
        return max(self.steps[name].peak_bytes for name in counted(self.steps))


class Cold(NamedTuple):
    """One command in a new process, nothing compiled."""

    seconds: float
    peak_bytes: int
    largest_bytes: int


def counted(steps: Sequence[str] | dict[str, Any]) -> list[str]:
    """The steps whose time counts: all but those that measure what the others built."""
    stages = {stage.name: stage for stage in flow.STAGES}
    needed = {source for name in steps if name not in MEASURING for source in stages[name].reads}
    return [name for name in steps if name not in MEASURING or name in needed]


def make_job(folder: Path, k: int, name: str = "job", workers: int = WORKERS) -> Job:
    """The job of the folder's lake, all rows of which are in the graph; its file is NAME.yaml."""
    path = folder / f"{name}.yaml"
    # A third of the neighbours is the most the perplexity may be.
    path.write_text(JOB.format(k=k, perplexity=min(15.0, k / 3), workers=workers))
    return load_job(path)


@contextmanager
def open_workers(workers: int = WORKERS) -> Iterator[Runner]:
    """A runner with its worker processes, which are children of ours, until the body ends."""
    with open_runner(ClusterConfig(workers=workers), lambda _: None) as runner:
        yield runner


def run_stages(job: Job, runner: Runner, stages: Sequence[str]) -> None:
    """Run the stages, by their names in `flow.GROUPS`."""
    for stage in stages:
        flow.run(job, runner, Silent(), only=stage)


@dataclass(frozen=True)
class Rounds:
    """Which stages are measured on the finished stores of which, how often, warmed by what."""

    count: int
    stages: tuple[str, ...] = ("neighbors",)
    before: tuple[str, ...] = BEFORE
    warm: Job | None = None  # a small job that warms the workers; else a round that is not counted


def run_rounds(job: Job, runner: Runner, rounds: Rounds) -> list[Round]:
    """The counted rounds; only the last one's folder is left."""
    if rounds.warm is not None:
        run_stages(rounds.warm, runner, (*rounds.before, *rounds.stages))
    run_stages(job, runner, rounds.before)
    found: list[Round] = []
    for number in range(rounds.count + (rounds.warm is None)):
        if found:
            shutil.rmtree(found[-1].output)
        found.append(_round(job, runner, rounds, number))
    return found[-rounds.count :]


def _round(job: Job, runner: Runner, rounds: Rounds, number: int) -> Round:
    """One round in a new output folder."""
    output = Path(f"{job.output}-{number}")
    link_stores(Path(job.output), output, rounds.before)
    fresh = replace(job, output=str(output))
    started = time.perf_counter()
    run_stages(fresh, runner, rounds.stages)
    return read_round(output, rounds.stages, time.perf_counter() - started)


def link_stores(source: Path, target: Path, groups: Sequence[str]) -> None:
    """Make the target an output folder with the source's finished stores of the groups."""
    for group in groups:
        for stage in flow.GROUPS[group]:
            place = Path("stores", stage.name)
            shutil.copytree(source / place, target / place, copy_function=os.link)


def read_round(output: Path, stages: Sequence[str], seconds: float) -> Round:
    """What a run of the stages cost, `seconds` in all."""
    steps = {
        step.name: measure.stage_time(find_folder(output, step.name))
        for group in stages
        for step in flow.GROUPS[group]
    }
    skipped = sum(steps[name].wall_seconds for name in set(steps) - set(counted(steps)))
    return Round(output, seconds - skipped, steps)


def read_metrics(output: Path, step: str) -> dict[str, Any]:
    """The metrics in the manifest of the step."""
    metrics: dict[str, Any] = measure.read_json(find_folder(output, step) / "manifest.json")[
        "metrics"
    ]
    return metrics


def find_folder(output: Path, step: str) -> Path:
    """The one store of the step."""
    (folder,) = (output / "stores" / step).iterdir()
    return folder


def run_cold(job: Job, job_file: Path, cache: Path, stage: str = "neighbors") -> Cold:
    """The stage by its command, on finished stores before it, with an empty numba cache."""
    for step in flow.GROUPS[stage]:
        shutil.rmtree(Path(job.output, "stores", step.name), ignore_errors=True)
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    command = [measure.lakemap_command(), "stage", stage, str(job_file)]
    measured = measure.run_measured(command, {"NUMBA_CACHE_DIR": str(cache)})
    found = read_round(Path(job.output), [stage], measured.seconds)
    return Cold(found.seconds, measured.peak_bytes, measured.largest_bytes)


def remove_rounds(job: Job) -> None:
    """Remove the output folders of the job's rounds; the job's own stays."""
    for folder in Path(job.output).parent.glob(f"{Path(job.output).name}-*"):
        shutil.rmtree(folder)


def remove_output(job: Job) -> None:
    """Remove the job's output folder."""
    shutil.rmtree(job.output, ignore_errors=True)


def read_neighbors(output: Path, queries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids of the neighbours of the (sorted) query rows, (q, k)."""
    store = open_step(output, "neighbors")
    found, start = [], 0
    for record in store.records:
        inside = queries[(queries >= start) & (queries < start + record.n_rows)] - start
        found.append(store.arrays(record).read("ids")[inside])
        start += record.n_rows
    return np.concatenate(found)


def open_step(output: Path, step: str) -> Store:
    """The step's finished store, for reading."""
    store = find_store(Folder(str(find_folder(output, step))))
    if store is None:
        measure.stop(f"{output}: {step} is not finished")
    return store


def median_seconds(rounds: Sequence[Round]) -> float:
    """The median of the rounds' seconds."""
    return statistics.median(found.seconds for found in rounds)


def step_seconds(rounds: Sequence[Round]) -> dict[str, float]:
    """The median seconds of each step that counts."""
    names = counted(rounds[0].steps)
    return {
        name: statistics.median(found.steps[name].wall_seconds for found in rounds)
        for name in names
    }

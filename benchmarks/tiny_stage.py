"""A stage whose tasks do nothing, to measure what a partition costs beside its work.

python -m benchmarks.tiny_stage N_PARTS prints the seconds and the driver's peak memory as JSON.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass

from benchmarks.silent import Silent
from jobs.cluster import open_runner
from pipeline.cluster_config import ClusterConfig
from pipeline.config import InputConfig, Job, SampleConfig
from pipeline.manifest import Part, Plan
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report
from pipeline.stage import (
    Context,
    Estimate,
    Shape,
    Stage,
    forget_peak_memory,
    peak_memory,
    run_stage,
)
from pipeline.stores import Folder

WORKERS = 2


@dataclass(frozen=True)
class TinySettings:
    """How many partitions there are."""

    n_parts: int


def settings(job: Job) -> TinySettings:
    """As many partitions as the job samples rows."""
    return TinySettings(job.sample.rows)


def estimate(_: Job, __: Shape) -> Estimate:
    """Nothing worth the name."""
    return Estimate(1, 1, 1)


def prepare(context: Context[TinySettings]) -> Plan:
    """Partitions of one row."""
    return Plan(split_rows(context.settings.n_parts, 1))


def do_part(_: Context[TinySettings], partition: Partition, __: Report) -> Part:
    """A file of a few bytes."""
    return Part(1, files={"row": str(partition.start).encode()})


TINY = Stage(
    name="tiny",
    version=1,
    reads=(),
    settings=settings,
    estimate=estimate,
    prepare=prepare,
    do_part=do_part,
)


def main(n_parts: str) -> None:
    """Run the stage on workers of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="lakemap-bench-") as folder,
        open_runner(ClusterConfig(workers=WORKERS), lambda _: None) as runner,
    ):
        job = Job(InputConfig("none"), folder, sample=SampleConfig(int(n_parts)))
        forget_peak_memory()
        started = time.perf_counter()
        run_stage(TINY, {}, Folder(folder), job, runner, Silent())
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "driver_bytes": peak_memory()}))


if __name__ == "__main__":
    main(*sys.argv[1:])

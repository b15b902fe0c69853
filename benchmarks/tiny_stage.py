"""A stage whose tasks do nothing, to measure what a partition costs beside its work."""

from dataclasses import dataclass

from pipeline.config import Job
from pipeline.manifest import Part, Plan
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Report
from pipeline.stage import Context, Estimate, Shape, Stage


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

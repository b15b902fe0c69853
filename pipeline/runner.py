"""Who runs tasks: the protocol every runner keeps, and the serial runner."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from pipeline.errors import ConfigError, GateError, InputError, LakemapError, StageError
from pipeline.manifest import Commit
from pipeline.partitions import Partition

Report = Callable[[float, str], None]
"""Called by a long task with the share done (0..1) and a short note."""

Write = Callable[[], Commit]
"""Writes what a task has computed and commits it."""

Task = Callable[[Partition, Report], Write]
"""Computes a partition. Writing is apart, so that the next partition need not wait for it."""

# Another attempt cannot help where the input or the job itself is wrong.
FINAL_ERRORS = (ConfigError, InputError, GateError)


class Runner(Protocol):
    """Runs one task per partition; yields commits in the order in which they finish."""

    task_bytes: int
    """Memory one task may use."""
    train_bytes: int
    """Memory the training task may use."""

    @property
    def n_workers(self) -> int:
        """Tasks that run at the same time."""
        ...

    def map(
        self,
        name: str,
        task: Task,
        parts: Iterable[Partition],
        report: Report,
        *,
        whole_machine: bool = False,
    ) -> Iterator[Commit]:
        """Commits of all partitions; a partition that keeps failing ends the run."""
        ...


class SerialRunner:
    """Runs every task in this process, one after the other."""

    n_workers = 1

    def __init__(self, task_bytes: int, retries: int = 2) -> None:
        self.task_bytes = task_bytes
        self.train_bytes = task_bytes
        self._retries = retries

    def map(
        self,
        name: str,
        task: Task,
        parts: Iterable[Partition],
        report: Report,
        *,
        whole_machine: bool = False,  # noqa: ARG002 - there is one process anyway
    ) -> Iterator[Commit]:
        """Commits of all partitions, in order."""
        for part in parts:
            yield self._attempt(name, task, part, report)

    def _attempt(self, name: str, task: Task, part: Partition, report: Report) -> Commit:
        for attempt in range(1, self._retries + 2):
            try:
                return task(part, report)()
            except FINAL_ERRORS:
                raise
            except Exception as error:
                if attempt > self._retries:
                    raise failed(name, part, attempt, error) from error
        raise AssertionError("unreachable")


def failed(name: str, part: Partition, attempts: int, error: BaseException) -> LakemapError:
    """The error that ends a run after a partition's last attempt."""
    where = f"{name}: partition {part.index} (rows {part.start}..{part.stop})"
    if isinstance(error, LakemapError):
        return error.at(where)
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return StageError(f"{where} failed {attempts} times: {reason}")

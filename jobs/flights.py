"""Partitions on their way through a Dask cluster: sent, landed, started again when late."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from uuid import uuid4

from distributed import Client, Future

from pipeline.manifest import Commit
from pipeline.partitions import Partition

TASKS_PER_WORKER = 2  # one runs, the next is already there
LATE = 3  # times the median
LATE_SECONDS = 5.0  # less is never late: a second start costs a worker's time
LOOK_SECONDS = 1.0  # between two looks for late ones


class Attempt(NamedTuple):
    """A partition in the cluster."""

    key: str
    part: Partition
    number: int
    future: "Future[Commit]"
    sent: float  # time.monotonic()


class Flights:
    """The attempts that are under way.

    One that takes more than LATE times the median is started once more on other workers; the first
    commit wins. Time counts from the sending, and one task's time in a worker's queue is allowed
    for.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        task: Callable[[Partition], Commit],
        resources: dict[str, int] | None,
    ) -> None:
        self._client, self._name, self._task, self._resources = client, name, task, resources
        self._flying: dict[str, Attempt] = {}
        self._ended: SimpleQueue[Future[Commit]] = SimpleQueue()
        self._seconds: deque[float] = deque(maxlen=1000)  # of the last tasks that ended well
        self._doubled: set[int] = set()
        self._looked = time.monotonic()

    def __len__(self) -> int:
        return len(self._flying)

    def send(self, part: Partition, number: int, workers: list[str] | None = None) -> None:
        """Start an attempt, on one of these workers if they live."""
        key = f"{self._name}-{part.index}-{number}-{uuid4().hex}"
        future = self._client.submit(
            self._task,
            part,
            key=key,
            pure=False,
            resources=self._resources,
            workers=workers,
            allow_other_workers=workers is not None,
        )
        self._flying[key] = Attempt(key, part, number, future, time.monotonic())
        future.add_done_callback(self._ended.put)

    def land(self) -> tuple[Attempt, list[Attempt]]:
        """The next attempt that has ended, well or not, and those of its partition still flying."""
        while True:
            self._double_late()
            try:
                future = self._ended.get(timeout=LOOK_SECONDS)
            except Empty:
                continue
            attempt = self._flying.pop(str(future.key), None)
            if attempt is not None:  # else another attempt was faster
                return attempt, [a for a in self._flying.values() if a.part is attempt.part]

    def settle(self, commit: Commit, twins: list[Attempt]) -> None:
        """A partition is committed; its other attempts are no longer wanted."""
        self._seconds.append(commit.effort.seconds)
        for twin in twins:
            del self._flying[twin.key]
        self._cancel(twins)

    def cancel_all(self) -> None:
        """Nothing that is still under way is wanted."""
        self._cancel(self._flying.values(), force=True)

    def _cancel(self, attempts: Iterable[Attempt], **how: Any) -> None:
        self._client.cancel([attempt.future for attempt in attempts], **how)

    def _double_late(self) -> None:
        """Start what is late once more, at most once for each partition."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS or len(self._seconds) < LATE:
            return
        self._looked = now
        limit = (LATE + TASKS_PER_WORKER - 1) * statistics.median(self._seconds)
        for attempt in list(self._flying.values()):
            is_late = now - attempt.sent > max(limit, LATE_SECONDS)
            if is_late and attempt.part.index not in self._doubled:
                others = self._elsewhere(attempt.key)
                if others:
                    self._doubled.add(attempt.part.index)
                    self.send(attempt.part, attempt.number, others)

    def _elsewhere(self, key: str) -> list[str]:
        """The workers that do not have the task."""
        return [worker for worker, keys in self._client.processing().items() if key not in keys]

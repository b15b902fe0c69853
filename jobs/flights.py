"""Partitions on their way through a Dask cluster: sent, landed, started again when late.

A task in Dask costs some milliseconds whatever it does, so partitions that take less travel several
together.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
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
TOGETHER_SECONDS = 0.25  # of work that partitions sent together should make
MOST_TOGETHER = 64
REMEMBERED = 1000  # partitions whose times are known; before, each travels alone


Parts = tuple[Partition, ...]


class Attempt(NamedTuple):
    """Partitions in the cluster, one after the other in one task."""

    key: str
    parts: Parts
    number: int
    future: "Future[list[Commit]]"
    sent: float  # time.monotonic()


class Flights:
    """The attempts that are under way.

    One that takes more than LATE times the median is started once more on other workers; the first
    commit wins. Time counts from the sending, and one task's time in a worker's queue is allowed
    for. How many partitions travel together follows from what the last ones took.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        task: Callable[[Parts], list[Commit]],
        resources: dict[str, int] | None,
    ) -> None:
        self._client, self._name, self._task, self._resources = client, name, task, resources
        self._flying: dict[str, Attempt] = {}
        self._ended: SimpleQueue[Future[list[Commit]]] = SimpleQueue()
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)  # of the last partitions done
        self._together = 1
        self._doubled: set[int] = set()
        self._looked = time.monotonic()

    def __len__(self) -> int:
        return len(self._flying)

    def send_next(self, waiting: Iterator[Partition]) -> bool:
        """Send the next partitions, as many together as seems good; false when there are none."""
        parts = tuple(islice(waiting, self._together))
        if parts:
            self.send(parts, 1)
        return bool(parts)

    def send(self, parts: Parts, number: int, workers: list[str] | None = None) -> None:
        """Start an attempt, on one of these workers if they live."""
        key = f"{self._name}-{parts[0].index}-{number}-{uuid4().hex}"
        future = self._client.submit(
            self._task,
            parts,
            key=key,
            pure=False,
            resources=self._resources,
            workers=workers,
            allow_other_workers=workers is not None,
        )
        self._flying[key] = Attempt(key, parts, number, future, time.monotonic())
        future.add_done_callback(self._ended.put)

    def land(self, look: Callable[[], None]) -> tuple[Attempt, list[Attempt]]:
        """The next attempt that has ended, well or not, and its twins that are still flying.

        `look` is called now and then: workers may have come.
        """
        while True:
            look()
            self._double_late()
            try:
                future = self._ended.get(timeout=LOOK_SECONDS)
            except Empty:
                continue
            attempt = self._flying.pop(str(future.key), None)
            if attempt is not None:  # else another attempt was faster
                return attempt, [a for a in self._flying.values() if a.parts is attempt.parts]

    def settle(self, commits: list[Commit], twins: list[Attempt]) -> None:
        """Partitions are committed; their other attempts are no longer wanted."""
        self._seconds.extend(commit.effort.seconds for commit in commits)
        if len(self._seconds) == self._seconds.maxlen:
            fitting = TOGETHER_SECONDS / max(statistics.median(self._seconds), 1e-9)
            self._together = int(min(max(fitting, 1), MOST_TOGETHER))
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
            is_late = now - attempt.sent > max(len(attempt.parts) * limit, LATE_SECONDS)
            if is_late and attempt.parts[0].index not in self._doubled:
                others = self._elsewhere(attempt.key)
                if others:
                    self._doubled.add(attempt.parts[0].index)
                    self.send(attempt.parts, attempt.number, others)

    def _elsewhere(self, key: str) -> list[str]:
        """The workers that do not have the task."""
        return [worker for worker, keys in self._client.processing().items() if key not in keys]

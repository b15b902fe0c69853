"""What every kind of cluster gives: a client, and workers that are replaced when they are lost."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from distributed import Client

log = logging.getLogger("lakemap")

# One thread unless a task sets its own number. OpenMP's threads wait for one another in a loop, by
# default so long that one busy process beside them stalls them; asleep at once they wake too late.
# A short loop is between. (Training does without them: encoders/team.py.)
# Dask's own MALLOC_TRIM_THRESHOLD_ is left out: it gives every large array back to the system at
# once (49 against 28 ms a step).
# A new thread for every task would mean a new heap for each, so there are few. With two, both
# threads of a training may get the same one and wait for it (60 waits a step against 30).
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
    "GOMP_SPINCOUNT": 10_000,
    "MALLOC_ARENA_MAX": 3,
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # Arrow's own gives memory back between two batches
}
WATCHER_BYTES = 256 << 20  # of the process beside a worker that starts it anew
MEMORY_SHARE = 0.98  # of a worker's memory; one that needs more is started anew

# The same for workers on other machines, where Dask reads its settings from the environment.
REMOTE_ENVIRONMENT = {
    "DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON": str(
        {**WORKER_ENVIRONMENT, "MALLOC_TRIM_THRESHOLD_": None}
    ),
    "DASK_DISTRIBUTED__WORKER__MEMORY__TERMINATE": str(MEMORY_SHARE),
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
}


SHRINK_SECONDS = 60.0  # of too little work; most steps of a single task take less


class Demand:
    """How many workers there should be: more at once, fewer only when there is little for long."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._needed = time.monotonic()
        self.n_workers = least

    def follow(self, n_tasks: int) -> int:
        """The number for so many tasks that are still to be done."""
        wanted = min(max(n_tasks, self._least), self._most)
        now = time.monotonic()
        if wanted >= self.n_workers or now - self._needed >= SHRINK_SECONDS:
            self.n_workers, self._needed = wanted, now
        return self.n_workers


def _nothing(n_tasks: int) -> None:
    """Workers of this kind are started and replaced by others, or not at all."""


@dataclass(frozen=True)
class Site:
    """A running cluster.

    where: what to look at when no worker comes. refill: called every few seconds with the number of
    tasks still to be done; asks for workers, also in place of lost ones. gpu_pool: a worker for
    training is asked for, and given back at the end; gpu_bytes is its memory, 0 where the job has
    no such pool. same_host: workers are of this installation.
    """

    client: Client
    where: str
    refill: Callable[[int], None] = _nothing
    gpu_pool: Callable[[], AbstractContextManager[None]] = nullcontext
    gpu_bytes: int = 0
    same_host: bool = False


def first_line(error: BaseException) -> str:
    """What the error says, on one line and without what follows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

"""The workers a cluster has at the moment: they may vanish and join while a run goes on."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from distributed import Client
from distributed.system import MEMORY_LIMIT

from jobs.sites.site import Site
from pipeline.errors import ClusterError

log = logging.getLogger("lakemap")

LOOK_SECONDS = 1.0  # between two looks at the scheduler's list of workers
SAY_SECONDS = 10.0  # between two lines while there are none
REFILL_SECONDS = 5.0
GPU = {"GPU": 1}

Worker = Mapping[str, Any]


class Crew:
    """The workers of a site; when there are none, they are waited for, `wait_seconds` at most."""

    def __init__(self, site: Site, wait_seconds: float) -> None:
        self._site, self._wait_seconds = site, wait_seconds
        self._workers: dict[str, Worker] = {}
        self._looked = self._refilled = self._said = float("-inf")
        self._missed = time.monotonic()  # when there was last a worker for what is to be done
        self.gather(None)

    @property
    def n_threads(self) -> int:
        """Tasks that can run at the same time."""
        return sum(worker["nthreads"] for worker in self._workers.values())

    @property
    def task_bytes(self) -> int:
        """Memory that every worker has for a task."""
        shares = [worker["memory_limit"] // worker["nthreads"] for worker in self._workers.values()]
        return min(shares) or MEMORY_LIMIT  # 0 is Dask's word for unlimited

    @property
    def train_bytes(self) -> int:
        """Memory of the worker that trains."""
        largest = max(worker["memory_limit"] for worker in self._workers.values())
        return self._site.gpu_bytes or largest or MEMORY_LIMIT

    @property
    def has_gpu(self) -> bool:
        """Whether training gets a GPU worker."""
        return bool(self._site.gpu_bytes) or bool(self._able(GPU))

    @contextmanager
    def equip(self, whole_machine: bool) -> Iterator[dict[str, int] | None]:
        """What the tasks inside ask for; for training the pool of its own is there meanwhile."""
        self._missed = time.monotonic()  # the driver may have been busy with other things
        if whole_machine:
            self.gather(None)  # who is there may have changed since the step before
        if not whole_machine or not self.has_gpu:
            yield None
            return
        with self._site.gpu_pool():
            self.gather(GPU)
            yield GPU

    def gather(self, resources: dict[str, int] | None) -> None:
        """Wait for the first worker that has the resources."""
        self._missed = time.monotonic()
        self._looked = float("-inf")
        while not self.look(resources, n_tasks=0):
            time.sleep(LOOK_SECONDS / 4)

    def look(self, resources: dict[str, int] | None, n_tasks: int) -> int:
        """Threads of the workers that have the resources; asks the scheduler now and then.

        The site is told how many tasks are still to be done, and replaces workers that were lost.
        """
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked = now
            self._update()
            able = self._able(resources)
            if able:
                self._missed = now
            else:
                self._complain(now - self._missed, resources)
            if now - self._refilled >= REFILL_SECONDS:
                self._refilled = now
                self._site.refill(0 if resources else n_tasks)  # others train
        return sum(worker["nthreads"] for worker in self._able(resources))

    def _able(self, resources: dict[str, int] | None) -> list[Worker]:
        needed = set(resources or ())
        return [w for w in self._workers.values() if needed <= set(w["resources"])]

    def _update(self) -> None:
        try:
            # A dictionary without workers where the connection has ended.
            workers = dict(self._site.client.scheduler_info(n_workers=-1)["workers"])
            if not self._site.same_host and not workers.keys() <= self._workers.keys():
                check_versions(self._site.client)
        except (OSError, TimeoutError, KeyError) as error:
            raise ClusterError(
                "the connection to the scheduler was lost; run again when it is back"
            ) from error
        self._workers = workers

    def _complain(self, seconds: float, resources: dict[str, int] | None) -> None:
        """Say now and then that there is nobody; at last, give up."""
        what = "worker with a GPU" if resources else "worker"
        if seconds >= self._wait_seconds:
            raise ClusterError(f"no {what} came in {seconds:.0f} s; {self._site.where}")
        if time.monotonic() - self._said >= SAY_SECONDS and seconds > 0:
            self._said = time.monotonic()
            log.info("waiting for a %s (%.0f of %g s)", what, seconds, self._wait_seconds)


def check_versions(client: Client) -> None:
    """Refuse a scheduler or workers whose software differs from the driver's."""
    found: Any = client.get_versions(packages=["lakemap"])
    ours = _versions(found["client"])
    others = {"the scheduler": found["scheduler"]}
    others |= {f"worker {address}": versions for address, versions in found["workers"].items()}
    for who, versions in others.items():
        theirs = _versions(versions)
        if who == "the scheduler":  # which only hands tasks on
            theirs["lakemap"] = ours["lakemap"]
        for name in ours:
            if theirs[name] != ours[name]:
                raise ClusterError(
                    f"{who} has {name} {theirs[name] or 'not at all'}, the driver "
                    f"{ours[name]}; install the same there and here"
                )


def _versions(found: Mapping[str, Any]) -> dict[str, str | None]:
    packages = found["packages"]
    python = ".".join(str(packages["python"]).split(".")[:2])
    return {
        "Python": python,
        **{name: packages[name] for name in ("dask", "distributed", "lakemap")},
    }

"""The runner that sends tasks to the workers of a Dask cluster, wherever those are."""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import length_hint
from typing import Any, NamedTuple
from uuid import uuid4

from distributed import KilledWorker, get_worker, secede
from distributed.comm.core import CommClosedError
from distributed.system import MEMORY_LIMIT

from jobs.crew import Crew
from jobs.flights import TASKS_PER_WORKER, Attempt, Flights, Parts
from jobs.sites import open_site
from jobs.sites.local import core_count
from jobs.sites.site import Site
from pipeline.cluster_config import ClusterConfig
from pipeline.errors import ClusterError
from pipeline.manifest import Commit
from pipeline.partitions import Partition
from pipeline.runner import FINAL_ERRORS, Report, Runner, SerialRunner, Task, failed


class DaskRunner:
    """Runs tasks on the workers of a client, a bounded number at a time."""

    def __init__(self, site: Site, retries: int, wait_seconds: float) -> None:
        self._client = site.client
        self._retries = retries
        self._crew = Crew(site, wait_seconds)
        self.task_bytes = self._crew.task_bytes
        self.train_bytes = self._crew.train_bytes

    @property
    def n_workers(self) -> int:
        """Tasks that run at the same time, as of the last look."""
        return self._crew.n_threads

    def map(
        self,
        name: str,
        task: Task,
        parts: Iterable[Partition],
        report: Report,
        *,
        whole_machine: bool = False,
    ) -> Iterator[Commit]:
        """Commits of all partitions, as they finish; failed ones are tried again."""
        if not length_hint(parts, 1):  # no pool is started for nothing
            return
        waiting = iter(parts)
        topic = f"lakemap-{uuid4().hex}"  # of this call: tasks that nobody waits for may go on
        work = functools.partial(run_on_worker, task, topic)
        with self._progress(topic, report), self._crew.equip(whole_machine) as resources:
            flights = Flights(self._client, name, work, resources)
            fill = functools.partial(self._fill, flights, waiting, resources)
            try:
                fill()
                while flights:
                    attempt, twins = flights.land(fill)
                    commits = self._result(name, attempt, has_twin=bool(twins))
                    attempt.future.release()  # or Dask does it again when its worker dies
                    if commits is not None:
                        flights.settle(commits, twins)
                        fill()
                        yield from commits
                    elif not twins:
                        # Alone from now on, so that only the one at fault is tried in vain.
                        number = attempt.number + (len(attempt.parts) == 1)
                        for part in attempt.parts:
                            flights.send((part,), number)
            finally:
                flights.cancel_all()

    def _fill(
        self, flights: Flights, waiting: Iterator[Partition], resources: dict[str, int] | None
    ) -> None:
        """Send what the workers there are now can take; where there are none, one to wait."""
        n_tasks = len(flights) + length_hint(waiting)
        window = TASKS_PER_WORKER * self._crew.look(resources, n_tasks)
        while len(flights) < (window or 1) and flights.send_next(waiting):
            pass

    def _result(self, name: str, attempt: Attempt, has_twin: bool) -> list[Commit] | None:
        """The commits, or None when the partitions deserve another attempt or have one."""
        try:
            return attempt.future.result()
        except FINAL_ERRORS:
            raise
        except Exception as error:
            if has_twin or len(attempt.parts) > 1 or attempt.number <= self._retries:
                return None
            if isinstance(error, KilledWorker | asyncio.CancelledError | CommClosedError):
                deaths = attempt.number * (1 + getattr(error, "allowed_failures", 0))
                raise ClusterError(
                    f"{name}: partition {attempt.parts[0].index}: its worker died "
                    f"{deaths} times; give workers more memory (cluster.memory), run again"
                ) from error
            raise failed(name, attempt.parts[0], attempt.number, error) from error

    @contextmanager
    def _progress(self, topic: str, report: Report) -> Iterator[None]:
        """Hand on what long tasks report while the body runs."""

        def handle(event: tuple[float, Any]) -> None:
            share, note = event[1]
            report(share, note)

        self._client.subscribe_topic(topic, handle)
        try:
            yield
        finally:
            self._client.unsubscribe_topic(topic)


def run_on_worker(task: Task, topic: str, parts: Parts) -> list[Commit]:
    """The task's commits; runs on a worker, where progress goes to the scheduler as an event."""
    worker = get_worker()

    def report(share: float, note: str) -> None:
        worker.log_event(topic, (share, note))

    if len(parts) > 1:
        return [task(part, report)() for part in parts]
    write = task(parts[0], report)
    secede()  # the worker goes on to the next task while this one writes
    return [write()]


class Offer(NamedTuple):
    """What the workers of a job give, as far as known before they start."""

    n_workers: int
    task_bytes: int
    train_bytes: int
    device: str


def find_offer(config: ClusterConfig) -> Offer:
    """What the job's workers will give; no worker is started."""
    if config.kind == "scheduler":
        with open_site(config) as site:
            crew = Crew(site, wait_seconds=0)
            device = "a GPU worker" if crew.has_gpu else "CPU"
            return Offer(crew.n_threads, crew.task_bytes, crew.train_bytes, device)
    if config.kind in ("slurm", "kubernetes"):
        memory, gpu = int(config.memory or 0), config.gpu
        train_bytes = int(gpu.memory) if gpu else memory
        return Offer(config.workers or 0, memory, train_bytes, "a GPU worker" if gpu else "CPU")
    workers = 1 if config.kind == "serial" else config.workers or core_count()
    memory = int(config.memory or MEMORY_LIMIT // workers)
    return Offer(workers, memory, memory, _local_device())


def _local_device() -> str:
    import torch  # noqa: PLC0415 - seconds to import, and only `plan` asks

    return "GPU" if torch.cuda.is_available() else "CPU"


@contextmanager
def open_runner(config: ClusterConfig, announce: Callable[[str], None]) -> Iterator[Runner]:
    """The runner the job asks for; `announce` is told where the dashboard is."""
    if config.kind == "serial":
        yield SerialRunner(int(config.memory or MEMORY_LIMIT), config.retries)
        return
    _quieten()
    with open_site(config) as site:
        announce(site.client.dashboard_link)
        yield DaskRunner(site, config.retries, config.wait_seconds)


def _quieten() -> None:
    """Keep Dask's own log lines out of ours; what matters reaches us as exceptions."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("distributed", "tornado", "bokeh"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

"""Dask, known to this file and flights.py alone: opens a client, runs tasks on its workers."""

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from uuid import uuid4

import dask
from distributed import Client, KilledWorker, LocalCluster, get_worker, secede
from distributed.comm.core import CommClosedError
from distributed.system import MEMORY_LIMIT

from jobs.flights import TASKS_PER_WORKER, Attempt, Flights, Parts
from pipeline.config import ClusterConfig
from pipeline.errors import ClusterError
from pipeline.manifest import Commit
from pipeline.partitions import Partition
from pipeline.runner import FINAL_ERRORS, Report, Runner, SerialRunner, Task, failed

# One thread unless a task sets its own number. Threads of training wait for one another in a loop,
# by default so long that one busy process beside them stalls it (811 ms a step); asleep at once
# they wake too late (26 ms). A short loop costs 16 ms, and 42 to 105 beside two busy processes.
# Dask's own MALLOC_TRIM_THRESHOLD_ is left out: it gives every large array back to the system at
# once (49 against 28 ms a step).
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": 1,
    "MKL_NUM_THREADS": 1,
    "OPENBLAS_NUM_THREADS": 1,
    "GOMP_SPINCOUNT": 10_000,
}


class DaskRunner:
    """Runs tasks on the workers of a client, a bounded number at a time."""

    def __init__(self, client: Client, retries: int) -> None:
        self._client = client
        self._retries = retries
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        if not workers:
            raise ClusterError("the scheduler has no workers; start some and run again")
        self.n_workers = sum(worker["nthreads"] for worker in workers)
        shares = [worker["memory_limit"] // worker["nthreads"] for worker in workers]
        self.task_bytes = min(shares) or MEMORY_LIMIT  # 0 is Dask's word for unlimited
        self.train_bytes = max(worker["memory_limit"] for worker in workers) or MEMORY_LIMIT
        self.has_gpu = any("GPU" in worker["resources"] for worker in workers)

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
        waiting = iter(parts)
        resources = {"GPU": 1} if whole_machine and self.has_gpu else None
        topic = f"lakemap-{uuid4().hex}"  # of this call: tasks that nobody waits for may go on
        work = functools.partial(run_on_worker, task, topic)
        flights = Flights(self._client, name, work, resources)
        with self._progress(topic, report):
            try:
                for _ in range(TASKS_PER_WORKER * self.n_workers):
                    flights.send_next(waiting)
                while flights:
                    attempt, twins = flights.land()
                    commits = self._result(name, attempt, has_twin=bool(twins))
                    attempt.future.release()  # or Dask does it again when its worker dies
                    if commits is not None:
                        flights.settle(commits, twins)
                        flights.send_next(waiting)
                        yield from commits
                    elif not twins:
                        # Alone from now on, so that only the one at fault is tried in vain.
                        number = attempt.number + (len(attempt.parts) == 1)
                        for part in attempt.parts:
                            flights.send((part,), number)
            finally:
                flights.cancel_all()

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
                raise ClusterError(
                    f"{name}: partition {attempt.parts[0].index}: its worker died "
                    f"{attempt.number} times; give workers more memory (cluster.memory), run again"
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
        with _connect(str(config.address)) as client:
            runner = DaskRunner(client, config.retries)
            device = "a GPU worker" if runner.has_gpu else "CPU"
            return Offer(runner.n_workers, runner.task_bytes, runner.train_bytes, device)
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
    with _open_client(config) as client:
        announce(client.dashboard_link)
        yield DaskRunner(client, config.retries)


def _quieten() -> None:
    """Keep Dask's own log lines out of ours; what matters reaches us as exceptions."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in ("distributed", "tornado", "bokeh"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def _open_client(config: ClusterConfig) -> Iterator[Client]:
    if config.kind == "scheduler":
        with _connect(str(config.address)) as client:
            yield client
        return
    workers = config.workers or core_count()
    memory = int(config.memory or MEMORY_LIMIT // workers)
    settings = {
        "distributed.worker.memory.terminate": 0.98,
        "distributed.scheduler.allowed-failures": 0,  # the runner counts attempts itself
        "distributed.comm.timeouts.connect": "30s",
        "distributed.nanny.pre-spawn-environ": WORKER_ENVIRONMENT,
        # Dask gives up a worker that is away when this has passed since some earlier death of it,
        # even if it has just died again: two deaths 15 s apart, and the run waits for ever.
        "distributed.deploy.lost-worker-timeout": "1000 days",
    }
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            memory_limit=memory,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
            preload="jobs.worker",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def _connect(address: str) -> Client:
    try:
        return Client(address, timeout="20s")
    except (OSError, ValueError, TimeoutError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ClusterError(
            f"{address}: no scheduler there ({reason}); check cluster.address"
        ) from error


def core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))

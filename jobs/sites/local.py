"""Workers on this machine, and those of a scheduler that is already running."""

import asyncio
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import dask
from distributed import Client, LocalCluster, Security
from distributed.comm.core import connect as comm_to
from distributed.system import MEMORY_LIMIT

from jobs.sites.site import MEMORY_SHARE, WORKER_ENVIRONMENT, Site, first_line
from jobs.sites.tls import make_security
from pipeline.cluster_config import ClusterConfig
from pipeline.errors import ClusterError

CONNECT_SECONDS = 20


@contextmanager
def open_local(config: ClusterConfig) -> Iterator[Site]:
    """Worker processes of one thread each."""
    workers = config.workers or core_count()
    settings = {
        "distributed.worker.memory.terminate": MEMORY_SHARE,
        "distributed.scheduler.allowed-failures": 0,  # the runner counts attempts itself
        "distributed.comm.timeouts.connect": "30s",
        "distributed.nanny.pre-spawn-environ": WORKER_ENVIRONMENT,
        # Of use on the dashboard alone; they wake every process a hundred times a second, which
        # takes a tenth of the time of a training on all cores.
        "distributed.worker.profile.enabled": False,
        "distributed.admin.tick.interval": "500ms",
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
            memory_limit=worker_bytes(config),
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
            preload="jobs.worker",
        ) as cluster,
        Client(cluster) as client,
    ):
        yield Site(client, "worker processes end as soon as they start", same_host=True)


def worker_bytes(config: ClusterConfig) -> int:
    """Memory of a local worker: what the job says, or an equal share of the machine's."""
    return int(config.memory or MEMORY_LIMIT // (config.workers or core_count()))


def core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def connect(config: ClusterConfig) -> Iterator[Site]:
    """A scheduler that others started, and that stays."""
    address = str(config.address)
    security = Security() if config.tls is None else make_security(config.tls)
    try:
        # A client that finds nobody stays behind half open, and may lock up the next one.
        asyncio.run(_knock(address, security))
        client = Client(address, timeout=CONNECT_SECONDS, security=security)
    except (OSError, ValueError, TimeoutError) as error:
        raise ClusterError(f"{address}: {_refusal(error, config.tls is not None)}") from error
    with client:
        yield Site(client, f"start some for the scheduler at {address}, run again")


async def _knock(address: str, security: Security) -> None:
    """Whether a scheduler answers."""
    options = security.get_connection_args("client")
    comm = await comm_to(address, timeout=CONNECT_SECONDS, **options)
    await comm.close()


def _refusal(error: BaseException, has_tls: bool) -> str:
    """Why there is no connection, and what to look at."""
    causes = [error]
    while isinstance(cause := causes[-1].__cause__, Exception):  # which a cancellation is not
        causes.append(cause)
    said = " ".join(f"{type(cause).__name__} {cause}" for cause in causes)
    if "SSL" in said:
        problem = re.search(r"\[SSL: (\w+)\]", said)
        return (
            f"no connection with these certificates ({problem[1] if problem else 'hung up'}); "
            "check cluster.tls against the scheduler's"
        )
    if not has_tls and isinstance(causes[-1], ConnectionResetError):
        return (
            "whoever listens there hangs up; a scheduler with TLS needs cluster.address "
            "tls://host:port and cluster.tls with ca, cert and key"
        )
    reason = next((first_line(cause) for cause in reversed(causes) if str(cause)), "no answer")
    return f"no scheduler there ({reason}); check cluster.address"

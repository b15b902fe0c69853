"""Workers as jobs of SLURM, submitted with dask-jobqueue; the scheduler lives in the driver."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dask
from distributed import Adaptive, Client, SpecCluster
from distributed.core import Status

from jobs.sites.local import make_security
from jobs.sites.site import REMOTE_ENVIRONMENT, WATCHER_BYTES, Demand, Site, first_line, log
from pipeline.cluster_config import ClusterConfig, GpuConfig, SlurmConfig
from pipeline.errors import ClusterError, ConfigError

GPU_DIRECTIVES = ("--gres=gpu:1",)


@contextmanager
def open_slurm(config: ClusterConfig) -> Iterator[Site]:
    """Jobs of one worker each, as many as the job asks for, or as there is work for."""
    try:
        from dask_jobqueue import SLURMCluster  # noqa: PLC0415 - an extra that others do not need
    except ImportError as error:
        raise ConfigError(
            "cluster.kind slurm needs dask-jobqueue; pip install 'lakemap[slurm]'"
        ) from error
    if shutil.which("sbatch") is None:
        raise ClusterError(
            "cluster.kind slurm: sbatch is not found; start lakemap where SLURM's commands are"
        )
    slurm = config.slurm or SlurmConfig()
    security = None if config.tls is None else make_security(config.tls)
    settings = {
        "distributed.comm.timeouts.connect": "30s",
        "jobqueue.slurm.walltime": None,  # SLURM's own default, where Dask's is half an hour
    }
    with (
        dask.config.set(settings),
        SLURMCluster(
            job_cls=_job_class(),
            **job_options(config),
            interface=slurm.interface,
            security=security,
            scheduler_options={"dashboard_address": "127.0.0.1:0"},
        ) as cluster,
        Client(cluster) as client,
    ):
        pools = Pools(cluster, config)
        pools.start()
        yield Site(
            client,
            f"squeue --me shows the jobs, their logs are in {slurm.logs}",
            pools.refill,
            pools.gpu_pool,
            int(config.gpu.memory) if config.gpu else 0,
        )


def job_options(config: ClusterConfig, gpu: GpuConfig | None = None) -> dict[str, Any]:
    """The job script of a worker, or of the one for training, in dask-jobqueue's words."""
    slurm = config.slurm or SlurmConfig()
    exports = tuple(f'export {name}="{value}"' for name, value in REMOTE_ENVIRONMENT.items())
    options: dict[str, Any] = {
        "job_name": "lakemap",
        "queue": slurm.queue,
        "account": slurm.account,
        "walltime": slurm.walltime,
        "cores": 1,  # one thread: tasks are parallel by process
        "processes": 1,
        "job_cpu": config.cores or 1,
        "memory": f"{config.memory}B",
        "job_mem": _job_memory(config.memory),
        "job_extra_directives": list(slurm.directives),
        "job_script_prologue": [*exports, *slurm.prologue],
        "log_directory": slurm.logs,
    }
    if gpu is None:
        return options
    directives = GPU_DIRECTIVES if gpu.directives is None else gpu.directives
    return options | {
        "job_name": "lakemap-gpu",
        "queue": gpu.queue or slurm.queue,
        "job_cpu": gpu.cores,
        "memory": f"{gpu.memory}B",
        "job_mem": _job_memory(gpu.memory),
        "job_extra_directives": [*slurm.directives, *directives],
        "worker_extra_args": ["--resources", "GPU=1"],
    }


def _job_memory(worker_bytes: int | None) -> str:
    """What SLURM is asked for, in its own MiB."""
    return f"{-(-((worker_bytes or 0) + WATCHER_BYTES) // (1 << 20))}M"


class Follow(Adaptive):
    """Dask's scaling, which picks idle workers to end, with a number that knows all the work.

    Dask reckons with the tasks it was sent, and the runner sends only two for each worker.
    """

    def __init__(self, cluster: Any, demand: Demand, **limits: Any) -> None:
        self._demand = demand
        super().__init__(cluster, **limits)

    async def target(self) -> int:
        """How many workers there should be."""
        return self._demand.n_workers


class Pools:
    """The submitted workers, and for the time of training one more with a GPU."""

    def __init__(self, cluster: Any, config: ClusterConfig) -> None:
        self._cluster, self._config = cluster, config
        most = config.workers or 1
        self._demand = Demand(config.min_workers or most, most)
        self._gpu: SpecCluster | None = None

    def start(self) -> None:
        """Submit the first workers; a refusal by SLURM ends the run."""
        self._cluster.scale(self._demand.n_workers)
        _submit(self._cluster)
        if self._config.min_workers is not None:
            self._cluster.adapt(
                Follow,
                demand=self._demand,
                minimum=self._config.min_workers,
                maximum=self._config.workers,
            )

    def refill(self, n_tasks: int) -> None:
        """Submit workers in place of lost ones; what SLURM refuses now it may take later."""
        self._demand.follow(n_tasks)
        for cluster in filter(None, (self._cluster, self._gpu)):
            try:
                _submit(cluster)
            except ClusterError as error:
                log.warning("%s; trying again", error)

    @contextmanager
    def gpu_pool(self) -> Iterator[None]:
        """A pool of one worker with the resource GPU, at the same scheduler."""
        if self._config.gpu is None:
            yield
            return
        main = self._cluster
        options = {**main.new_spec["options"], **job_options(self._config, self._config.gpu)}
        self._gpu = SpecCluster(
            scheduler={"cls": lambda: main.scheduler},
            # By a name, because Dask knows a worker's loss by it and takes no numbers back.
            workers={"lakemap-gpu": {"cls": main.job_cls, "options": options}},
            security=main.security,
            loop=main.loop,
            name="lakemap-gpu",
            shutdown_scheduler=False,
        )
        try:
            _submit(self._gpu)
            yield
        finally:
            gpu, self._gpu = self._gpu, None
            gpu.close()


def _submit(cluster: Any) -> None:
    """Submit the workers that should be there and are not."""

    async def settle() -> list[str]:
        for name, job in list(cluster.workers.items()):
            if job.refusal:
                del cluster.workers[name]
        await cluster
        return [job.refusal for job in cluster.workers.values() if job.refusal]

    refusals = cluster.sync(settle)
    if refusals:
        raise ClusterError(
            f"cluster.kind slurm: no job was submitted ({refusals[0]}); check cluster.slurm"
        )


def _job_class() -> Any:
    """dask-jobqueue's job, which keeps what sbatch complained of: Dask forgets it in a task."""
    from dask_jobqueue.slurm import SLURMJob  # noqa: PLC0415 - an extra

    class Job(SLURMJob):  # type: ignore[misc]  # dask-jobqueue has no types
        refusal = ""

        async def start(self) -> None:
            try:
                await super().start()
            except (RuntimeError, OSError, ValueError) as error:
                said = [line for line in str(error).splitlines() if line.startswith("sbatch:")]
                self.refusal = said[0] if said else first_line(error)
                self.status = Status.running  # else Dask submits it again at once

    return Job

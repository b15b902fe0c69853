"""Workers as jobs of SLURM, submitted with dask-jobqueue; the scheduler lives in the driver."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import dask
from distributed import Adaptive, Client
from distributed.core import Status

from jobs.sites.site import REMOTE_ENVIRONMENT, WATCHER_BYTES, Demand, Site, first_line, log
from jobs.sites.tls import make_security
from pipeline.cluster_config import ClusterConfig, GpuConfig, SlurmConfig
from pipeline.errors import ClusterError, ConfigError

GPU_DIRECTIVES = ("--gres=gpu:1",)
ASK_SECONDS = 15.0  # between two questions to SLURM


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
        self._gpu: GpuJob | None = None
        self._said = ""

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
        try:
            _submit(self._cluster)
            if self._gpu is not None:
                self._gpu.refill()
        except ClusterError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("%s; trying again", error)

    @contextmanager
    def gpu_pool(self) -> Iterator[None]:
        """A pool of one worker with the resource GPU, at the same scheduler."""
        if self._config.gpu is None:
            yield
            return
        cluster = self._cluster
        options = {**cluster.new_spec["options"], **job_options(self._config, self._config.gpu)}
        gpu = GpuJob(cluster, options)
        try:
            gpu.start()
            self._gpu = gpu
            yield
        finally:
            self._gpu = None
            gpu.close()


class GpuJob:
    """The job of the worker that trains, submitted again when its worker is lost.

    Not a second cluster of Dask's: a scheduler tells only the last one which workers it has lost.
    """

    def __init__(self, cluster: Any, options: Mapping[str, Any]) -> None:
        self._cluster, self._options = cluster, options
        self._job: Any = None
        self._n_jobs = 0
        self._asked = time.monotonic()

    def start(self) -> None:
        """Submit it; a refusal ends the run."""
        self._n_jobs += 1
        address = self._cluster.scheduler_address
        name = f"lakemap-gpu-{self._n_jobs}"
        self._job = self._cluster.job_cls(address, name=name, **self._options)
        self._cluster.sync(self._job.start)
        if self._job.refusal:
            raise _refused(self._job.refusal)

    def refill(self) -> None:
        """Submit it again if its worker is not there and SLURM knows nothing of it."""
        names = {worker["name"] for worker in self._cluster.scheduler_info["workers"].values()}
        now = time.monotonic()
        if self._job.name not in names and now - self._asked >= ASK_SECONDS:
            self._asked = now
            if self._job.refusal or _is_over(self._job.job_id):
                self.start()

    def close(self) -> None:
        """Cancel it, whether it runs or waits."""
        self._cluster.sync(self._job.close)


def _is_over(job_id: str) -> bool:
    """Whether a job neither runs nor waits."""
    command = ["squeue", "--noheader", "--jobs", job_id]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return not done.stdout.strip() if done.returncode == 0 else "Invalid job id" in done.stderr


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
        raise _refused(refusals[0])


def _refused(reason: str) -> ClusterError:
    return ClusterError(f"cluster.kind slurm: no job was submitted ({reason}); check cluster.slurm")


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

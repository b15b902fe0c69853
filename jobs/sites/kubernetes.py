"""Workers as pods of Kubernetes, started by the operator of dask-kubernetes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from distributed import Client

from jobs.sites.site import REMOTE_ENVIRONMENT, WATCHER_BYTES, Demand, Site, first_line, log
from pipeline.cluster_config import ClusterConfig, GpuConfig
from pipeline.errors import ClusterError, ConfigError

SCHEDULER_RESOURCES = {"cpu": "1", "memory": "2Gi"}
IDLE_SECONDS = 3600  # without a task, as when the driver was killed: the operator removes it all
GPU_RESOURCE = "nvidia.com/gpu"


@contextmanager
def open_kubernetes(config: ClusterConfig) -> Iterator[Site]:
    """Pods of one worker each, as many as the job asks for, or as there is work for."""
    try:
        import kr8s  # noqa: PLC0415 - an extra
        from dask_kubernetes.operator import KubeCluster  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "cluster.kind kubernetes needs dask-kubernetes; pip install 'lakemap[kubernetes]'"
        ) from error
    assert config.kubernetes is not None
    spec = cluster_spec(f"lakemap-{uuid4().hex[:8]}", config)
    name, namespace = spec["metadata"]["name"], config.kubernetes.namespace
    try:
        kr8s.api().version()  # else a cluster that was never made is looked for at the end
        cluster = KubeCluster(custom_cluster_spec=spec, namespace=namespace, quiet=True)
    except Exception as error:  # of the API's client, the operator and Dask, a dozen kinds
        raise ClusterError(
            f"cluster.kind kubernetes: no cluster was made ({first_line(error)}); check the "
            "kubeconfig or service account, and that the Dask operator runs"
        ) from error
    where = f"kubectl get pods --selector dask.org/cluster-name={name}"
    where += f" --namespace {namespace}" if namespace else ""
    with cluster, Client(cluster) as client:
        yield Site(
            client,
            f"{where} shows the pods",
            Scale(cluster, config).follow,
            gpu_pool=lambda: gpu_group(cluster, config),
            gpu_bytes=int(config.gpu.memory) if config.gpu else 0,
        )


class Scale:
    """The number of pods, told to the operator when it changes; lost ones it replaces by itself."""

    def __init__(self, cluster: Any, config: ClusterConfig) -> None:
        most = config.workers or 1
        self._cluster = cluster
        self._demand = Demand(config.min_workers or most, most)
        self._told = self._demand.n_workers

    def follow(self, n_tasks: int) -> None:
        """Ask for as many pods as so many tasks need."""
        wanted = self._demand.follow(n_tasks)
        if wanted != self._told:
            try:
                self._cluster.scale(wanted)
            except Exception as error:  # of the API's client; the next call tries again
                log.warning("cluster.kind kubernetes: not scaled (%s)", first_line(error))
            else:
                self._told = wanted


@contextmanager
def gpu_group(cluster: Any, config: ClusterConfig) -> Iterator[None]:
    """A worker group of one pod with the resource GPU."""
    if config.gpu is None:
        yield
        return
    cluster.add_worker_group("gpu", n_workers=1, custom_spec=worker_spec(config, config.gpu))
    try:
        yield
    finally:
        cluster.delete_worker_group("gpu")


def cluster_spec(name: str, config: ClusterConfig) -> dict[str, Any]:
    """The DaskCluster resource: one scheduler, and workers of one thread each."""
    from dask_kubernetes.operator import make_cluster_spec  # noqa: PLC0415 - an extra

    assert config.kubernetes is not None
    spec: dict[str, Any] = make_cluster_spec(
        name=name, image=config.kubernetes.image, idle_timeout=IDLE_SECONDS
    )
    pod = spec["spec"]["scheduler"]["spec"]
    _equip(pod, config, SCHEDULER_RESOURCES)
    # The image's own entry point is lakemap, and Dask has no command dask-scheduler any more.
    pod["containers"][0] |= {"command": ["dask", "scheduler"], "args": ["--host", "0.0.0.0"]}
    spec["spec"]["worker"] = worker_spec(config)
    return spec


def worker_spec(config: ClusterConfig, gpu: GpuConfig | None = None) -> dict[str, Any]:
    """A group of workers, or the one worker for training."""
    from dask_kubernetes.operator import make_worker_spec  # noqa: PLC0415 - an extra

    assert config.kubernetes is not None
    memory = int((gpu or config).memory or 0)
    resources = {"cpu": str((gpu or config).cores or 1), "memory": str(memory + WATCHER_BYTES)}
    command = ["--nthreads", "1", "--memory-limit", str(memory)]
    if gpu is not None:
        resources[gpu.resource or GPU_RESOURCE] = "1"
        command += ["--resources", "GPU=1"]
    spec: dict[str, Any] = make_worker_spec(
        image=(gpu and gpu.image) or config.kubernetes.image,
        n_workers=1 if gpu else config.min_workers or config.workers,
        worker_command=command,
    )
    _equip(spec["spec"], config, resources)
    spec["spec"]["containers"][0] |= {"command": ["dask", "worker"]}
    return spec


def _equip(pod: dict[str, Any], config: ClusterConfig, resources: dict[str, str]) -> None:
    """Give the pod its resources, environment, account, the name of its secret, and no rights."""
    assert config.kubernetes is not None
    container = pod["containers"][0]
    pod["automountServiceAccountToken"] = False  # the driver alone asks Kubernetes for anything
    pod["securityContext"] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    container["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    container["env"] = [{"name": key, "value": value} for key, value in REMOTE_ENVIRONMENT.items()]
    container["resources"] = {"requests": resources, "limits": resources}
    if config.kubernetes.env_secret is not None:
        container["envFrom"] = [{"secretRef": {"name": config.kubernetes.env_secret}}]
    if config.kubernetes.service_account is not None:
        pod["serviceAccountName"] = config.kubernetes.service_account

"""The job file's section on workers: which there are, and how each kind of cluster is asked."""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ByteSize, ConfigDict, Field
from pydantic.dataclasses import dataclass

from pipeline.errors import ConfigError

_STRICT_KEYS = ConfigDict(extra="forbid")

Count = Annotated[int, Field(ge=1)]
Memory = Annotated[ByteSize, Field(gt=0)]
Line = Annotated[str, Field(min_length=1, pattern=r"^[^\r\n]*$")]


@dataclass(frozen=True, config=_STRICT_KEYS)
class TlsConfig:
    """Files of the certificates with which driver, scheduler and workers know each other."""

    ca: str
    cert: str
    key: str


@dataclass(frozen=True, config=_STRICT_KEYS)
class SlurmConfig:
    """How a worker is submitted; what is left out is SLURM's own default."""

    queue: Line | None = None
    account: Line | None = None
    walltime: Line | None = None
    interface: Line | None = None
    directives: tuple[Line, ...] = ()
    prologue: tuple[Line, ...] = ()
    logs: str = "slurm-logs"


@dataclass(frozen=True, config=_STRICT_KEYS)
class KubernetesConfig:
    """The pods of scheduler and workers; env_secret is a Secret's name, never its contents."""

    image: Line
    namespace: Line | None = None
    service_account: Line | None = None
    env_secret: Line | None = None


@dataclass(frozen=True, config=_STRICT_KEYS)
class GpuConfig:
    """A worker for the training alone, there as long as the training.

    queue and directives are for slurm, image and resource for kubernetes.
    """

    memory: Memory
    cores: Count = 1
    queue: Line | None = None
    directives: tuple[Line, ...] | None = None
    image: Line | None = None
    resource: Line | None = None


@dataclass(frozen=True, config=_STRICT_KEYS)
class ClusterConfig:
    """Who does the work; never part of what the results depend on."""

    kind: Literal["local", "serial", "scheduler", "slurm", "kubernetes"] = "local"
    workers: Count | None = None
    min_workers: Count | None = None
    memory: Memory | None = None
    cores: Count | None = None
    address: str | None = None
    tls: TlsConfig | None = None
    slurm: SlurmConfig | None = None
    kubernetes: KubernetesConfig | None = None
    gpu: GpuConfig | None = None
    wait_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    retries: Annotated[int, Field(ge=0)] = 2


# Keys that only some kinds know, and keys that a kind cannot do without.
_OF_KINDS = {
    "min_workers": ("slurm", "kubernetes"),
    "cores": ("slurm", "kubernetes"),
    "address": ("scheduler",),
    "tls": ("scheduler", "slurm"),
    "slurm": ("slurm",),
    "kubernetes": ("kubernetes",),
    "gpu": ("slurm", "kubernetes"),
    "gpu.queue": ("slurm",),
    "gpu.directives": ("slurm",),
    "gpu.image": ("kubernetes",),
    "gpu.resource": ("kubernetes",),
}
_NEEDED = {
    "scheduler": {"address": "tcp://host:8786"},
    "slurm": {"workers": "how many jobs at most", "memory": "of one worker"},
    "kubernetes": {
        "workers": "how many pods at most",
        "memory": "of one worker",
        "kubernetes": "with the image",
    },
}


def check_cluster(cluster: ClusterConfig, where: str) -> None:
    """Refuse keys that the kind does not know, lacks, or that contradict each other."""
    given = set(_given(cluster))
    for key, kinds in _OF_KINDS.items():
        if key in given and cluster.kind not in kinds:
            raise ConfigError(
                f"{where}: cluster.{key} is for cluster.kind {' or '.join(kinds)}, which is "
                f"{cluster.kind}; leave it out"
            )
    for key, what in _NEEDED.get(cluster.kind, {}).items():
        if key not in given:
            raise ConfigError(f"{where}: cluster.kind {cluster.kind} needs cluster.{key} ({what})")
    if cluster.min_workers and cluster.min_workers > (cluster.workers or 0):
        raise ConfigError(
            f"{where}: cluster.min_workers is {cluster.min_workers}, cluster.workers "
            f"{cluster.workers}; the least number cannot be above the most"
        )
    encrypted = str(cluster.address).startswith("tls://")
    if cluster.kind == "scheduler" and encrypted != (cluster.tls is not None):
        raise ConfigError(
            f"{where}: cluster.address is {cluster.address} and cluster.tls is "
            f"{'given' if cluster.tls else 'missing'}; tls://host:8786 and cluster.tls with ca, "
            "cert and key go together"
        )


def _given(cluster: ClusterConfig) -> Iterator[str]:
    """Names of the keys that are not left out."""
    for field in fields(cluster):
        if getattr(cluster, field.name) is not None:
            yield field.name
    if cluster.gpu is not None:
        for field in fields(cluster.gpu):
            if getattr(cluster.gpu, field.name) is not None:
                yield f"gpu.{field.name}"


def place_files(cluster: ClusterConfig, base: Path) -> ClusterConfig:
    """The section with its paths made absolute; relative ones start at `base`."""
    tls, slurm = cluster.tls, cluster.slurm
    if tls is not None:
        tls = TlsConfig(str(base / tls.ca), str(base / tls.cert), str(base / tls.key))
    if cluster.kind == "slurm":
        slurm = slurm or SlurmConfig()
        slurm = replace(slurm, logs=str(base / slurm.logs))
    return replace(cluster, tls=tls, slurm=slurm)

"""Where workers come from: one file for each kind of cluster, all opened in the same way."""

from collections.abc import Iterator
from contextlib import contextmanager

from jobs.sites.kubernetes import open_kubernetes
from jobs.sites.local import connect, open_local
from jobs.sites.site import Site
from jobs.sites.slurm import open_slurm
from pipeline.cluster_config import ClusterConfig

_OPENERS = {
    "local": open_local,
    "scheduler": connect,
    "slurm": open_slurm,
    "kubernetes": open_kubernetes,
}


@contextmanager
def open_site(config: ClusterConfig) -> Iterator[Site]:
    """The cluster that the job asks for; what was started is gone afterwards."""
    with _OPENERS[config.kind](config) as site:
        yield site

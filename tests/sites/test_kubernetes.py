"""What would be sent to Kubernetes, checked against the operator's own definitions.

No cluster is needed, and none is spoken to: whether pods start is not tested here.
"""

import re
from pathlib import Path
from typing import Any

import dask_kubernetes
import pytest
import yaml
from pydantic import ByteSize

from jobs.cluster import find_offer
from jobs.sites.kubernetes import Scale, cluster_spec, gpu_group, worker_spec
from jobs.sites.site import WATCHER_BYTES
from pipeline.cluster_config import ClusterConfig, GpuConfig, KubernetesConfig
from pipeline.errors import ClusterError
from tests.data import ENVIRONMENT, make_blobs, run_process, write_job, write_parquet

CONFIG = ClusterConfig(
    kind="kubernetes",
    workers=8,
    min_workers=2,
    memory=ByteSize(4 << 30),
    cores=2,
    kubernetes=KubernetesConfig(
        "registry/lakemap:0.1.0", "maps", service_account="mapper", env_secret="store-keys"
    ),
    gpu=GpuConfig(ByteSize(32 << 30), 8, image="registry/lakemap-gpu:0.1.0"),
)
KINDS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


def definition(name: str) -> dict[str, Any]:
    """The schema of one of the operator's resources."""
    folder = Path(dask_kubernetes.__file__).parent / "operator/deployment/helm"
    crds = folder / "dask-kubernetes-operator/crds"
    versions = yaml.safe_load((crds / f"{name}.yaml").read_text())["spec"]["versions"]
    found: dict[str, Any] = versions[0]["schema"]["openAPIV3Schema"]
    return found


def faults(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """What of the value the schema does not know or allow, keys it does not name included."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{place}: {value!r}"]
    if "type" in schema and not isinstance(value, KINDS[schema["type"]]):
        return [f"{place}: {value!r} is no {schema['type']}"]
    found: list[str] = []
    if isinstance(value, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        found += [
            f"{place}.{key}: missing" for key in schema.get("required", ()) if key not in value
        ]
        for key, inner in value.items():
            if key not in known and not others:
                found.append(f"{place}.{key}: unknown")
            else:
                found += faults(inner, known.get(key, others), f"{place}.{key}")
    if isinstance(value, list):
        found += [
            f for i, v in enumerate(value) for f in faults(v, schema["items"], f"{place}.{i}")
        ]
    return found


def resource(spec: dict[str, Any]) -> dict[str, Any]:
    """The resource without what every one has and the definitions leave out."""
    return {key: value for key, value in spec.items() if key == "spec"}


@pytest.mark.parametrize("secret", [None, "store-keys"])
def test_the_cluster_fits_the_operators_definition(secret: str | None) -> None:
    assert CONFIG.kubernetes is not None
    config = ClusterConfig(
        kind="kubernetes",
        workers=8,
        memory=ByteSize(4 << 30),
        kubernetes=KubernetesConfig("image", env_secret=secret),
    )
    for each in (config, CONFIG):
        assert faults(resource(cluster_spec("map", each)), definition("daskcluster")) == []


def test_the_group_for_training_fits_the_operators_definition() -> None:
    group = {"cluster": "map", "worker": worker_spec(CONFIG, CONFIG.gpu)}
    assert faults({"spec": group}, definition("daskworkergroup")) == []


def test_the_check_itself_finds_faults() -> None:
    spec = cluster_spec("map", CONFIG)
    container = spec["spec"]["worker"]["spec"]["containers"][0]
    container |= {"imagee": "typo", "args": "one string"}
    del spec["spec"]["scheduler"]["service"]
    assert sorted(
        fault.split(": ")[0] for fault in faults(resource(spec), definition("daskcluster"))
    ) == [
        ".spec.scheduler.service",
        ".spec.worker.spec.containers.0.args",
        ".spec.worker.spec.containers.0.imagee",
    ]


def test_pods_get_what_the_job_says() -> None:
    spec = cluster_spec("map", CONFIG)["spec"]
    assert spec["worker"]["replicas"] == 2  # the least; more come with the work
    pod = spec["worker"]["spec"]
    worker, scheduler = pod["containers"][0], spec["scheduler"]["spec"]["containers"][0]
    assert pod["serviceAccountName"] == spec["scheduler"]["spec"]["serviceAccountName"] == "mapper"
    assert worker["image"] == scheduler["image"] == "registry/lakemap:0.1.0"
    assert worker["resources"]["limits"] == {
        "cpu": "2",
        "memory": str((4 << 30) + WATCHER_BYTES),
    }
    assert worker["envFrom"] == [{"secretRef": {"name": "store-keys"}}]
    assert worker["command"] == ["dask", "worker"]
    assert worker["args"][:4] == ["--nthreads", "1", "--memory-limit", str(4 << 30)]
    assert "$(DASK_WORKER_NAME)" in worker["args"]
    assert scheduler["command"] == ["dask", "scheduler"]
    assert not pod["automountServiceAccountToken"]


def test_the_worker_for_training_offers_a_gpu() -> None:
    spec = worker_spec(CONFIG, CONFIG.gpu)
    worker = spec["spec"]["containers"][0]
    assert spec["replicas"] == 1
    assert worker["image"] == "registry/lakemap-gpu:0.1.0"
    assert worker["resources"]["limits"] == {
        "cpu": "8",
        "memory": str((32 << 30) + WATCHER_BYTES),
        "nvidia.com/gpu": "1",
    }
    assert worker["args"][4:6] == ["--resources", "GPU=1"]
    assert find_offer(CONFIG) == (8, 4 << 30, 32 << 30, "a GPU worker")


class Groups:
    """Stands for a cluster, of which only the worker groups are asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def scale(self, n: int) -> None:
        self.seen.append(f"={n}")
        if n == 5:
            raise ConnectionError("not now")

    def add_worker_group(self, name: str, **_: Any) -> None:
        self.seen.append(f"+{name}")

    def delete_worker_group(self, name: str) -> None:
        self.seen.append(f"-{name}")


def test_the_operator_is_told_the_number_of_pods_when_it_changes() -> None:
    groups = Groups()
    scale = Scale(groups, CONFIG)
    for n_tasks in (0, 1, 3, 3, 5, 5, 100, 100):
        scale.follow(n_tasks)
    assert groups.seen == ["=3", "=5", "=5", "=8"]  # what failed is told again


def test_the_group_for_training_is_given_back_whatever_happens() -> None:
    groups = Groups()

    def train() -> None:
        with gpu_group(groups, CONFIG):
            assert groups.seen == ["+gpu"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        train()
    assert groups.seen == ["+gpu", "-gpu"]


def test_where_no_kubernetes_is_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KUBECONFIG", "HOME"):
        monkeypatch.setitem(ENVIRONMENT, name, str(tmp_path / "none"))
    monkeypatch.delitem(ENVIRONMENT, "KUBERNETES_SERVICE_HOST", raising=False)
    lake = write_parquet(tmp_path / "lake", *make_blobs(500))
    cluster = {"kind": "kubernetes", "workers": 1, "memory": "2GiB", "kubernetes": {"image": "a"}}
    job = write_job(tmp_path / "job.yaml", lake.path, tmp_path / "maps", cluster=cluster)
    ran = run_process("run", job)
    assert ran.code == ClusterError.exit_code
    assert re.search(
        r"^lakemap: cluster.kind kubernetes: no cluster was made \(.+\); check", ran.err
    )
    assert len(ran.err.splitlines()) == 1

"""The manifests against the schemas of Kubernetes and of Dask's operator."""

import copy
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jobs.sites.kubernetes import cluster_spec
from pipeline.errors import ConfigError, GateError, InputError
from pipeline.job_file import load_job
from tests.deploy.tools import DEPLOY, check, find_tool, read_documents

FOLDER = DEPLOY / "kubernetes"
OVERLAYS = ("on-demand", "standing", "standing-gpu")
MANIFESTS = sorted(
    path
    for path in FOLDER.glob("*/*.yaml")
    if path.name not in ("kustomization.yaml", "products.yaml")
)
CRDS = "operator/deployment/helm/dask-kubernetes-operator/crds"


def closed(schema: Any) -> Any:
    """The schema, with unknown fields refused wherever fields are listed."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(part) for name, part in schema.items()}
    open_ended = found.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(found.get("properties"), dict) and not open_ended:
        found.setdefault("additionalProperties", False)
    if found.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    return found


def dask_schema(kind: str) -> Any:
    """The operator's own schema of the kind; what every resource has is added."""
    definition = files("dask_kubernetes").joinpath(f"{CRDS}/{kind.lower()}.yaml").read_text()
    (version,) = yaml.safe_load(definition)["spec"]["versions"]
    schema = copy.deepcopy(version["schema"]["openAPIV3Schema"])
    text, words = {"type": "string"}, {"type": "object", "additionalProperties": {"type": "string"}}
    names = {"name": text, "namespace": text, "labels": words, "annotations": words}
    own = {"apiVersion": text, "kind": text, "metadata": {"type": "object", "properties": names}}
    schema["properties"] = own | schema["properties"]
    return closed(schema)


def validate(document: dict[str, Any]) -> None:
    if document["apiVersion"].startswith("kubernetes.dask.org/"):
        jsonschema.Draft202012Validator(dask_schema(document["kind"])).validate(document)
    else:
        assert kubernetes_validate.validate(document, "1.37", strict=True) == "1.37"


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod specification, wherever it is."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for part in value.values():
            yield from pods(part)
    if isinstance(value, list):
        for part in value:
            yield from pods(part)


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in read_documents(path.read_text())]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_manifests_keep_to_the_schemas(path: Path) -> None:
    found = read_documents(path.read_text())
    assert found
    for document in found:
        validate(document)


def test_the_validators_see_mistakes() -> None:
    by_kind = {document["kind"]: document for document in documents()}
    wrong = copy.deepcopy(by_kind["CronJob"])
    wrong["spec"]["concurencyPolicy"] = "Forbid"
    with pytest.raises(jsonschema.ValidationError, match="concurencyPolicy"):
        validate(wrong)
    for kind in ("DaskCluster", "DaskWorkerGroup"):
        wrong = copy.deepcopy(by_kind[kind])
        wrong["spec"]["worker"]["spec"]["containers"][0]["memory"] = "4Gi"
        with pytest.raises(jsonschema.ValidationError, match="memory"):
            validate(wrong)
    wrong = copy.deepcopy(by_kind["DaskAutoscaler"])
    wrong["spec"]["maximum"] = "many"
    with pytest.raises(jsonschema.ValidationError, match="many"):
        validate(wrong)


@pytest.mark.parametrize("name", OVERLAYS)
def test_kustomize_puts_them_together(name: str) -> None:
    built = read_documents(check(find_tool("kubectl"), "kustomize", FOLDER / name))
    for document in built:
        validate(document)
        assert document["metadata"]["namespace"] == "lakemap"
    by_kind = {document["kind"]: document for document in built}
    (pod,) = pods(by_kind["CronJob"])
    assert pod["volumes"][0]["configMap"]["name"] == by_kind["ConfigMap"]["metadata"]["name"]
    assert pod["automountServiceAccountToken"] == (name == "on-demand")
    images = {box["image"] for document in built for p in pods(document) for box in p["containers"]}
    gpu = {"lakemap:0.1.0-gpu"} if name == "standing-gpu" else set()
    assert images == {"lakemap:0.1.0"} | gpu
    assert ("Role" in by_kind) == (name == "on-demand")


def test_kustomizations_name_files_that_are_there() -> None:
    for path in FOLDER.glob("*/kustomization.yaml"):
        content = yaml.safe_load(path.read_text())
        names = list(content["resources"])
        for generator in content.get("configMapGenerator", []):
            names += generator["files"]
        assert all((path.parent / name).exists() for name in names)
        missing = {p.name for p in path.parent.iterdir()} - {path.name, *names}
        assert not missing


def test_pods_have_few_rights_and_bounds() -> None:
    found = [pod for document in documents() for pod in pods(document)]
    assert len(found) == 4
    for pod in found:
        assert pod["serviceAccountName"] == "lakemap"
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys()
            assert resources["limits"]["memory"]
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            assert "/tmp" in mounts


def test_secrets_are_named_and_nothing_more() -> None:
    assert not any(document["kind"] == "Secret" for document in documents())
    for pod in (pod for document in documents() for pod in pods(document)):
        for container in pod["containers"]:
            names = [variable["name"] for variable in container.get("env", [])]
            assert not [name for name in names if re.search("KEY|SECRET|TOKEN|PASSWORD", name)]


def test_codes_that_another_attempt_cannot_help_end_the_job() -> None:
    (cron,) = (document for document in documents() if document["kind"] == "CronJob")
    rules = cron["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    final = {ConfigError.exit_code, InputError.exit_code, GateError.exit_code}
    assert rules[0]["action"] == "FailJob"
    assert set(rules[0]["onExitCodes"]["values"]) == final
    (pod,) = pods(cron)
    assert rules[0]["onExitCodes"]["containerName"] == pod["containers"][0]["name"]


def test_the_scheduler_of_the_job_file_is_the_one_there_is() -> None:
    job = load_job(FOLDER / "standing/products.yaml")
    (cluster,) = (document for document in documents() if document["kind"] == "DaskCluster")
    assert job.cluster.address == f"tcp://{cluster['metadata']['name']}-scheduler.lakemap.svc:8786"
    for document in documents():
        if document["kind"] in ("DaskWorkerGroup", "DaskAutoscaler"):
            assert document["spec"]["cluster"] == cluster["metadata"]["name"]


def test_the_driver_makes_what_its_role_and_account_are_for() -> None:
    job = load_job(FOLDER / "on-demand/products.yaml")
    assert job.cluster.kubernetes is not None
    accounts = {document["metadata"]["name"] for document in documents()
                if document["kind"] == "ServiceAccount"}  # fmt: skip
    assert {job.cluster.kubernetes.service_account} == accounts
    assert job.cluster.kubernetes.namespace == "lakemap"
    validate(cluster_spec("lakemap-1a2b", job.cluster))


def test_dask_knows_the_flags_it_is_given() -> None:
    dask = find_tool("dask")
    commands = [
        container["command"]
        for document in documents()
        for pod in pods(document)
        for container in pod["containers"]
        if "command" in container
    ]
    assert len(commands) == 3
    helps = {word: check(dask, word, "--help") for word in ("scheduler", "worker")}
    for program, word, *flags in commands:
        assert program == "dask"
        for flag in flags:
            assert re.search(rf"{flag.split('=')[0]}\b", helps[word]), flag

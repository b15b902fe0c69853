from pathlib import Path

import pytest
from pydantic import ByteSize

from pipeline.cluster_config import GpuConfig, SlurmConfig, TlsConfig
from pipeline.config import to_yaml
from pipeline.job_file import load_job
from tests.test_config import SMALLEST, load, refusal

SLURM = "cluster: {kind: slurm, workers: 8, memory: 4GiB}"
KUBERNETES = "cluster: {kind: kubernetes, workers: 8, memory: 4GiB, kubernetes: {image: lakemap}}"
TLS = "tls: {ca: a, cert: b, key: c}"


def test_a_whole_section_is_read(tmp_path: Path) -> None:
    text = """
cluster:
  kind: slurm
  workers: 8
  min_workers: 2
  memory: 4GiB
  cores: 2
  tls: {ca: certs/ca.pem, cert: /etc/cert.pem, key: certs/key.pem}
  slurm:
    {queue: long, account: maps, walltime: '12:30:00', interface: ib0, directives: [--exclusive],
    prologue: [module load python]}
  gpu: {memory: 32GiB, cores: 8, queue: gpus, directives: ['--gres=gpu:a100:1']}
"""
    cluster = load(tmp_path, SMALLEST + text).cluster
    assert (cluster.workers, cluster.min_workers, cluster.cores) == (8, 2, 2)
    assert cluster.tls == TlsConfig(
        f"{tmp_path}/certs/ca.pem", "/etc/cert.pem", f"{tmp_path}/certs/key.pem"
    )
    assert cluster.slurm == SlurmConfig(
        "long", "maps", "12:30:00", "ib0", ("--exclusive",), ("module load python",),
        f"{tmp_path}/slurm-logs",
    )  # fmt: skip
    assert cluster.gpu == GpuConfig(
        memory=ByteSize(32 << 30), cores=8, queue="gpus", directives=("--gres=gpu:a100:1",)
    )


@pytest.mark.parametrize("section", ["{}", SLURM, KUBERNETES])
def test_a_section_survives_the_way_through_a_file(tmp_path: Path, section: str) -> None:
    job = load(tmp_path, SMALLEST + section if ":" in section else SMALLEST)
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(job))
    assert load_job(path) == job


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("cluster: {address: 'tcp://h:1'}", "cluster.address is for cluster.kind scheduler, which"),
        ("cluster: {min_workers: 1}", "cluster.min_workers is for cluster.kind slurm or kubernet"),
        (SLURM.replace("8", "8, slurm: {}, kubernetes: {image: a}"), "cluster.kubernetes is for"),
        (KUBERNETES.replace("8", f"8, {TLS}"), "cluster.tls is for cluster.kind scheduler or sl"),
        (SLURM.replace("8", "8, gpu: {memory: 1GiB, image: a}"), "cluster.gpu.image is for clus"),
        ("cluster: {kind: serial, gpu: {memory: 1GiB}}", "cluster.gpu is for cluster.kind slurm"),
        ("cluster: {kind: slurm, memory: 1GiB}", "cluster.kind slurm needs cluster.workers (how"),
        ("cluster: {kind: slurm, workers: 1}", "cluster.kind slurm needs cluster.memory (of one"),
        (KUBERNETES.replace("{image: lakemap}", "null"), "cluster.kind kubernetes needs cluster.k"),
        ("cluster: {kind: scheduler}", "cluster.kind scheduler needs cluster.address (tcp://host"),
        (SLURM.replace("8", "2, min_workers: 3"), "cluster.min_workers is 3, cluster.workers 2; t"),
        (
            "cluster: {kind: scheduler, address: 'tls://h:1'}",
            "cluster.address is tls://h:1 and cluster.tls is missing; tls://host:8786 and cluste",
        ),
        (
            f"cluster: {{kind: scheduler, address: 'tcp://h:1', {TLS}}}",
            "cluster.address is tcp://h:1 and cluster.tls is given; tls://",
        ),
        ("cluster: {tls: {ca: a}}", "cluster.tls.cert is missing; add it"),
        (SLURM.replace("8", "8, slurm: {que: a}"), "unknown key cluster.slurm.que; did you mean c"),
        (SLURM.replace("8", "8, slurm: [a]"), "cluster.slurm is a list; it must be a section of"),
        (SLURM.replace("8", "8, slurm: {walltime: 12:30:00}"), "cluster.slurm.walltime is 45000;"),
        (SLURM.replace("8", '8, slurm: {queue: "a\\nb"}'), "cluster.slurm.queue is 'a\\nb'; it mu"),
        ("cluster: {wait_seconds: 0}", "cluster.wait_seconds is 0; it must be greater than 0"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path: Path, section: str, line: str) -> None:
    assert refusal(tmp_path, SMALLEST + section).startswith(f": {line}")


def test_another_kind_can_be_laid_over_the_whole_section(tmp_path: Path) -> None:
    assert refusal(tmp_path, SMALLEST + KUBERNETES, "cluster.kind=serial")
    assert load(tmp_path, SMALLEST + KUBERNETES, "cluster={kind: serial}").cluster.workers is None

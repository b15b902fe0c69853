"""Job scripts and refusals; whole runs through SLURM are in tests/slurm."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import dask
import pytest
from dask_jobqueue.slurm import SLURMJob
from pydantic import ByteSize

from jobs.cluster import find_offer, open_runner
from jobs.sites.slurm import job_options
from pipeline.cluster_config import ClusterConfig, GpuConfig, SlurmConfig
from pipeline.errors import ClusterError, ConfigError


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    slurm = SlurmConfig(
        "long", "maps", "12:30:00", None, ("--nice=7",), ("module load cuda",), f"{tmp_path}/logs"
    )
    return ClusterConfig(
        kind="slurm", workers=8, memory=ByteSize(4 << 30), cores=2, slurm=slurm,
        gpu=GpuConfig(ByteSize(32 << 30), 8, "gpus"),
    )  # fmt: skip


def script(config: ClusterConfig, gpu: GpuConfig | None = None) -> list[str]:
    with dask.config.set({"jobqueue.slurm.walltime": None}):
        job = SLURMJob("tcp://host:1", "worker", **job_options(config, gpu))
    return list(job.job_script().splitlines())


def test_a_worker_asks_for_what_the_job_says(config: ClusterConfig) -> None:
    lines = script(config)
    directives = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    expected = {"-J lakemap", "-p long", "-A maps", "-n 1", "--cpus-per-task=2", "--mem=4352M"}
    assert directives >= expected | {"-t 12:30:00", "--nice=7"}
    assert lines[-2] == "module load cuda"
    assert "--nthreads 1 --memory-limit 4.00GiB" in lines[-1]
    assert "GPU" not in lines[-1]


def test_what_is_left_out_is_slurms_own_default(config: ClusterConfig) -> None:
    bare = replace(config, slurm=SlurmConfig(logs=config.slurm.logs if config.slurm else ""))
    options = {line.split()[1] for line in script(bare) if line.startswith("#SBATCH")}
    assert options == {"-J", "-e", "-o", "-n", "--cpus-per-task=2", "--mem=4352M"}


def test_the_worker_for_training_offers_a_gpu(config: ClusterConfig) -> None:
    lines = script(config, config.gpu)
    directives = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    expected = {"-J lakemap-gpu", "-p gpus", "-A maps", "--cpus-per-task=8", "--mem=33024M"}
    assert directives >= expected | {"--nice=7", "--gres=gpu:1"}
    assert "--resources GPU=1" in lines[-1]
    assert config.gpu is not None
    own = script(config, replace(config.gpu, queue=None, directives=("--gpus=a100:1",)))
    assert {"#SBATCH -p long", "#SBATCH --gpus=a100:1"} <= set(own)
    assert "#SBATCH --gres=gpu:1" not in own
    assert find_offer(config) == (8, 4 << 30, 32 << 30, "a GPU worker")


def test_workers_of_a_job_are_set_as_local_ones_are(config: ClusterConfig) -> None:
    exports = [line for line in script(config) if line.startswith("export ")]
    code = (
        "import dask, distributed.nanny as n;"
        "print(sorted(n._get_env_variables('distributed.nanny.pre-spawn-environ').items()));"
        "print(dask.config.get('distributed.worker.memory.terminate'))"
    )
    done = subprocess.run(
        ["bash", "-c", "\n".join([*exports, shlex.join([sys.executable, "-c", code])])],
        capture_output=True,
        text=True,
        check=True,
    )
    variables, share = done.stdout.splitlines()
    assert "('GOMP_SPINCOUNT', '10000')" in variables
    assert "MALLOC_TRIM_THRESHOLD_" not in variables
    assert share == "0.98"


def test_without_sbatch_one_line_says_so(
    config: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(ClusterError, match=r"^cluster.kind slurm: sbatch is not found; start"),
        open_runner(config, pytest.fail),
    ):
        pass


@pytest.mark.parametrize(("kind", "module"), [("slurm", "jobqueue"), ("kubernetes", "kubernetes")])
def test_without_the_extra_one_line_says_what_to_install(
    config: ClusterConfig, kind: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (f"dask_{module}", f"dask_{module}.operator"):
        monkeypatch.setitem(sys.modules, name, None)
    match = rf"^cluster.kind {kind} needs dask-{module}; pip install 'lakemap\[{kind}\]'$"
    other = ClusterConfig(kind=kind, workers=1, memory=ByteSize(1 << 30))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=match), open_runner(other, pytest.fail):
        pass

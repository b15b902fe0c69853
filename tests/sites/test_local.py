"""A scheduler with TLS in a process of its own: who has its certificates gets in, nobody else."""

import gc
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from jobs.cluster import open_runner
from jobs.sites import local
from jobs.sites import tls as tls_files
from pipeline.cluster_config import ClusterConfig, TlsConfig
from pipeline.errors import ClusterError, ConfigError
from tests.data import call_cli, make_blobs, write_job, write_parquet
from tests.faults import Script
from tests.processes import Farm, make_certificates, run_farm
from tests.test_runner import run_all

Capture = pytest.CaptureFixture[str]


# Dask forgets the socket of a handshake that is refused half way.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(autouse=True)
def forgotten_sockets() -> Iterator[None]:
    """Close them before a test of another module, where they would be warned of."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def tls(folder: Path) -> TlsConfig:
    return make_certificates(folder / "ours")


@pytest.fixture(scope="module")
def foreign(folder: Path) -> TlsConfig:
    return make_certificates(folder / "foreign")


@pytest.fixture(scope="module")
def farm(folder: Path, tls: TlsConfig) -> Iterator[Farm]:
    with run_farm(folder / "farm", tls) as farm:
        farm.add_worker()
        yield farm


def test_a_job_runs_over_tls(
    farm: Farm, tls: TlsConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lake = write_parquet(folder / "lake", *make_blobs(1000))
    files = {key: Path(path).relative_to(folder) for key, path in asdict(tls).items()}
    cluster = {
        "kind": "scheduler",
        "address": farm.address,
        "tls": {key: str(path) for key, path in files.items()},  # beside the job file
    }
    job = write_job(folder / "job.yaml", lake.path, folder / "maps", cluster=cluster)
    ran = call_cli(capsys, "run", job)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("1,000 rows mapped")

    without = "cluster={kind: scheduler, address: " + farm.address.replace("tls", "tcp") + "}"
    ran = call_cli(capsys, "run", job, "--set", "train.seed=1", "--set", without)
    assert ran.code == ClusterError.exit_code
    assert re.search(r"^lakemap: tcp://\S+: whoever listens there hangs up; a sch", ran.err), ran
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("ours", [(), ("ca",), ("cert", "key")], ids=str)
def test_certificates_of_another_authority_are_refused(
    farm: Farm, tls: TlsConfig, foreign: TlsConfig, ours: tuple[str, ...]
) -> None:
    mixed = replace(foreign, **{name: getattr(tls, name) for name in ours})
    config = ClusterConfig(kind="scheduler", address=farm.address, tls=mixed)
    match = rf"^{farm.address}: no connection with these certificates \(.+\); check cluster.tls"
    with pytest.raises(ClusterError, match=match), open_runner(config, lambda _: None):
        pass


def test_a_scheduler_without_tls_is_no_scheduler_for_a_job_with_it(
    tls: TlsConfig, tmp_path: Path
) -> None:
    # On a busy machine it may hang up before its answer is read.
    said = r"these certificates \((WRONG_VERSION_NUMBER|hung up)\)"
    with run_farm(tmp_path / "plain") as plain:
        address = plain.address.replace("tcp", "tls")
        config = ClusterConfig(kind="scheduler", address=address, tls=tls)
        with (
            pytest.raises(ClusterError, match=said),
            open_runner(config, lambda _: None),
        ):
            pass


def test_tls_files_that_cannot_be_used_are_named(
    tls: TlsConfig, foreign: TlsConfig, tmp_path: Path
) -> None:
    missing = replace(tls, cert=f"{tmp_path}/none.pem")
    with pytest.raises(ConfigError, match=r"^cluster.tls.cert: \S+/none.pem is not there; give a"):
        tls_files.make_security(missing)
    for wrong in (
        replace(tls, key=foreign.key),
        replace(tls, ca=tls.key),
        replace(tls, cert=tls.key),
    ):
        with pytest.raises(
            ConfigError, match=r"^cluster.tls: \S+, \S+ and \S+ cannot be used"
        ) as caught:
            tls_files.make_security(wrong)
        assert "PRIVATE KEY" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://127.0.0.1:9", "Connection refused|Timed out"),
        ("tcp://no-such-host.invalid:8786", "not known|resolution|Timed out"),
        ("nonsense://host:1", "unknown address scheme"),
        ("tcp://127.0.0.1", "missing port"),
    ],
)
def test_an_address_without_a_scheduler_is_named(
    address: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "CONNECT_SECONDS", 1)  # twenty are long in a test
    config = ClusterConfig(kind="scheduler", address=address)
    match = f"^{address}: no scheduler there .*({why}).*; check cluster.address$"
    with (
        pytest.raises(ClusterError, match=match) as caught,
        open_runner(config, lambda _: None),
    ):
        pass
    assert len(str(caught.value).splitlines()) == 1


def test_workers_over_tls_do_what_others_do(farm: Farm, tls: TlsConfig, tmp_path: Path) -> None:
    config = ClusterConfig(kind="scheduler", address=farm.address, tls=tls)
    with open_runner(config, lambda _: None) as runner:
        assert sorted(run_all(runner, Script(tmp_path))) == list(range(10))

"""A disk that is full half way: one clear line, nothing published, and the same command goes on."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.stores import Folder
from pipeline.upkeep import verify
from tests.data import LABELLED, call_cli, make_blobs, write_job, write_parquet

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, 300 KiB large."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = mount("-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk))
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def mount(*arguments: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return subprocess.CompletedProcess([], 1, "", "no mount command")


def test_a_run_goes_on_when_space_is_made(
    small_disk: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = write_parquet(tmp_path / "lake", *make_blobs(1000), n_bad=2)
    job = write_job(tmp_path / "job.yaml", lake.path, small_disk / "maps", input=LABELLED)
    monkeypatch.setattr("jobs.flow.free_bytes", lambda _: None)  # or it would not even start
    ran = call_cli(capsys, "run", job)
    assert ran.code == 4, ran.err
    line = ran.err.splitlines()[-1]
    assert "No space left on device" in line
    assert str(small_disk / "maps") in line
    assert "check path, rights and space" in line
    assert not (small_disk / "maps/CURRENT").exists()
    kept = commits(small_disk)
    assert kept

    assert mount("-o", "remount,size=100m", str(small_disk)).returncode == 0
    again = call_cli(capsys, "run", job)
    assert again.code == 0, again.err
    assert commits(small_disk).items() >= kept.items()
    assert "998 rows mapped" in again.out
    assert verify(Folder(str(small_disk / "maps"))).damaged == ()


def commits(disk: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in disk.glob("maps/stores/*/*/commits/*")}

"""The crontab: cron's own check where it is installed, and its lines run by a shell."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.tools import DEPLOY, check, find_tool

CRONTAB = DEPLOY / "cron/crontab"
FIELD = r"(\*|\d+)"


def entries() -> list[str]:
    lines = CRONTAB.read_text().splitlines()
    return [line for line in lines if re.match(r"[\d*]", line)]


def commands() -> list[str]:
    return [line.split(None, 5)[5] for line in entries()]


def test_cron_itself_accepts_it() -> None:
    crontab = find_tool("crontab")
    said = subprocess.run([crontab, "-h"], capture_output=True, text=True, check=False)
    flag = "-T" if "-T" in said.stdout + said.stderr else "-n"  # cronie's, and Debian's
    check(crontab, flag, CRONTAB)


def test_every_line_has_five_fields_and_a_command() -> None:
    assert len(entries()) == 3
    for line in entries():
        minute, hour, *rest = line.split(None, 5)[:5]
        assert int(minute) < 60
        assert int(hour) < 24
        assert all(re.fullmatch(FIELD, field) for field in rest)
        assert "%" not in line.replace(r"\%", "")  # cron takes it for the end of the line


def run_line(command: str, folder: Path, code: int) -> str:
    """What cron would mail after the command, with a lakemap that ends with the code."""
    script = folder / "bin/lakemap"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\necho "$@"\necho "an error" >&2\nexit {code}\n')
    script.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("/srv/maps", str(folder))],
        env={"PATH": f"{script.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")
@pytest.mark.parametrize("command", commands())
def test_only_trouble_is_mailed(command: str, tmp_path: Path) -> None:
    assert run_line(command, tmp_path, 0) == ""
    (called,) = re.findall(r"lakemap (\w+ products\.yaml[^>]*?) >>", command)
    assert (tmp_path / "products.log").read_text() == f"{called}\nan error\n"
    mail = run_line(command, tmp_path, 3)
    assert ": exit 3\n" in mail
    assert mail.endswith(f"{called}\nan error\n")


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not installed")
def test_two_at_once_do_not_run(tmp_path: Path) -> None:
    lock = tmp_path / "products.lock"
    with subprocess.Popen(["flock", "--no-fork", str(lock), "sleep", "30"]) as first:
        while not lock.exists():
            assert first.poll() is None
        for _ in range(100):
            mail = run_line(commands()[0], tmp_path, 0)
            if mail:
                break
        first.kill()
    assert ": exit 75\n" in mail

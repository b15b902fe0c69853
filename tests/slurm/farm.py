"""A real SLURM on this host: munged, slurmctld and three slurmd, of the user who runs the tests."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import NamedTuple

import pytest

PATIENCE_SECONDS = 30.0
NODES = ("n1", "n2", "n3")


class SlurmJob(NamedTuple):
    """A line of squeue."""

    number: str
    name: str
    state: str
    node: str


class Farm(NamedTuple):
    """The running daemons: the environment in which SLURM's commands find them."""

    folder: Path
    environment: Mapping[str, str]

    def call(self, *command: str) -> str:
        """What one of SLURM's commands says."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=30
        )
        return done.stdout

    def jobs(self) -> list[SlurmJob]:
        """Jobs that are waiting, running or ending."""
        lines = self.call("squeue", "--noheader", "--format=%i|%j|%T|%N").splitlines()
        return [SlurmJob(*line.split("|")) for line in lines]

    def logs(self) -> str:
        """What the daemons wrote, for a test that fails."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))


@contextmanager
def run_farm(folder: Path) -> Iterator[Farm]:
    """The daemons, up and with all nodes idle; gone afterwards."""
    programs = {name: _find(name) for name in ("munged", "slurmctld", "slurmd")}
    folder.mkdir()
    _write_settings(folder)
    environment = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf"}
    munged = [programs["munged"], "--foreground", "--force", "--num-threads=2"]
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
    munged += [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
    commands = [munged, [programs["slurmctld"], "-D"]]
    commands += [[programs["slurmd"], "-D", "-N", node] for node in NODES]
    running: list[subprocess.Popen[bytes]] = []
    farm = Farm(folder, environment)
    try:
        for command in commands:
            name = "-".join([Path(command[0]).name, *command[3:4]])
            with (folder / f"{name}.said.log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        command, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )
            if command is munged:
                _wait_for(farm, (folder / "munge.socket").exists)
        _wait_for(farm, lambda: _n_idle(farm) == len(NODES))
        yield farm
        farm.call("scancel", "--user", getpass.getuser())
        _wait_for(farm, lambda: not farm.jobs())
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _find(program: str) -> str:
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"{program} is not installed; make test-slurm installs it where it can")
    return found


def _write_settings(folder: Path) -> None:
    ports = {f"port{index}": str(port) for index, port in enumerate(_free_ports(1 + len(NODES)))}
    text = (Path(__file__).parent / "slurm.conf").read_text()
    values = {"folder": str(folder), "user": getpass.getuser(), **ports}
    (folder / "slurm.conf").write_text(Template(text).substitute(values))
    (folder / "gres.conf").write_text("NodeName=n3 Name=gpu Count=1 File=/dev/null\n")
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    for name in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _n_idle(farm: Farm) -> int:
    try:
        nodes = farm.call("sinfo", "--noheader", "--Node", "--format=%N %t").splitlines()
    except subprocess.CalledProcessError:  # slurmctld is not up yet
        return 0
    return sum(line.split()[1] == "idle" for line in set(nodes))


def _wait_for(farm: Farm, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain:\n{farm.logs()}"
        time.sleep(0.1)

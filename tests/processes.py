"""Schedulers and workers of Dask in processes of their own, as a site starts them; certificates."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.cluster_config import TlsConfig

PATIENCE_SECONDS = 60.0
PROGRAMS = {"scheduler": "distributed.cli.dask_scheduler", "worker": "distributed.cli.dask_worker"}
SUBJECT = "/CN=lakemap"


class Farm:
    """A scheduler on loopback and the workers that were started for it."""

    def __init__(self, folder: Path, tls: TlsConfig | None = None) -> None:
        self._folder, self._tls = folder, tls
        self._running: list[subprocess.Popen[bytes]] = []
        place = folder / "scheduler.address"
        protocol = "tls" if tls else "tcp"
        options = ("--host", "127.0.0.1", "--port", "0", "--protocol", protocol, "--no-dashboard")
        self.scheduler = self._start("scheduler", *options, "--scheduler-file", place)
        self.address = _read_address(place, self.scheduler)

    def add_worker(
        self, *options: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """One more worker of one thread, in a process without a nanny to start it again."""
        plain = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1")
        return self._start("worker", self.address, *plain, *options, environment=environment)

    def _start(
        self, program: str, *options: str | Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        tls = self._tls
        files = {"ca-file": tls.ca, "cert": tls.cert, "key": tls.key} if tls else {}
        for name, path in files.items():
            options += (f"--tls-{name}", path)
        command = [sys.executable, "-m", PROGRAMS[program], *map(str, options)]
        with (self._folder / f"{program}-{len(self._running)}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | (environment or {}),
            )
        self._running.append(process)
        return process

    def close(self) -> None:
        """End everything, the last first."""
        for process in reversed(self._running):
            process.send_signal(signal.SIGKILL)
            process.wait()


@contextmanager
def run_farm(folder: Path, tls: TlsConfig | None = None) -> Iterator[Farm]:
    """A scheduler that is gone afterwards, with its workers."""
    folder.mkdir()
    farm = Farm(folder, tls)
    try:
        yield farm
    finally:
        farm.close()


def _read_address(place: Path, scheduler: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (place.exists() and place.read_text().endswith("}")):
        assert scheduler.poll() is None, "the scheduler has ended"
        assert time.monotonic() < deadline, "no scheduler"
        time.sleep(0.05)
    return str(json.loads(place.read_text())["address"])


def make_certificates(folder: Path) -> TlsConfig:
    """A certificate, its key, and the authority that signed it, which signs no other."""
    folder.mkdir()
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    new += ["-nodes", "-days", "2", "-subj"]
    ca, ca_key, cert, key = (folder / name for name in ("ca.pem", "ca.key", "cert.pem", "cert.key"))
    commands: list[list[str | Path]] = [
        [*new, f"{SUBJECT}-ca", "-keyout", ca_key, "-out", ca],
        [*new, SUBJECT, "-CA", ca, "-CAkey", ca_key, "-keyout", key, "-out", cert],
    ]
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    return TlsConfig(str(ca), str(cert), str(key))

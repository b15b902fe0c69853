"""A real S3 server for tests: SeaweedFS, started on loopback, ended when the test session is.

SeaweedFS because it comes as one wheel, checks signatures and permissions, and honours the
conditional puts on which the ledger rests.
"""

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUCKET = "lakemap"
OWNER = {"AWS_ACCESS_KEY_ID": "owner", "AWS_SECRET_ACCESS_KEY": "owner-secret"}
READER = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "reader-secret"}
STRANGER = {"AWS_ACCESS_KEY_ID": "stranger", "AWS_SECRET_ACCESS_KEY": "stranger-secret"}
RIGHTS = {"owner": ["Read", "Write", "List"], "reader": ["Read", "List"]}  # an Admin makes buckets
START_SECONDS = 60


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    endpoint: str

    def environment(self, keys: dict[str, str]) -> dict[str, str]:
        """What a process needs to reach it with these keys."""
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1", **keys}


@contextmanager
def run_server(folder: Path) -> Iterator[S3Server]:
    """The server, with one empty bucket."""
    ports = _free_ports(4)
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [_identity(name) for name in RIGHTS]}))
    master, volume, filer, s3 = ports
    command = [
        _find_weed(),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-s3.port={s3}",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=256",
        "-volume.max=40",
        "-filer",
        "-s3",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={config}",
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _make_bucket(filer, process, folder / "server.log")
        yield S3Server(f"http://127.0.0.1:{s3}")
    finally:
        process.kill()
        process.wait()


def _identity(name: str) -> dict[str, object]:
    keys = {"accessKey": name, "secretKey": f"{name}-secret"}
    return {"name": name, "credentials": [keys], "actions": RIGHTS[name]}


def _find_weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found, "weed is not installed; make install brings it"
    return found


def _free_ports(count: int) -> list[int]:
    """Ports whose partners 10,000 above, which the server uses too, are free as well."""
    found: list[int] = []
    for port in range(20_000, 50_000, 7):
        if _is_free(port) and _is_free(port + 10_000):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _make_bucket(filer: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the server answers; a folder under /buckets is a bucket."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", filer, timeout=5)
        try:
            connection.request("POST", f"/buckets/{BUCKET}/")
            if connection.getresponse().status < 300:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise RuntimeError(f"the S3 server did not start:\n{log.read_text()[-2000:]}")

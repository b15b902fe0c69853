"""The whole pipeline on a real S3 server: its lake, its stores, its map, and what can go wrong."""

import http.client
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

from pipeline import history
from pipeline.errors import StoreError
from pipeline.remote import connect, s3_settings
from pipeline.stores import Folder, decode_table
from tests.data import ENVIRONMENT, LABELLED, Ran, call_cli, make_blobs, write_job, write_parquet
from tests.s3 import BUCKET, READER, STRANGER, S3Server

Capture = pytest.CaptureFixture[str]
PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def local_lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lake") / "lake"
    return write_parquet(folder, *make_blobs(1200), n_files=5, n_bad=4, held_out_every=8).path


@pytest.fixture
def lake(local_lake: Path, bucket: Folder) -> Folder:
    """The lake in the bucket."""
    target = bucket.join("lake")
    for path in local_lake.iterdir():
        target.put(path.name, path.read_bytes())
    return target


def maps_of(output: Folder) -> list[bytes]:
    """The bytes of the published map's files, in order."""
    (manifest,) = (key for key in output.list("runs") if key.endswith("/manifest.json"))
    run = output.join(manifest.rpartition("/")[0])
    return [run.get(key) for key in sorted(run.list("map"))]


def test_the_map_of_a_bucket_is_that_of_the_disk(
    lake: Folder, local_lake: Path, bucket: Folder, tmp_path: Path, capsys: Capture
) -> None:
    job = write_job(tmp_path / "job.yaml", lake.url, bucket.join("maps").url, input=LABELLED)
    ran = call_cli(capsys, "run", job)
    assert ran.code == 0, ran.err
    assert "1,196 rows mapped, 4 quarantined" in ran.out
    assert f"report:  {bucket.url}/maps/runs/" in ran.out
    again = call_cli(capsys, "run", job)
    assert "nothing to do" in again.out
    assert "done" in call_cli(capsys, "status", job).out
    disk = write_job(tmp_path / "disk.yaml", local_lake, tmp_path / "maps", input=LABELLED)
    assert call_cli(capsys, "run", disk).code == 0
    assert maps_of(bucket.join("maps")) == maps_of(Folder(str(tmp_path / "maps")))
    assert not [key for key in bucket.join("maps").list() if ".probe" in key]


def test_a_refresh_in_the_bucket(
    lake: Folder, bucket: Folder, tmp_path: Path, capsys: Capture
) -> None:
    output = bucket.join("maps")
    job = write_job(tmp_path / "job.yaml", lake.url, output.url, input=LABELLED, train={"steps": 4})
    flags = ("--set", "gates.trustworthiness=null", "--json")
    first = call_cli(capsys, "refresh", job, *flags)
    assert first.code == 0, first.err
    before = set(output.entries())
    assert json.loads(call_cli(capsys, "refresh", job, *flags).out)["changed"] is False
    assert set(output.entries()) == before

    lake.put("part-9.parquet", lake.get("part-0.parquet"))
    lake.delete("part-4.parquet")
    ran = call_cli(capsys, "refresh", job, *flags)
    assert ran.code == 0, ran.err
    metrics = json.loads(ran.out)["metrics"]
    assert (metrics["files_new"], metrics["files_removed"], metrics["files_kept"]) == (1, 1, 4)
    assert (metrics["rows_new"], metrics["rows_removed"]) == (240, 240)
    run = Folder(json.loads(ran.out)["folder"])
    table = pa.concat_tables([decode_table(run.get(key)) for key in run.list("map")])
    assert table.num_rows == metrics["rows_mapped"]
    assert call_cli(capsys, "rollback", job).code == 0
    assert history.current_run(output) == json.loads(first.out)["run"]
    assert output.list("leases") == {}
    assert call_cli(capsys, "verify", job).code == 0


@pytest.mark.slow
def test_a_killed_run_goes_on_in_the_bucket(
    lake: Folder, bucket: Folder, tmp_path: Path, capsys: Capture
) -> None:
    cluster = {"kind": "local", "workers": 2}
    names = ("undisturbed", "killed")
    outputs = [bucket.join(name) for name in names]
    jobs = [
        write_job(tmp_path / f"{name}.yaml", lake.url, output.url, input=LABELLED, cluster=cluster)
        for name, output in zip(names, outputs, strict=True)
    ]
    assert run_to_end(jobs[0]).code == 0
    for stage, n_commits in (("ingest", 2), ("embed", 2)):
        kill_at(jobs[1], outputs[1], f"stores/{stage}", n_commits)
    kept = commits(outputs[1])
    ended = run_to_end(jobs[1])
    assert ended.code == 0, ended.err
    assert "ingest: done before, nothing to do" in ended.err
    now = commits(outputs[1])
    assert {key: now[key] for key in kept} == kept
    assert maps_of(outputs[0]) == maps_of(outputs[1])


def commits(output: Folder) -> dict[str, bytes]:
    return {key: output.get(key) for key in output.list("stores") if "/commits/" in key}


def run_to_end(job: Path) -> Ran:
    command = [sys.executable, "-m", "jobs.cli", "run", str(job)]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment()
    )
    return Ran(found.returncode, found.stdout, found.stderr)


def kill_at(job: Path, output: Folder, prefix: str, n_commits: int) -> None:
    """Start the job and kill its whole session when the stage has so many commits."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "run", str(job)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment(),
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len([key for key in output.list(prefix) if "/commits/" in key]) < n_commits:
        assert process.poll() is None, "ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment() -> dict[str, str]:
    """This process's environment now, the server's address and keys included."""
    return {**ENVIRONMENT, **{k: v for k, v in os.environ.items() if k.startswith("AWS_")}}


@pytest.mark.parametrize(
    ("keys", "what"),
    [(STRANGER, "does not know these credentials"), (READER, "permission denied")],
)
def test_keys_without_rights_are_one_line(
    keys: dict[str, str],
    what: str,
    lake: Folder,
    bucket: Folder,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    connect.cache_clear()
    job = write_job(tmp_path / "job.yaml", lake.url, bucket.join("maps").url, input=LABELLED)
    ran = call_cli(capsys, "run", job)
    assert ran.code in (2, 4)
    (line,) = ran.err.splitlines()
    assert what in line
    assert bucket.url in line
    assert keys["AWS_SECRET_ACCESS_KEY"] not in line


def test_a_lake_in_no_bucket_is_named(bucket: Folder, tmp_path: Path, capsys: Capture) -> None:
    job = write_job(tmp_path / "job.yaml", "s3://nowhere/x", bucket.join("maps").url)
    ran = call_cli(capsys, "run", job)
    assert ran.code in (2, 4)
    (line,) = ran.err.splitlines()
    assert "s3://nowhere/x" in line
    assert "no such bucket" in line


class Bucketless(http.server.BaseHTTPRequestHandler):
    """Answers every put as S3 does where there is no such bucket."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b"<Error><Code>NoSuchBucket</Code></Error>"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


def test_an_output_in_no_bucket_is_named(bucket: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Bucketless) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        connect.cache_clear()
        for write in (bucket.put, bucket.create):
            with pytest.raises(StoreError, match=r"s3://.*: no such bucket; make it"):
                write("a", b"1")


class Forgetful(http.server.BaseHTTPRequestHandler):
    """Hands requests on to the server, but says yes where the condition of a put is not met."""

    protocol_version = "HTTP/1.1"
    target = ""

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        place = urlsplit(self.target)
        server = http.client.HTTPConnection(str(place.hostname), place.port)
        server.request(self.command, self.path, body, dict(self.headers))
        reply = server.getresponse()
        data = reply.read()
        refused = reply.status in (409, 412)
        self.send_response(200 if refused else reply.status)
        if refused:
            self.send_header("ETag", '"0"')
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        length = reply.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(data)
        server.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""


@contextmanager
def serve(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server with that handler."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_store_that_ignores_conditional_puts_is_refused(
    s3_server: S3Server,
    lake: Folder,
    bucket: Folder,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Forgetful, "target", s3_server.endpoint)
    with serve(Forgetful) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        connect.cache_clear()
        job = write_job(tmp_path / "job.yaml", lake.url, bucket.join("maps").url, input=LABELLED)
        ran = call_cli(capsys, "run", job)
    assert ran.code == 2
    assert "ignores conditional puts (If-None-Match)" in ran.err
    assert bucket.join("maps").list() == {}


FILED = """\
[default]
aws_access_key_id = filed
aws_secret_access_key = filed-secret

[other]
aws_access_key_id = other
aws_secret_access_key = other-secret
aws_session_token = other-token
"""
CONFIG = """\
[default]
region = eu-west-1

[profile other]
region = eu-west-2
endpoint_url = http://127.0.0.1:1
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text(FILED)
    (folder / "config").write_text(CONFIG)
    return tmp_path


def test_keys_come_from_the_environment_or_from_the_files(home: Path) -> None:
    place = {"HOME": str(home)}
    filed = {"aws_access_key_id": "filed", "aws_secret_access_key": "filed-secret"}
    assert s3_settings(place) == filed | {"region": "eu-west-1"}
    given = {"AWS_ACCESS_KEY_ID": "given", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "r"}
    assert s3_settings(place | given) == {
        "aws_access_key_id": "given",
        "aws_secret_access_key": "s",
        "region": "r",
    }
    assert s3_settings(place | {"AWS_PROFILE": "other"}) == {
        "aws_access_key_id": "other",
        "aws_secret_access_key": "other-secret",
        "aws_session_token": "other-token",
        "region": "eu-west-2",
        "endpoint_url": "http://127.0.0.1:1",
    }
    token = {"AWS_PROFILE": "other", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    assert "aws_session_token" not in s3_settings(place | token)  # another key's
    assert s3_settings({"HOME": str(home / "nobody")}) == {}


def test_the_files_keys_reach_the_store(
    home: Path, s3_server: S3Server, bucket: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = "aws_access_key_id = owner\naws_secret_access_key = owner-secret\n"
    (home / ".aws/credentials").write_text(f"[default]\n{keys}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    connect.cache_clear()
    found = Folder(f"s3://{BUCKET}/filed")
    found.put("a", b"1")
    assert found.get("a") == b"1"

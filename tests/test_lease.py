"""The lease: one holder, named; renewed while it works; over when its holder is."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest

from pipeline import clock, history, lease
from pipeline.errors import BusyError, StoreError
from pipeline.lease import hold
from pipeline.stores import Folder
from tests.data import call_cli, make_blobs, tree, write_job, write_parquet


def held(root: Folder) -> dict[str, Any]:
    (key,) = root.list("leases")
    found: dict[str, Any] = json.loads(root.get(key))
    return found


def put_lease(root: Folder, number: int = 3, **changes: Any) -> None:
    """A lease of a process on another machine."""
    now = time.time()
    values: dict[str, Any] = {
        "owner": "other",
        "command": "refresh",
        "host": "elsewhere",
        "machine": "elsewhere 1 1",
        "process": 4711,
        "begun": "12",
        "since": clock.write_time(now - 300),
        "renewed": clock.write_time(now),
        "expires": clock.write_time(now + 60),
        "format": 1,
    }
    root.put(f"leases/{number:06d}.json", json.dumps(values | changes).encode())


def test_one_at_a_time_and_nothing_left(folder: Folder) -> None:
    with hold(folder, "run"):
        assert held(folder)["command"] == "run"
        message = r"lakemap run is at work here since 2\S+Z \(\S+, process \d+\); nothing was touch"
        with pytest.raises(BusyError, match=message) as caught, hold(folder, "refresh"):
            pass
        assert caught.value.exit_code == 5
        assert held(folder)["command"] == "run"
    assert folder.list("leases") == {}
    with pytest.raises(KeyboardInterrupt), hold(folder, "run"):
        raise KeyboardInterrupt
    assert folder.list("leases") == {}


def test_a_lease_is_renewed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "TTL_SECONDS", 2.0)
    with hold(folder, "run"):
        first = held(folder)
        deadline = time.monotonic() + 20
        while held(folder)["expires"] == first["expires"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert held(folder)["since"] == first["since"]


def test_a_lease_that_has_ended_is_followed_by_the_next(folder: Folder) -> None:
    past = clock.write_time(time.time() - 1)
    put_lease(folder, 3, expires=past)
    with hold(folder, "run"):
        assert list(folder.list("leases")) == ["leases/000004.json"]
    assert folder.list("leases") == {}


def test_of_many_who_follow_one_wins(folder: Folder) -> None:
    put_lease(folder, 1, expires=clock.write_time(time.time() - 1))

    refused = Semaphore(0)

    def attempt(_: int) -> bool:
        try:
            with hold(folder, "run"):
                return all(refused.acquire(timeout=30) for _ in range(7))
        except BusyError:
            refused.release()
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1


def test_a_number_that_was_given_again_meanwhile(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We saw lease 1 end; before we create 2, all others end and somebody gets 1 anew."""
    put_lease(folder, 1, expires=clock.write_time(time.time() - 1))
    create = Folder.create

    def late(self: Folder, key: str, data: bytes) -> bool:
        put_lease(self, 1)
        return create(self, key, data)

    monkeypatch.setattr(Folder, "create", late)
    with pytest.raises(BusyError, match=r"\(elsewhere, process 4711\)"), hold(folder, "run"):
        pass
    assert list(folder.list("leases")) == ["leases/000001.json"]


def test_a_dead_process_of_this_machine_holds_nothing(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pipeline.lease import hold; from pipeline.stores import Folder\n"
        "with hold(Folder(sys.argv[1]), 'refresh'): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(BusyError, match=f"process {process.pid}"), hold(Folder(str(tmp_path)), "r"):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with hold(Folder(str(tmp_path)), "run"):
        assert held(Folder(str(tmp_path)))["process"] == os.getpid()


def test_clocks_that_go_backwards_and_damaged_leases(folder: Folder) -> None:
    put_lease(folder, 3, renewed=clock.write_time(time.time() + 3600))
    message = r"leases/000003.json: written at 2\S+Z, but the clock of this machine says 2\S+Z; set"
    with pytest.raises(StoreError, match=message), hold(folder, "run"):
        pass
    folder.put("leases/000003.json", b"?")
    with (
        pytest.raises(StoreError, match=r"000003.json: not a lease; remove it if"),
        hold(folder, ""),
    ):
        pass


@pytest.mark.parametrize("command", [("run",), ("refresh",), ("stage", "ingest"), ("rollback",)])
def test_commands_wait_for_nobody(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(tmp_path / "lake", make_blobs(60).vectors)
    job = write_job(tmp_path / "job.yaml", tmp_path / "lake", tmp_path / "maps")
    put_lease(Folder(str(tmp_path / "maps")))
    if command == ("rollback",):
        history.publish(Folder(str(tmp_path / "maps")), None, "a", "run", 60)
    before = tree(tmp_path)
    ran = call_cli(capsys, *command, job)
    assert ran.code == 5
    (line,) = [line for line in ran.err.splitlines() if line.startswith("lakemap: ")]
    assert "lakemap refresh is at work here since" in line
    assert "(elsewhere, process 4711)" in line
    assert tree(tmp_path) == before

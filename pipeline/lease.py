"""One at a time: a lease on an output folder, which ends by itself if its holder dies.

The holder creates `leases/<number>.json` only if that number is free, renews it while it works and
removes it at the end. A lease that was not renewed in time is followed by the next number, which
only one can create. Safety does not rest on it (see history.py): it keeps two from doing the
same work, and says who is at it.
"""

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event, Thread

from pydantic import TypeAdapter

from pipeline.clock import check_past, read_time, write_time
from pipeline.errors import BusyError, LakemapError, StoreError
from pipeline.stores import Folder

log = logging.getLogger("lakemap")

TTL_SECONDS = 60.0
RENEWALS = 3  # in the time after which a lease ends: two may fail
FORMAT = 1


@dataclass(frozen=True)
class Lease:
    """Who works on an output folder, and until when that holds unless it is renewed."""

    owner: str
    command: str
    host: str
    machine: str  # host, boot and process numbering: where a process number means something
    process: int
    begun: str  # mark of the process, as its number may be given again
    since: str
    renewed: str
    expires: str
    format: int = FORMAT


_LEASE = TypeAdapter(Lease)


@contextmanager
def hold(root: Folder, command: str) -> Iterator[None]:
    """The lease of the folder inside; BusyError if another has it."""
    number, lease = _acquire(root, command)
    stop = Event()
    thread = Thread(target=_keep, args=(root, number, lease, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        _release(root, number)


def _acquire(root: Folder, command: str) -> tuple[int, Lease]:
    while True:
        highest = max(_numbers(root), default=0)
        if highest:
            _check_free(root, highest)
        lease = _new_lease(command)
        if root.create(_key(highest + 1), _encode(lease)):
            _clear_below(root, highest + 1)
            return highest + 1, lease


def _clear_below(root: Folder, ours: int) -> None:
    """Remove the leases that ours follows; if one of them is alive, ours goes instead.

    That is so if all others ended and a lower number was given again since we looked.
    """
    for number in _numbers(root):
        if number < ours:
            try:
                _check_free(root, number)
            except LakemapError:
                root.delete(_key(ours))
                raise
            root.delete(_key(number))


def find_holder(root: Folder) -> Lease | None:
    """Who works on the folder now; None if nobody does."""
    highest = max(_numbers(root), default=0)
    return _living(root, highest) if highest else None


def _living(root: Folder, number: int) -> Lease | None:
    """The lease of that number if it is alive."""
    data, where = root.find(_key(number)), f"{root.url}/{_key(number)}"
    if data is None:  # it has just ended
        return None
    try:
        lease = _LEASE.validate_json(data)
        left = _seconds_left(lease)
    except ValueError as error:
        raise StoreError(f"{where}: not a lease; remove it if no run is under way") from error
    check_past(lease.renewed, where)
    return lease if left > 0 and not _is_dead(lease) else None


def _seconds_left(lease: Lease) -> float:
    return read_time(lease.expires) - time.time()


def _check_free(root: Folder, number: int) -> None:
    """Refuse while the lease is alive."""
    lease = _living(root, number)
    if lease is not None:
        raise BusyError(
            f"{root.url}: lakemap {lease.command} is at work here since {lease.since} "
            f"({lease.host}, process {lease.process}); nothing was touched; try again when it has "
            f"ended, or in {_seconds_left(lease):.0f} s if it has died"
        )


def _is_dead(lease: Lease) -> bool:
    """Whether the holder was a process of this machine that has ended."""
    return lease.machine == _machine() and _begun(lease.process) != lease.begun


def _new_lease(command: str) -> Lease:
    lease = Lease(
        owner=uuid.uuid4().hex,
        command=command,
        host=socket.gethostname(),
        machine=_machine(),
        process=os.getpid(),
        begun=_begun(os.getpid()),
        since=write_time(time.time()),
        renewed="",
        expires="",
    )
    return _renewed(lease)


def _renewed(lease: Lease) -> Lease:
    now = time.time()
    return replace(lease, renewed=write_time(now), expires=write_time(now + TTL_SECONDS))


def _keep(root: Folder, number: int, lease: Lease, stop: Event) -> None:
    """Renew the lease until told to stop, or until another was faster."""
    while not stop.wait(TTL_SECONDS / RENEWALS):
        try:
            if max(_numbers(root), default=number) > number:
                log.warning("%s: the lease ended before it was renewed; another works", root.url)
                return
            root.put(_key(number), _encode(_renewed(lease)))
        except StoreError as error:
            log.warning("the lease was not renewed (%s)", error)


def _release(root: Folder, number: int) -> None:
    try:
        root.delete(_key(number))
    except StoreError as error:
        log.warning("the lease stays until it ends by itself (%s)", error)


def _machine() -> str:
    """A name that two machines, boots or containers do not share."""
    places = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid"))
    boot = places[0].read_text().strip() if places[0].exists() else ""
    numbering = str(places[1].readlink()) if places[1].is_symlink() else ""
    return f"{socket.gethostname()} {boot} {numbering}"


def _begun(process: int) -> str:
    """A mark of the process of that number: when it began; empty if there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]


def _numbers(root: Folder) -> list[int]:
    names = [key.rsplit("/", 1)[1].removesuffix(".json") for key in root.list("leases")]
    return [int(name) for name in names if name.isdigit()]


def _encode(lease: Lease) -> bytes:
    return json.dumps(asdict(lease), indent=1).encode()


def _key(number: int) -> str:
    return f"leases/{number:06d}.json"

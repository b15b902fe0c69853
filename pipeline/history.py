"""The publish log: one small record per publication, numbered; the highest is what is published.

A record is created only if its number is free, so of two publishers one wins and the other knows.
CURRENT is written after it, for readers that want one name; what it says is never relied on here.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import TypeAdapter

from pipeline.clock import check_past, write_time
from pipeline.errors import BusyError, InputError, StoreError
from pipeline.stores import Folder

FORMAT = 1
Action = Literal["run", "refresh", "retrain", "rollback"]


@dataclass(frozen=True)
class Entry:
    """One publication; `previous` is the run that was published before. Number 0 has no record:

    it stands for what CURRENT names in an output that an older version wrote.
    """

    number: int
    run: str
    action: Action
    at: str
    previous: str | None
    rows: int
    format: int = FORMAT


_ENTRY = TypeAdapter(Entry)


def entries(root: Folder) -> list[Entry]:
    """Every publication, the oldest first."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda number: _load(root, number), _numbers(root)))


def head(root: Folder) -> Entry | None:
    """The publication in force, None if there was none yet."""
    numbers = _numbers(root)
    if numbers:
        return _load(root, numbers[-1])
    run = _pointed_at(root)
    return None if run is None else Entry(0, run, "run", "", None, 0)


def current_run(root: Folder) -> str | None:
    """Name of the published run; everything that asks for it asks here."""
    entry = head(root)
    return None if entry is None else entry.run


def seen(root: Folder) -> Entry | None:
    """The publication that a new one is to follow; one that lies in the future is refused."""
    entry = head(root)
    if entry is not None and entry.number:
        check_past(entry.at, _where(root, entry.number))
    return entry


def start(root: Folder) -> Entry | None:
    """As `seen`, as work begins: CURRENT is put right if a crash kept it from moving."""
    entry = seen(root)
    if entry is not None and entry.number:
        point_at(root, entry.run)
    return entry


def publish(root: Folder, after: Entry | None, run: str, action: Action, rows: int) -> bool:
    """Make the run the published one, in one conditional write; False if it was already.

    `after` is the publication seen when work began: if another has followed it, nothing is done.
    """
    if after is not None and after.number and after.run == run:
        return point_at(root, run)
    number = 1 if after is None else after.number + 1
    previous = None if after is None else after.run
    entry = Entry(number, run, action, write_time(time.time()), previous, rows)
    if not root.create(_key(number), json.dumps(asdict(entry), indent=1).encode()):
        other = _load(root, number)
        raise BusyError(
            f"{root.url}: run {other.run} was published meanwhile ({other.at}, {other.action}); "
            f"nothing was changed, run {run} is not published; give the command again"
        )
    point_at(root, run)
    return True


def point_at(root: Folder, run: str) -> bool:
    """Have CURRENT name the run; whether that needed a write."""
    pointer = json.dumps({"run": run, "manifest": f"runs/{run}/manifest.json", "format": FORMAT})
    if root.find("CURRENT") == pointer.encode():
        return False
    root.put("CURRENT", pointer.encode())
    return True


def run_before(log: list[Entry], run: str) -> str | None:
    """The run that was published when `run` first took its place; rollbacks do not count."""
    made = [entry for entry in log if entry.run == run and entry.action != "rollback"]
    return made[-1].previous if made else None


def recent_runs(root: Folder, n_runs: int) -> list[str] | None:
    """The last runs that were published, the newest first; None where there is no log."""
    log = entries(root)
    if not log:
        return None
    named = [run for entry in reversed(log) for run in (entry.run, entry.previous)]
    return list(dict.fromkeys(run for run in named if run is not None))[:n_runs]


def _numbers(root: Folder) -> list[int]:
    names = [key.rsplit("/", 1)[1].removesuffix(".json") for key in root.list("history")]
    return sorted(int(name) for name in names if name.isdigit())


def _load(root: Folder, number: int) -> Entry:
    where, data = _where(root, number), root.find(_key(number))
    if data is None:
        raise StoreError(f"{where}: removed while it was read; give the command again")
    try:
        entry = _ENTRY.validate_json(data)
    except ValueError as error:
        raise StoreError(
            f"{where}: not a record of a publication; restore it, or remove it and those after it"
        ) from error
    if entry.format != FORMAT:
        raise StoreError(f"{where}: format {entry.format}, this version reads {FORMAT}; update it")
    return entry


def _pointed_at(root: Folder) -> str | None:
    data = root.find("CURRENT")
    if data is None:
        return None
    try:
        return str(json.loads(data)["run"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{root.url}/CURRENT: names no run; correct it, or remove it and run again"
        ) from error


def _where(root: Folder, number: int) -> str:
    return f"{root.url}/{_key(number)}"


def _key(number: int) -> str:
    return f"history/{number:06d}.json"

"""What an output folder holds: whether it is sound, and what of it nobody needs any more."""

import io
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import history
from pipeline.errors import LakemapError
from pipeline.manifest import find_store, load_commits
from pipeline.runs import load_manifest, read_runs
from pipeline.stores import Entry, Folder

THREADS = 16
KEPT_RUNS = 7  # of the history, a week of nights
ROWS_KEPT_IN = "map.parquet"  # the table that has a row for every row of its partition


class Check(NamedTuple):
    """An object and what is written of it; n_rows of a table whose rows are counted."""

    folder: Folder
    key: str
    n_bytes: int
    crc32: int
    n_rows: int | None = None


@dataclass(frozen=True)
class Verified:
    """What was read again, and one line for everything that is not as its record says."""

    n_files: int
    n_bytes: int
    n_rows: int
    damaged: tuple[str, ...]


def verify(root: Folder) -> Verified:
    """Every object that a commit or a run's manifest names, read and compared with it.

    And the history: its records can be read, and the published run is there.
    """
    n_files = n_bytes = n_rows = 0
    damaged = _check_history(root)
    checks = _checks(root)
    with ThreadPoolExecutor(THREADS) as pool:
        while batch := list(islice(checks, 64 * THREADS)):
            for check, found in zip(batch, pool.map(_compare, batch), strict=True):
                n_files, n_bytes = n_files + 1, n_bytes + check.n_bytes
                n_rows += check.n_rows or 0
                if found is not None:
                    damaged.append(f"{check.folder.url}/{check.key}: {found}")
    return Verified(n_files, n_bytes, n_rows, tuple(damaged))


def _check_history(root: Folder) -> list[str]:
    try:
        history.entries(root)
        current = history.current_run(root)
    except LakemapError as error:
        return [str(error)]
    if current is None or load_manifest(root.join(f"runs/{current}")) is not None:
        return []
    return [f"{root.url}/runs/{current}/manifest.json: missing, and it is the published run"]


def _checks(root: Folder) -> Iterator[Check]:
    for stage, name in _store_names(root):
        folder = root.join(f"stores/{stage}/{name}")
        for commit in load_commits(folder).values():
            record = commit.record
            for key, n_bytes in record.objects.items():
                rows = record.n_rows if key == ROWS_KEPT_IN else None
                crc32 = record.crcs[key]
                yield Check(folder, f"{record.key}/{key}", n_bytes, crc32, rows)
    for name, manifest in read_runs(root).items():
        for key, file in manifest["files"].items():
            yield Check(root.join(f"runs/{name}"), key, file["bytes"], file["crc32"])


def _compare(check: Check) -> str | None:
    """What is wrong with the object, if anything is."""
    data = check.folder.find(check.key)
    if data is None:
        return "missing"
    if len(data) != check.n_bytes:
        return f"{len(data)} bytes, its record says {check.n_bytes}"
    if zlib.crc32(data) != check.crc32:
        return "its checksum differs from its record's"
    if check.n_rows is not None:
        try:
            n_rows = pq.read_metadata(io.BytesIO(data)).num_rows
        except pa.ArrowException:
            return "not a Parquet file"
        if n_rows != check.n_rows:
            return f"{n_rows} rows, its record says {check.n_rows}"
    return None


def _store_names(root: Folder) -> Iterator[tuple[str, str]]:
    """Stage and fingerprint of every store."""
    for stage in root.folders("stores"):
        for name in root.folders(f"stores/{stage}"):
            yield stage, name


@dataclass(frozen=True)
class Garbage:
    """Objects that nothing needs: how many, their bytes, and where they lie."""

    n_files: int
    n_bytes: int
    places: tuple[str, ...]


def collect(
    root: Folder,
    used: Iterable[str],
    older_than: float,
    *,
    delete: bool,
    keep_runs: int = KEPT_RUNS,
) -> Garbage:
    """What no manifest and no commit names, of objects last changed before `older_than`.

    That is: what dead attempts wrote beside the attempt that was committed; runs that were never
    finished, and those that are not among the last `keep_runs` of the history; stores that neither
    a run that stays nor `used`, the stores of the job as it is, has anything to do with. Young
    objects stay: they may be those of a run that is under way.
    """
    n_files = n_bytes = 0
    places: dict[str, None] = {}
    for entry in _find_garbage(root, set(used), keep_runs):
        if entry.changed >= older_than:
            continue
        n_files, n_bytes = n_files + 1, n_bytes + entry.n_bytes
        places["/".join(entry.key.split("/")[:5])] = None
        if delete:
            root.delete(entry.key)
    return Garbage(n_files, n_bytes, tuple(places))


def _find_garbage(root: Folder, used: set[str], keep_runs: int) -> Iterator[Entry]:
    runs, recent = read_runs(root), history.recent_runs(root, keep_runs)
    if recent is not None:  # else an older version published here: all its runs stay
        runs = {name: manifest for name, manifest in runs.items() if name in recent}
    named = used | {
        f"stores/{stage}/{name}"
        for manifest in runs.values()
        for stage, name in manifest["stores"].items()
    }
    for stage, name in _store_names(root):
        place = f"stores/{stage}/{name}"
        keep = _named_data(root.join(place)) if place in named else None
        for entry in root.entries(place):
            inner = entry.key.removeprefix(f"{place}/")
            is_data = inner.startswith("data/")
            if keep is None or (is_data and "/".join(inner.split("/")[:2]) not in keep):
                yield entry
    for name in root.folders("runs"):
        if name not in runs:
            yield from _run_entries(root, name)


def _run_entries(root: Folder, name: str) -> Iterator[Entry]:
    """Files of a run that may go, as old as its manifest, which goes first: then it is no run."""
    entries = {entry.key: entry for entry in root.entries(f"runs/{name}")}
    last = entries.pop(f"runs/{name}/manifest.json", None)
    if last is None:
        yield from entries.values()
        return
    yield last
    for entry in entries.values():  # most are links to files that are older than the run
        yield entry._replace(changed=last.changed)


def _named_data(folder: Folder) -> set[str]:
    """The keys of all partitions that a store's manifest or its commits name."""
    store = find_store(folder)
    records = list(store.records) if store else []
    records += [commit.record for commit in load_commits(folder).values()]
    return {record.key for record in records}

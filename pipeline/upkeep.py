"""What an output folder holds: whether it is sound, and what of it nobody needs any more."""

import io
import json
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import StoreError
from pipeline.manifest import find_store, load_commits
from pipeline.stores import Entry, Folder

THREADS = 16
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
    """Every object that a commit or a run's manifest names, read and compared with it."""
    n_files = n_bytes = n_rows = 0
    damaged: list[str] = []
    checks = _checks(root)
    with ThreadPoolExecutor(THREADS) as pool:
        while batch := list(islice(checks, 64 * THREADS)):
            for check, found in zip(batch, pool.map(_compare, batch), strict=True):
                n_files, n_bytes = n_files + 1, n_bytes + check.n_bytes
                n_rows += check.n_rows or 0
                if found is not None:
                    damaged.append(f"{check.folder.url}/{check.key}: {found}")
    return Verified(n_files, n_bytes, n_rows, tuple(damaged))


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


def read_runs(root: Folder) -> dict[str, dict[str, Any]]:
    """The manifests of all finished runs, by name."""
    found = {}
    for name in root.folders("runs"):
        data = root.find(f"runs/{name}/manifest.json")
        if data is not None:
            try:
                found[name] = json.loads(data)
            except ValueError as error:
                raise StoreError(f"{root.url}/runs/{name}/manifest.json: not JSON") from error
    return found


@dataclass(frozen=True)
class Garbage:
    """Objects that nothing needs: how many, their bytes, and where they lie."""

    n_files: int
    n_bytes: int
    places: tuple[str, ...]


def collect(root: Folder, used: Iterable[str], older_than: float, *, delete: bool) -> Garbage:
    """What no manifest and no commit names, of objects last changed before `older_than`.

    That is: what dead attempts wrote beside the attempt that was committed; stores that neither a
    run nor `used`, the stores of the job as it is, has anything to do with; runs that were never
    finished. Young objects stay: they may be those of a run that is under way.
    """
    n_files = n_bytes = 0
    places: dict[str, None] = {}
    for entry in _find_garbage(root, set(used)):
        if entry.changed >= older_than:
            continue
        n_files, n_bytes = n_files + 1, n_bytes + entry.n_bytes
        places["/".join(entry.key.split("/")[:5])] = None
        if delete:
            root.delete(entry.key)
    return Garbage(n_files, n_bytes, tuple(places))


def _find_garbage(root: Folder, used: set[str]) -> Iterator[Entry]:
    runs = read_runs(root)
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
            yield from root.entries(f"runs/{name}")


def _named_data(folder: Folder) -> set[str]:
    """The keys of all partitions that a store's manifest or its commits name."""
    store = find_store(folder)
    records = list(store.records) if store else []
    records += [commit.record for commit in load_commits(folder).values()]
    return {record.key for record in records}

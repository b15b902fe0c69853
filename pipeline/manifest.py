"""What a stage leaves behind: a plan first, one commit per partition, the manifest last.

A store without a manifest does not exist for the next stage. Every record is JSON with a format
number; a record of another format is refused.
"""

import hashlib
import json
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import TypeAdapter

from pipeline.errors import StoreError
from pipeline.partitions import Partition
from pipeline.stores import (
    BUCKET_INDEX,
    BlockArrays,
    BucketIndex,
    Buckets,
    Folder,
    checksum,
    decode_index,
    decode_table,
    encode_arrays,
    encode_buckets,
    encode_table,
    put_all,
    read_bucket,
    read_checked,
)

FORMAT = 1


@dataclass(frozen=True)
class Plan:
    """The partitions of a stage and the facts its tasks need; written before the first task."""

    partitions: list[Partition]
    facts: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True)
class Part:
    """What a task made of one partition, still in memory."""

    n_rows: int
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    buckets: Buckets | None = None

    def encode(self) -> dict[str, bytes]:
        """The objects to store, by name."""
        arrays = encode_arrays(self.arrays) if self.arrays else {}
        objects = {f"arrays/{name}": data for name, data in arrays.items()}
        objects |= {f"{name}.parquet": encode_table(table) for name, table in self.tables.items()}
        if self.buckets is not None:
            objects |= encode_buckets(self.buckets)
        return objects | dict(self.files)


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a committed partition; equal inputs give an equal record."""

    partition: Partition
    n_rows: int
    key: str
    objects: dict[str, int]  # bytes of each
    crcs: dict[str, int]  # CRC32 of each, so that damage is noticed where an object is read alone
    sha256: str
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Effort:
    """What a partition cost; differs from run to run."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """One partition's entry in the ledger."""

    record: Record
    effort: Effort
    write_id: str
    format: int = FORMAT


@dataclass(frozen=True)
class Manifest:
    """A finished store: what made it, from what, and every partition."""

    stage: str
    version: int
    fingerprint: str
    inputs: dict[str, str]
    settings: dict[str, Any]
    facts: dict[str, Any]
    metrics: dict[str, Any]
    n_rows: int
    records: list[Record]
    format: int = FORMAT

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the contents: what made them and every partition's checksum."""
        parts = [[r.partition.index, r.n_rows, r.sha256] for r in self.records]
        return fingerprint(self.stage, self.version, self.fingerprint, parts)


@dataclass(frozen=True)
class Timing:
    """What a whole stage cost; kept beside the manifest, which is the same for equal inputs."""

    wall_seconds: float
    task_seconds: float
    peak_bytes: int
    format: int = FORMAT


T = TypeVar("T", Plan, Commit, Manifest, Timing)

_ADAPTERS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (Plan, Commit, Manifest, Timing)
}


def to_json(value: Plan | Commit | Manifest | Timing) -> bytes:
    """The record as JSON: a line for every field, and for every partition of many thousand."""
    lines = [f'"{name}":{_field_text(getattr(value, name))}' for name in _field_names(value)]
    return ("{" + ",\n".join(lines) + "}").encode()


def _field_names(value: Any) -> list[str]:
    return sorted(field.name for field in fields(value))


def _field_text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",\n".join(map(_text, value)) + "]"
    return _text(value)


def _text(value: Any) -> str:
    return json.dumps(value, default=_as_mapping, sort_keys=True, separators=(",", ":"))


def _as_mapping(value: Any) -> dict[str, Any]:
    """A dataclass's fields; not copied, as `asdict` does."""
    return {name: getattr(value, name) for name in _field_names(value)}


def from_json(kind: type[T], data: bytes, where: str) -> T:
    """The record of that kind; one of another format, or damaged, is refused by name."""
    try:
        value: T = _ADAPTERS[kind].validate_json(data)
        found = value.format
    except ValueError as error:  # not JSON, not UTF-8, not these fields
        found = _find_format(data)
        if found == FORMAT:
            line = f"{where}: not a {kind.__name__.lower()} record; remove it"
            raise StoreError(line) from error
    if found != FORMAT:
        raise StoreError(f"{where}: format {found}, this version reads {FORMAT}; remove it")
    return value


def _find_format(data: bytes) -> Any:
    """What the record says its format is; ours if it cannot even be asked."""
    try:
        return json.loads(data).get("format")
    except (ValueError, AttributeError):
        return FORMAT


def fingerprint(*values: Any) -> str:
    """SHA-256 of the values as canonical JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def save_plan(folder: Folder, plan: Plan) -> Plan:
    """The plan in force: this one, or the one an earlier run has already written."""
    if folder.create("plan.json", to_json(plan)):
        return plan
    existing = load_plan(folder)
    assert existing is not None
    return existing


def load_plan(folder: Folder) -> Plan | None:
    """The plan of a store, or None when it has none yet."""
    data = folder.find("plan.json")
    return None if data is None else from_json(Plan, data, f"{folder.url}/plan.json")


def commit_part(folder: Folder, partition: Partition, part: Part, effort: Effort) -> Commit:
    """The commit in force for the partition: ours, or another attempt's that came first.

    Data lies under a key made of its own checksum: attempts that differ cannot overwrite each
    other, attempts that agree share it.
    """
    objects = part.encode()
    digest = checksum(objects)
    key = f"data/{partition.index:06d}-{digest[:16]}"
    put_all(folder.join(key), objects)
    sizes = {name: len(data) for name, data in sorted(objects.items())}
    crcs = {name: zlib.crc32(data) for name, data in sorted(objects.items())}
    record = Record(partition, part.n_rows, key, sizes, crcs, digest, dict(part.metrics))
    ours = Commit(record, effort, uuid.uuid4().hex)
    if folder.create(_commit_key(partition.index), to_json(ours)):
        return ours
    winner = load_commit(folder, partition.index)
    assert winner is not None
    if winner.record.key != key:
        for name in objects:
            folder.delete(f"{key}/{name}")
    return winner


def forget_part(partition_url: str) -> None:
    """Take back the manifest and the partition's commit: the next run does it alone again.

    `partition_url` is where its objects lie, as a DamagedError names it.
    """
    url, _, key = partition_url.partition("/data/")
    folder, index = Folder(url), int(key.split("-")[0])
    folder.delete("manifest.json")
    folder.delete(_commit_key(index))


def load_commit(folder: Folder, index: int) -> Commit | None:
    """The partition's commit, or None when it has none yet."""
    key = _commit_key(index)
    data = folder.find(key)
    return None if data is None else from_json(Commit, data, f"{folder.url}/{key}")


def load_commits(folder: Folder) -> dict[int, Commit]:
    """Every commit of a store, by partition index."""
    names = [key.rsplit("/", 1)[1].removesuffix(".json") for key in folder.list("commits")]
    indices = [int(name) for name in names if name.isdigit()]
    with ThreadPoolExecutor(16) as pool:
        loaded = pool.map(lambda index: load_commit(folder, index), indices)
    return {index: commit for index, commit in zip(indices, loaded, strict=True) if commit}


def _commit_key(index: int) -> str:
    return f"commits/{index:06d}.json"


def missing_partitions(plan: Plan, commits: Iterable[int]) -> list[Partition]:
    """Partitions of the plan that have no commit."""
    done = set(commits)
    return [partition for partition in plan.partitions if partition.index not in done]


class Store:
    """A finished store, for reading: its manifest, its blocks by row range, its tables, files."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ends = np.cumsum([record.n_rows for record in manifest.records], dtype=np.int64)
        self._indexes: dict[str, BucketIndex] = {}

    @property
    def records(self) -> Sequence[Record]:
        """Records of all partitions, in order."""
        return self.manifest.records

    @property
    def n_rows(self) -> int:
        """Rows of all partitions together."""
        return self.manifest.n_rows

    def arrays(self, record: Record) -> BlockArrays:
        """The arrays of one partition."""
        return BlockArrays(self.folder.join(record.key), record.objects, record.crcs)

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Rows start..stop of the array, counted over all partitions."""
        # An empty range may begin at the very end; it still needs a block, for dtype and width.
        first = min(int(np.searchsorted(self._ends, start, side="right")), len(self._ends) - 1)
        last = max(int(np.searchsorted(self._ends, stop, side="left")), first)
        parts = []
        for index in range(first, last + 1):
            record = self.records[index]
            offset = int(self._ends[index]) - record.n_rows
            block = self.arrays(record)
            parts.append(block.read(name, max(0, start - offset), stop - offset))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def table(self, record: Record, name: str, columns: list[str] | None = None) -> pa.Table:
        """One table of one partition."""
        return decode_table(self.file(record, f"{name}.parquet"), columns)

    def bucket(self, record: Record, bucket: int) -> dict[str, NDArray[Any]]:
        """The rows that one partition sends to the bucket."""
        return read_bucket(self.folder.join(record.key), self.bucket_index(record), bucket)

    def bucket_index(self, record: Record) -> BucketIndex:
        """Where the buckets of one partition lie; read once per process."""
        if record.key not in self._indexes:
            self._indexes[record.key] = decode_index(self.file(record, BUCKET_INDEX))
        return self._indexes[record.key]

    def file(self, record: Record, name: str) -> bytes:
        """One file of one partition; its presence, size and checksum are checked."""
        folder = self.folder.join(record.key)
        return read_checked(folder, name, record.objects[name], record.crcs[name])


@lru_cache(maxsize=64)
def open_store(folder: Folder, digest: str) -> Store:
    """The finished store at the folder, read once per process; `digest` names its contents."""
    store = find_store(folder)
    if store is None or store.manifest.digest != digest:
        raise StoreError(f"{folder.url}: changed or removed during the run; run again")
    return store


def find_store(folder: Folder) -> Store | None:
    """The finished store at the folder, or None while it has no manifest."""
    data = folder.find("manifest.json")
    if data is None:
        return None
    return Store(folder, from_json(Manifest, data, f"{folder.url}/manifest.json"))

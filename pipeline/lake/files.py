"""The files of the input lake: where they are, which belong to it, whether they have changed.

Every scheme goes through obstore, so that a folder and a bucket behave alike.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore

from pipeline.errors import InputError, StoreError
from pipeline.remote import connect, explain, is_remote

ZARR_MARKERS = frozenset({"zarr.json", ".zarray", ".zgroup"})
N_THREADS = 16  # requests in flight: footers and heads wait for the store, not for a core


@dataclass(frozen=True)
class Source:
    """What to read: where the lake is, and which columns or arrays of it."""

    path: str
    vector: str | tuple[str, ...] | None
    id: str | None = None
    label: str | None = None
    holdout: str | None = None
    reject_zero: bool = False
    partition_bytes: int = 64 << 20
    on_change: Literal["stop", "skip"] = "stop"  # when a file changes under the run
    passed: tuple[str, ...] = ()  # columns that are only handed on to the map

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the columns beside the vector that mean something, each once."""
        return tuple(dict.fromkeys(n for n in (self.id, self.label, self.holdout) if n is not None))

    @property
    def beside(self) -> tuple[str, ...]:
        """Names of all columns beside the vector that are read, each once."""
        return tuple(dict.fromkeys((*self.scalars, *self.passed)))


@dataclass(frozen=True)
class InputFile:
    """One file of the lake; `path` is relative to the lake's root."""

    path: str
    size: int
    etag: str


@dataclass(frozen=True)
class Snapshot:
    """The files of the lake at one moment, sorted by path."""

    files: tuple[InputFile, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over every file's path, size and etag."""
        lines = "".join(f"{file.path}\0{file.size}\0{file.etag}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Root:
    """The lake's folder: its store, the real folder if local, its only file if the path is one."""

    address: str
    store: Any
    folder: Path | None
    only: str | None = None

    def name(self, path: str) -> str:
        """The file's full address, for messages."""
        return f"input {self.address}" if path == self.only else f"input {self.address}/{path}"


@contextmanager
def store_errors(where: str) -> Iterator[None]:
    """Nothing; an error of the store inside becomes one line that begins with `where`."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(
            f"{where}: file vanished while the lake was read; start a new run"
        ) from error
    except (BaseError, OSError) as error:
        raise StoreError(
            f"{where}: {explain(error)}; check address, credentials and permissions"
        ) from error


def open_root(path: str) -> Root:
    """The lake's root, a local file's or folder's existence checked."""
    with store_errors(f"input {path}"):
        if is_remote(path):
            return _remote_root(path.rstrip("/"))
        return _local_root(path)


def _local_root(path: str) -> Root:
    place = Path(unquote(urlsplit(path).path) if path.startswith("file://") else path)
    try:
        place.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"input {path}: no such file or folder; check input.path") from None
    if place.is_dir():
        return Root(path.rstrip("/"), LocalStore(place), place)
    return Root(path, LocalStore(place.parent), place.parent, place.name)


def _remote_root(url: str) -> Root:
    parent, _, name = url.rpartition("/")
    # A name in .parquet may be one file or, from Spark, a folder: only the store can tell.
    if name.lower().endswith(".parquet"):
        file = Root(url, connect(parent), None, name)
        if _head(file, name) is not None:
            return file
    return Root(url, connect(url), None)


def _input_file(meta: Mapping[str, Any]) -> InputFile:
    # A store without etags has only the time; listings and heads agree on it to the second.
    etag = meta["e_tag"] or str(int(meta["last_modified"].timestamp()))
    return InputFile(meta["path"], meta["size"], etag)


def _head(root: Root, path: str) -> InputFile | None:
    """The file as it is now, None if there is none."""
    with store_errors(root.name(path)):
        try:
            return _input_file(obstore.head(root.store, path))
        except FileNotFoundError:
            return None


def _list_files(root: Root) -> list[InputFile]:
    if root.only is not None:
        file = _head(root, root.only)
        return [] if file is None else [file]
    with store_errors(f"input {root.address}"):
        metas = chain.from_iterable(obstore.list(root.store))
        return sorted(map(_input_file, metas), key=lambda file: file.path)


def _is_parquet(path: str) -> bool:
    # Spark's rule: "_" hides a name (_SUCCESS, _temporary) unless it is a partition, as in _day=1.
    hidden = (p[0] == "." or (p[0] == "_" and "=" not in p) for p in path.split("/"))
    return path.lower().endswith(".parquet") and not any(hidden)


def _select(root: Root, source: Source, files: Iterable[InputFile]) -> tuple[InputFile, ...]:
    """The files that the source reads; of a Zarr group only the named arrays' and metadata."""
    found = tuple(files)
    if root.only is not None:
        return found
    if not is_zarr(found):
        return tuple(file for file in found if _is_parquet(file.path))
    if not isinstance(source.vector, str):
        return found
    folders = tuple(f"{name}/" for name in (source.vector, *source.scalars))
    return tuple(f for f in found if "/" not in f.path or f.path.startswith(folders))


def is_zarr(files: Iterable[InputFile]) -> bool:
    """Whether the files are a Zarr store's: its metadata lies at the root."""
    return any(file.path in ZARR_MARKERS for file in files)


def take_snapshot(source: Source) -> Snapshot:
    """The files of the lake as they are now; none is opened."""
    root = open_root(source.path)
    found = _list_files(root)
    if not found:
        raise InputError(
            f"input {source.path}: no files there (an empty folder, or none); check input.path"
        )
    files = _select(root, source, found)
    if not files:
        raise InputError(
            f"input {source.path}: {len(found)} files, none of them .parquet and no Zarr metadata "
            f"(such as {found[0].path}); point input.path at Parquet files or at a Zarr store"
        )
    return Snapshot(files)


def find_changed(
    root: Root, paths: Iterable[str], expected: Mapping[str, InputFile]
) -> dict[str, str]:
    """The files that are not as expected, and what has become of them."""
    found, paths = {}, list(paths)
    with ThreadPoolExecutor(N_THREADS) as pool:
        for path, now in zip(paths, pool.map(partial(_head, root), paths), strict=True):
            before = expected.get(path)
            if now != before:
                what = "vanished" if now is None else "appeared" if before is None else "changed"
                found[path] = what
    return found

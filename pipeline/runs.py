"""The folder of a run: files brought together from stores and from earlier runs, manifest last."""

import json
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pipeline.errors import StoreError
from pipeline.stores import Folder

FORMAT = 1


@dataclass(frozen=True)
class RunFile:
    """A file of a run: where it comes from, what it is called in the run."""

    folder: Folder
    key: str
    name: str
    size: int
    crc32: int


def assemble(
    run: Folder, files: Iterable[RunFile], metrics: Mapping[str, Any], stores: Mapping[str, str]
) -> None:
    """Bring every file to the run's folder, then write its manifest; nothing if that is there.

    `stores` are the fingerprints of what the run was made from, by step.
    """
    if run.find("manifest.json") is not None:
        return
    wanted = list(files)
    present = run.list()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda file: _link(file, run, file.name in present), wanted))
    sizes = run.list()
    for file in wanted:
        if sizes.get(file.name) != file.size:
            raise _damaged(
                file, f"it has {sizes.get(file.name)} bytes, its record says {file.size}"
            )
    manifest = {
        "format": FORMAT,
        "run": run_name(run),
        "files": {file.name: {"bytes": file.size, "crc32": file.crc32} for file in wanted},
        "metrics": dict(metrics),
        "stores": dict(stores),
    }
    run.create("manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode())


def _link(file: RunFile, run: Folder, present: bool) -> None:
    """Bring one file to the run's folder."""
    if present:  # from a release cut short: a link made over itself would leave a second name
        run.delete(file.name)
    try:
        file.folder.copy_to(file.key, run, file.name)
    except FileNotFoundError as error:
        raise _damaged(file, "it is missing") from error


def _damaged(file: RunFile, what: str) -> StoreError:
    place, of_run = f"{file.folder.url}/{file.key}", "/runs/" in file.folder.url
    cure = "lakemap run makes a new map" if of_run else f"remove {file.folder.url} and run again"
    return StoreError(f"{place} is damaged: {what}; {cure}")


def run_name(run: Folder) -> str:
    """The run's name: the last part of its folder's."""
    return run.url.rsplit("/", 1)[1]


def load_manifest(run: Folder) -> dict[str, Any] | None:
    """The run's manifest, None if the run is not finished."""
    data = run.find("manifest.json")
    if data is None:
        return None
    try:
        return dict(json.loads(data))
    except ValueError as error:
        raise StoreError(f"{run.url}/manifest.json: not JSON") from error


def read_runs(root: Folder) -> dict[str, dict[str, Any]]:
    """The manifests of all finished runs, by name."""
    found = {name: load_manifest(root.join(f"runs/{name}")) for name in root.folders("runs")}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def read_file(run: Folder, files: Mapping[str, Mapping[str, int]], name: str) -> bytes:
    """A file of the run, which must be as its manifest (`files`) says."""
    data, listed = run.find(name), files.get(name)
    if data is None or listed is None:
        what = "missing"
    elif len(data) != listed["bytes"] or zlib.crc32(data) != listed["crc32"]:
        what = "damaged: it differs from the run's manifest"
    else:
        return data
    raise StoreError(
        f"{run.url}/{name} is {what}; lakemap rollback returns to an earlier run, lakemap run "
        "makes a new map"
    )

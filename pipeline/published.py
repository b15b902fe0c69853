"""What a published run knows of itself: of which rows of which files every file of its map is.

`snapshot.json` in the run's folder. With it and the other files of the folder a refresh needs no
store of the run.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from pipeline.config import InputConfig, Job
from pipeline.errors import ConfigError, InputError
from pipeline.lake import InputFile
from pipeline.lake.delta import KnownLake
from pipeline.partitions import Piece
from pipeline.picture import Raster
from pipeline.runs import load_manifest, read_file
from pipeline.stores import Folder, decode_table

FORMAT = 1
SNAPSHOT, DENSITY = "snapshot.json", "density.parquet"
# Sections that decide the encoder: with others than the published ones another would be trained.
TRAINING = ("sample", "neighbors", "affinity", "edges", "train")


@dataclass(frozen=True)
class MapPart:
    """One partition of the map: its rows in the lake, and its files in the run.

    Rows of the pieces = n_mapped + those in the quarantine, counted in `reasons`.
    """

    number: int
    pieces: tuple[Piece, ...]
    n_mapped: int
    n_holdout: int
    reasons: dict[str, int]
    files: tuple[str, ...]

    @property
    def n_rows(self) -> int:
        """Rows of the lake."""
        return sum(piece.n_rows for piece in self.pieces)

    @property
    def map_files(self) -> list[str]:
        """Names of the files that hold rows of the map."""
        return [name for name in self.files if name.startswith("map/")]


@dataclass(frozen=True)
class PublishedMap:
    """A whole map: the job it is of, the lake's files, the encoder, the partitions.

    `next_number` was never given to a partition. `categories` name the planes of the density;
    `labels` are the rows of every label, None where there are none to colour by.
    """

    name: str
    settings: dict[str, Any]
    encoder: str
    trained_in: str
    extent: tuple[float, float, float, float]
    width: int
    dtype: str
    mark: str
    files: dict[str, tuple[int, str]]
    parts: tuple[MapPart, ...]
    next_number: int
    categories: tuple[str, ...]
    labels: dict[str, int] | None
    format: int = FORMAT

    @property
    def n_mapped(self) -> int:
        """Rows on the map."""
        return sum(part.n_mapped for part in self.parts)

    @property
    def n_rows(self) -> int:
        """Rows of the lake."""
        return sum(part.n_rows for part in self.parts)

    @property
    def lake(self) -> KnownLake:
        """The lake as it was mapped."""
        files = {path: InputFile(path, *entry) for path, entry in self.files.items()}
        pieces = [part.pieces for part in self.parts]
        return KnownLake(files, pieces, self.width, self.dtype, self.mark)


_PUBLISHED = TypeAdapter(PublishedMap)


def encode_snapshot(found: PublishedMap) -> bytes:
    """The snapshot as JSON."""
    return _PUBLISHED.dump_json(found)


@lru_cache(maxsize=2)
def load_snapshot(run: Folder) -> PublishedMap:
    """The snapshot of a finished run; one that is missing, damaged or of another format is named.

    Runs never change, so it is read once per process.
    """
    manifest, where = load_manifest(run), f"{run.url}/{SNAPSHOT}"
    if manifest is None:
        raise InputError(
            f"{run.url}: the published run has no manifest; lakemap rollback returns to an earlier "
            "run, lakemap run makes a new map"
        )
    if SNAPSHOT not in manifest["files"]:
        raise InputError(f"{run.url}: published by an older format; lakemap run publishes anew")
    data = read_file(run, manifest["files"], SNAPSHOT)
    found = json.loads(data).get("format")
    if found != FORMAT:
        raise InputError(
            f"{where}: format {found}, this version reads {FORMAT}; lakemap run publishes anew"
        )
    return _PUBLISHED.validate_json(data)


def job_settings(job: Job) -> dict[str, Any]:
    """Settings, by section.key, that the encoder and the map's files depend on."""
    given = {name: getattr(job, name) for name in ("input", *TRAINING, "embed")}
    free = ("input.max_bad_fraction", "input.on_change", "input.partition_bytes")
    flat = {key: value for key, value in _flatten(given, "") if key not in free}
    return dict(json.loads(json.dumps(flat)))  # as they will be read


def _flatten(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        inner = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        if isinstance(inner, dict):
            yield from _flatten(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def check_same_job(job: Job, published: PublishedMap) -> None:
    """Refuse the map of another job, and an encoder made with other settings."""
    lake = published.settings["input.path"]
    if (published.name, lake) != (job.name, job.input.path):
        raise InputError(
            f"output {job.output}: holds the map {published.name!r} of {lake}, this job is "
            f"{job.name!r} of {job.input.path}; name another output, or lakemap run to replace it"
        )
    for key in _different(job, published):
        if not _is_form(key):
            raise ConfigError(
                f"{key} is {job_settings(job)[key]}, the published encoder was made with "
                f"{published.settings.get(key)}; change it back, or train anew with lakemap run"
            )


def has_same_form(job: Job, published: PublishedMap) -> bool:
    """Whether the job's map files hold the same columns, arranged alike, as the published ones."""
    return not any(_is_form(key) for key in _different(job, published))


def _different(job: Job, published: PublishedMap) -> list[str]:
    """Settings that are not as published; those that were not known then had their defaults."""
    defaults = job_settings(Job(InputConfig(job.input.path), job.output))
    now, then = job_settings(job), defaults | published.settings
    return [key for key, value in now.items() if then[key] != value]


def _is_form(key: str) -> bool:
    return key.startswith("embed.") or key in ("input.id", "input.label", "input.holdout")


def density_table(raster: Raster) -> pa.Table:
    """The raster's pixels that hold rows: category, row and column (0 bottom left), rows."""
    category, row, column = np.nonzero(raster.counts)
    return pa.table(
        {
            "category": pa.array(category.astype(np.int16)),
            "row": pa.array(row.astype(np.int16)),
            "column": pa.array(column.astype(np.int16)),
            "rows": pa.array(raster.counts[category, row, column].astype(np.int64)),
        }
    )


def read_density(
    data: bytes, n_categories: int, pixels: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Counts (n_categories, pixels, pixels) of a density table."""
    table = decode_table(data)
    counts = np.zeros((n_categories, pixels, pixels), np.int64)
    place = tuple(table[name].to_numpy() for name in ("category", "row", "column"))
    counts[place] = table["rows"].to_numpy()
    return counts


def published_raster(run: Folder, pixels: int) -> Raster:
    """The picture of a published run as rows per pixel."""
    found, manifest = load_snapshot(run), load_manifest(run)
    assert manifest is not None, "its snapshot was read"
    data = read_file(run, manifest["files"], DENSITY)
    counts = read_density(data, len(found.categories), pixels)
    return Raster(counts, found.categories, found.extent, found.n_mapped - int(counts.sum()))


def check_rows(parts: Iterable[MapPart]) -> str | None:
    """What is wrong if some partition's rows are not all on the map or in the quarantine."""
    for part in parts:
        n_found = part.n_mapped + sum(part.reasons.values())
        if part.n_rows != n_found:
            return f"partition {part.number} has {part.n_rows} rows, {n_found} are accounted for"
    return None


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of the counts, by name."""
    totals: Counter[str] = Counter()
    for found in counts:
        totals.update(found)
    return dict(totals)

"""A lake to try Lakemap on: deformed handwritten digits in Parquet, a few rows bad on purpose."""

import contextlib
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from pipeline.errors import ConfigError, InputError
from pipeline.partitions import Partition

SIDE = 8
WIDTH = SIDE * SIDE
# One row group is one chunk, and the most that is in memory: 300 MB while it is generated.
CHUNK_ROWS = 65_536
BAD_EVERY = 500
BAD_KINDS = ("null", "nan", "infinity", "short", "long")
HELD_OUT_SHARE = 0.1
# Standard deviations of the deformations. Measured: 10-NN accuracy in the raw 64-d space of
# held-out rows against 20,000 others is 0.976 to 0.984 (three seeds); half as much again, 0.96.
TURN_DEGREES, SCALE_LOG, SHIFT_PIXELS, STROKE_LOG, NOISE = 6.0, 0.05, 0.25, 0.2, 0.03
RECIPE_KEY = b"lakemap.demo"
SCHEMA = pa.schema(
    [
        ("digit_id", pa.int64()),
        ("embedding", pa.list_(pa.field("element", pa.float32()))),
        ("digit", pa.int8()),
        ("held_out", pa.bool_()),
    ]
)


class DemoLake(NamedTuple):
    """What the lake holds; bad rows count as held out too when their digit is."""

    n_rows: int
    n_bad: int
    n_holdout: int
    n_files: int


class Digits(NamedTuple):
    """The real digits: pixels (n, 10, 10) with a blank border, labels and held-out flags (n,)."""

    pixels: NDArray[np.float32]
    labels: NDArray[np.int8]
    held_out: NDArray[np.bool_]


class Rows(NamedTuple):
    """Generated rows: pixels (n, 64) in 0..1 and the number (n,) of the real digit of each."""

    pixels: NDArray[np.float32]
    sources: NDArray[np.int64]


def write_demo_lake(
    folder: Path,
    n_rows: int,
    n_files: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> DemoLake:
    """What the lake in folder holds, after writing the files that are not there yet.

    Files `part-00000.parquet`... depend on the arguments alone, and a finished one is never
    touched again. progress is told how many rows each step adds, kept files included.
    """
    if not 1 <= n_files <= n_rows:
        raise ConfigError(f"demo: {n_rows:,} rows do not make {n_files:,} files; ask for fewer")
    folder.mkdir(parents=True, exist_ok=True)
    recipes = {
        f"part-{part.index:05d}.parquet": (part, _recipe(part, seed))
        for part in _split_files(n_rows, n_files)
    }
    kept = _clear_folder(folder, {name: recipe for name, (_, recipe) in recipes.items()})
    tell = progress or (lambda _: None)
    n_holdout = 0
    for name, (part, recipe) in recipes.items():
        if name in kept:
            n_holdout += _count_held_out(folder / name)
            tell(part.n_rows)
        else:
            n_holdout += _write_file(folder / name, part, seed, recipe, tell)
    return DemoLake(n_rows, int(find_bad(0, n_rows).size), n_holdout, n_files)


def deform_digits(n_rows: int, rng: np.random.Generator, digits: Digits) -> Rows:
    """Rows of real digits that are turned, scaled, shifted, drawn thicker or thinner, and noisy."""
    sources = rng.integers(len(digits.labels), size=n_rows)
    draws = rng.standard_normal((5, n_rows), dtype=np.float32)
    x, y = _source_places(draws[:4])
    pixels = _sample_bilinear(digits.pixels, sources, x, y)
    # A power moves the grey rim of a stroke towards ink or paper, hence thicker or thinner.
    pixels **= np.exp(STROKE_LOG * draws[4])[:, None]
    pixels += NOISE * rng.standard_normal(pixels.shape, dtype=np.float32)
    # 256 levels, like any scanned image: they fit a Parquet dictionary, a quarter of the bytes.
    pixels = np.rint(np.clip(pixels, 0, 1) * np.float32(255)) / np.float32(255)
    return Rows(pixels, sources)


@cache
def load_sources(seed: int) -> Digits:
    """The 1,797 digits of scikit-learn, a tenth of each class held out."""
    bunch = load_digits()
    pixels = np.pad(bunch.images.astype(np.float32) / 16, ((0, 0), (1, 1), (1, 1)))
    labels = bunch.target.astype(np.int8)
    rng = np.random.default_rng([seed, crc32(b"demo")])
    held_out = np.zeros(len(labels), dtype=bool)
    for label in range(10):
        members = rng.permutation(np.flatnonzero(labels == label))
        held_out[members[: round(HELD_OUT_SHARE * len(members))]] = True
    return Digits(pixels, labels, held_out)


def _source_places(draws: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The place (x, y) each pixel is taken from, two arrays (n, 64): the inverse affine map."""
    angle = math.radians(TURN_DEGREES) * draws[0, :, None]
    zoom = np.exp(SCALE_LOG * draws[1, :, None])
    centre = np.float32((SIDE - 1) / 2)
    row, column = np.indices((SIDE, SIDE), dtype=np.float32).reshape(2, 1, WIDTH) - centre
    cos, sin = np.cos(angle) / zoom, np.sin(angle) / zoom
    x = cos * column + sin * row + centre - SHIFT_PIXELS * draws[2, :, None]
    y = cos * row - sin * column + centre - SHIFT_PIXELS * draws[3, :, None]
    return x, y


def _sample_bilinear(
    images: NDArray[np.float32],
    sources: NDArray[np.int64],
    x: NDArray[np.float32],
    y: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Intensity (n, 64) of images[sources] at the places x, y; paper is 0 beyond the border."""
    side = images.shape[1]
    # One blank pixel lies around each image, so a place beyond it may as well be on it.
    x, y = np.clip(x + 1, 0, side - 1), np.clip(y + 1, 0, side - 1)
    left = np.minimum(x.astype(np.int64), side - 2)
    low = np.minimum(y.astype(np.int64), side - 2)
    right_share, high_share = x - left.astype(np.float32), y - low.astype(np.float32)
    corner = (sources[:, None] * side + low) * side + left
    flat = images.ravel()
    below = flat[corner] * (1 - right_share) + flat[corner + 1] * right_share
    corner += side
    above = flat[corner] * (1 - right_share) + flat[corner + 1] * right_share
    mixed: NDArray[np.float32] = below * (1 - high_share) + above * high_share
    return mixed


def find_bad(start: int, stop: int) -> NDArray[np.int64]:
    """Row numbers within start..stop that are made bad: one in each 500, at a changing place."""
    blocks = np.arange(start // BAD_EVERY, -(-stop // BAD_EVERY))
    rows = blocks * BAD_EVERY + blocks * 337 % BAD_EVERY
    return rows[(rows >= start) & (rows < stop)]


def _vectors(pixels: NDArray[np.float32], start: int) -> Any:
    """The embedding column of the rows from number start on, as an Arrow list array."""
    n_rows = len(pixels)
    bad = find_bad(start, start + n_rows)
    kinds = bad // BAD_EVERY % len(BAD_KINDS)
    bad_rows = {kind: bad[kinds == i] - start for i, kind in enumerate(BAD_KINDS)}
    wide = np.concatenate([pixels, pixels[:, :1]], axis=1)
    wide[bad_rows["nan"], bad_rows["nan"] % WIDTH] = np.nan
    wide[bad_rows["infinity"], bad_rows["infinity"] % WIDTH] = np.inf
    widths = np.full(n_rows, WIDTH)
    widths[bad_rows["null"]], widths[bad_rows["short"]] = 0, WIDTH - 1
    widths[bad_rows["long"]] = WIDTH + 1
    offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    values = wide[np.arange(WIDTH + 1) < widths[:, None]]
    return pa.ListArray.from_arrays(
        offsets, values, type=SCHEMA.field("embedding").type, mask=pa.array(widths == 0)
    )


def _make_chunk(part: Partition, key: list[int], digits: Digits) -> Any:
    """The rows of part as an Arrow table; key seeds their generator."""
    pixels, sources = deform_digits(part.n_rows, np.random.default_rng(key), digits)
    columns = [
        pa.array(np.arange(part.start, part.stop)),
        _vectors(pixels, part.start),
        pa.array(digits.labels[sources]),
        pa.array(digits.held_out[sources]),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _write_file(
    path: Path, part: Partition, seed: int, recipe: bytes, tell: Callable[[int], None]
) -> int:
    """Number of held-out rows of the file at path, written chunk by chunk, then renamed."""
    digits = load_sources(seed)
    partial = path.with_name(f".{path.name}.tmp")
    n_holdout = 0
    try:
        with pq.ParquetWriter(
            partial,
            SCHEMA.with_metadata({RECIPE_KEY: recipe}),
            compression="zstd",
            use_dictionary=["embedding.list.element", "digit"],
        ) as writer:
            for index, start in enumerate(range(part.start, part.stop, CHUNK_ROWS)):
                chunk = Partition(index, start, min(start + CHUNK_ROWS, part.stop))
                table = _make_chunk(chunk, [seed, crc32(b"demo"), part.index, index], digits)
                writer.write_table(table)
                n_holdout += int(table["held_out"].to_numpy().sum())
                tell(chunk.n_rows)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return n_holdout


def _split_files(n_rows: int, n_files: int) -> list[Partition]:
    """The rows of each file, as even as can be."""
    edges = [n_rows * i // n_files for i in range(n_files + 1)]
    return [Partition(i, edges[i], edges[i + 1]) for i in range(n_files)]


def _recipe(part: Partition, seed: int) -> bytes:
    """What a file is made from; kept inside it, so that another demo's file is never taken for it.

    Raise its number when the generator gives other rows.
    """
    return f"1 seed={seed} file={part.index} rows={part.start}..{part.stop}".encode()


def _clear_folder(folder: Path, recipes: dict[str, bytes]) -> set[str]:
    """Names of finished files to keep, after removing what another demo left in the folder.

    A Parquet file that no demo wrote is somebody's data: it is refused, never replaced.
    """
    found = {path.name: _read_recipe(path) for path in sorted(folder.glob("*.parquet"))}
    foreign = [name for name, recipe in found.items() if recipe is None]
    if foreign:
        raise InputError(
            f"demo: {folder / foreign[0]} is not a file of the demo lake; choose an empty folder"
        )
    kept = {name for name, recipe in found.items() if recipe == recipes.get(name)}
    for path in [folder / name for name in found if name not in kept]:
        path.unlink()
    for path in folder.glob(".part-*.parquet.tmp"):
        path.unlink()
    return kept


def _read_recipe(path: Path) -> bytes | None:
    """The recipe inside the Parquet file at path, None if it has none or cannot be read."""
    with contextlib.suppress(pa.ArrowInvalid):
        recipe: bytes | None = (pq.read_schema(path).metadata or {}).get(RECIPE_KEY)
        return recipe
    return None


def _count_held_out(path: Path) -> int:
    """Number of held-out rows of a finished file."""
    return int(pq.read_table(path, columns=["held_out"])["held_out"].to_numpy().sum())

"""What has changed in a lake since a map of it was published, and how the changed rows are read.

Partitions whose files are as they were are kept. All other rows are planned anew: those of new and
changed files, and those that shared a partition with a file that changed or went.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pipeline.errors import InputError
from pipeline.lake.files import InputFile, Snapshot, Source, is_zarr
from pipeline.lake.parquet import plan_again
from pipeline.lake.rows import LakePlan, Like
from pipeline.lake.zarr import piece_keys, plan_zarr, zarr_mark
from pipeline.partitions import Partition, Piece

Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class KnownLake:
    """A lake as it was when it was mapped; `mark` is of a Zarr store's metadata, else empty."""

    files: Mapping[str, InputFile]
    parts: Sequence[Pieces]
    width: int
    dtype: str
    mark: str


@dataclass(frozen=True)
class Changes:
    """Files and rows of the lake, bad rows included, by what became of them.

    read now = new + changed + kept; `again` are those of the kept that are embedded once more.
    """

    files_new: int = 0
    files_changed: int = 0
    files_removed: int = 0
    files_kept: int = 0
    rows_new: int = 0
    rows_changed: int = 0
    rows_removed: int = 0
    rows_kept: int = 0
    rows_again: int = 0


@dataclass(frozen=True)
class Delta:
    """Parts that stay, by position; the plan of all other rows; the files that the plan reads."""

    kept: list[int]
    plan: LakePlan
    files: tuple[InputFile, ...]
    changes: Changes = field(default_factory=Changes)

    @property
    def digest(self) -> str:
        """SHA-256 of what is to be read: which rows of which files."""
        lines = [f"{file.path}\0{file.size}\0{file.etag}" for file in self.files]
        lines += [f"{part.index}\0{part.pieces}" for part in self.plan.partitions]
        lines += [f"{self.plan.width}\0{self.plan.dtype}"]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def lake_mark(source: Source, snapshot: Snapshot) -> str:
    """The mark of the lake's metadata, see KnownLake."""
    return zarr_mark(source) if is_zarr(snapshot.files) else ""


def find_delta(
    source: Source, snapshot: Snapshot, known: KnownLake, *, reuse: bool = True
) -> Delta | None:
    """What is to be done so that the map is of today's files; None if it is already.

    Without `reuse` nothing is kept: every row is planned.
    """
    today = {file.path: file for file in snapshot.files}
    if reuse and today == known.files:
        return None
    find = _zarr_delta if is_zarr(snapshot.files) else _parquet_delta
    delta = find(source, snapshot, known, reuse)
    if reuse and not delta.plan.partitions and len(delta.kept) == len(known.parts):
        return None  # files that hold no rows came, went or changed
    counts = _count_files(today, known.files) | _count_rows(delta, known, today)
    return Delta(delta.kept, delta.plan, delta.files, Changes(**counts))


def _parquet_delta(source: Source, snapshot: Snapshot, known: KnownLake, reuse: bool) -> Delta:
    unchanged = {f.path: f for f in snapshot.files if known.files.get(f.path) == f}
    is_kept = [reuse and all(p.path in unchanged for p in pieces) for pieces in known.parts]
    again = [
        piece
        for pieces, kept in zip(known.parts, is_kept, strict=True)
        for piece in pieces
        if not kept and piece.path in unchanged
    ]
    fresh = tuple(file for file in snapshot.files if file.path not in unchanged)
    like = Like(known.width, known.dtype, next(iter(unchanged.values()), None))
    plan = plan_again(source, fresh, again, like)
    read = {file.path: file for file in fresh} | {p.path: unchanged[p.path] for p in again}
    return Delta(_positions(is_kept), plan, tuple(read[path] for path in sorted(read)))


def _zarr_delta(source: Source, snapshot: Snapshot, known: KnownLake, reuse: bool) -> Delta:
    plan, today = plan_zarr(source, snapshot), {file.path: file for file in snapshot.files}
    if plan.width != known.width:
        raise InputError(
            f"input {source.path}: the array has {plan.width} columns, the published map was made "
            f"of {known.width}; lakemap run makes a new map"
        )
    pieces = [pieces[0] for pieces in known.parts]
    same = reuse and zarr_mark(source) == known.mark
    keys = piece_keys(source, pieces) if same else [[] for _ in pieces]
    is_kept = [
        bool(names) and all(today.get(name) == known.files.get(name) for name in names)
        for names in keys
    ]
    kept = sorted((p.start, p.stop) for p, stays in zip(pieces, is_kept, strict=True) if stays)
    name = plan.partitions[0].pieces[0].path
    bounds = [part.start for part in plan.partitions] + [plan.n_rows]
    left = [Piece(name, -1, start, stop) for start, stop in uncovered(bounds, kept)]
    numbered = number_pieces([(piece,) for piece in left])
    n_rows = numbered[-1].stop if numbered else 0
    rest = LakePlan(
        numbered, n_rows, plan.width, plan.dtype, plan.n_files, plan.row_bytes, plan.warnings
    )
    return Delta(_positions(is_kept), rest, snapshot.files)


def uncovered(bounds: Sequence[int], covered: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges between rising bounds, less the covered ranges, which are sorted and disjoint."""
    edges, holes, at = list(bounds), [], bounds[0]
    for start, stop in covered:
        holes.append((at, start))
        at = stop
    holes.append((at, bounds[-1]))
    found: list[tuple[int, int]] = []
    cursor = 0
    for start, stop in holes:
        while cursor < len(edges) and edges[cursor] <= start:
            cursor += 1
        inner = []
        while cursor < len(edges) and edges[cursor] < stop:
            inner.append(edges[cursor])
            cursor += 1
        if start < stop:
            found += pairwise([start, *inner, stop])
    return found


def number_pieces(packs: Iterable[Pieces]) -> list[Partition]:
    """The packs as partitions, numbered from 0, their rows counted one after the other."""
    parts: list[Partition] = []
    start = 0
    for index, pack in enumerate(packs):
        stop = start + sum(piece.n_rows for piece in pack)
        parts.append(Partition(index, start, stop, pack))
        start = stop
    return parts


def _positions(flags: Iterable[bool]) -> list[int]:
    return [position for position, flag in enumerate(flags) if flag]


def _count_files(today: Mapping[str, InputFile], before: Mapping[str, InputFile]) -> dict[str, int]:
    both = today.keys() & before.keys()
    kept = sum(today[path] == before[path] for path in both)
    return {
        "files_new": len(today) - len(both),
        "files_changed": len(both) - kept,
        "files_removed": len(before) - len(both),
        "files_kept": kept,
    }


def _count_rows(delta: Delta, known: KnownLake, today: Mapping[str, InputFile]) -> dict[str, int]:
    """Rows by what became of their files; of a Zarr array by their numbers."""
    planned = [piece for part in delta.plan.partitions for piece in part.pieces]
    before = [piece for pieces in known.parts for piece in pieces]
    staying = sum(piece.n_rows for position in delta.kept for piece in known.parts[position])
    rows: Counter[str] = Counter()
    if is_zarr(today.values()):
        n_before, n_now = sum(piece.n_rows for piece in before), staying + delta.plan.n_rows
        new = sum(max(0, piece.stop - max(piece.start, n_before)) for piece in planned)
        rows.update(new=new, changed=delta.plan.n_rows - new, removed=max(0, n_before - n_now))
    else:
        for piece in planned:
            was, now = known.files.get(piece.path), today[piece.path]
            rows["new" if was is None else "again" if was == now else "changed"] += piece.n_rows
        rows["removed"] = sum(piece.n_rows for piece in before if piece.path not in today)
    rows["kept"] = staying + rows["again"]
    return {f"rows_{name}": rows[name] for name in ("new", "changed", "removed", "kept", "again")}

"""A week of nightly refreshes of a growing lake, each night checked row for row; `make week`.

A new file or two every night, and once each: nothing new, bad files, deletions, a crash, digits
that the encoder never saw, a map that has to be taken back.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import typer
from numpy.typing import NDArray

from encoders.artifact import Encoder
from jobs import work
from jobs.demo_lake import WIDTH, write_demo_lake
from pipeline import history
from pipeline.errors import LakemapError, StageError
from pipeline.job_file import load_job
from pipeline.stores import Folder

N_FILES = 16
NEW_DIGIT = 0  # is not in the lake before its day; a 9 looks like a known digit to small samples
PATIENCE_SECONDS = 300.0
JOB = """\
# Made by jobs.week. Refresh it with: lakemap refresh {path}
name: week
input:
  path: lake
  vector: embedding
  id: digit_id
  label: digit
  holdout: held_out
  max_bad_fraction: 0.03
  partition_bytes: 256KiB   # small, so that a small lake has many partitions
output: maps
sample: {{rows: 10000}}
train: {{steps: 1000}}
"""


class Night(NamedTuple):
    """What happened, in one line; the published run, and the rows that were found right."""

    day: str
    story: str
    run: str
    n_rows: int


@dataclass(frozen=True)
class Week:
    """The week's folder: files that are still to come, the lake, the job and its maps."""

    folder: Path
    overrides: tuple[str, ...] = ()

    @property
    def lake(self) -> Path:
        """Where the lake is."""
        return self.folder / "lake"

    @property
    def job_file(self) -> Path:
        """The job."""
        return self.folder / "job.yaml"

    @property
    def root(self) -> Folder:
        """Where its maps are."""
        return Folder(str(self.folder / "maps"))

    @property
    def current(self) -> str:
        """The published run."""
        return str(history.current_run(self.root))

    def file(self, index: int) -> Path:
        """A file that is still to come."""
        return self.folder / f"coming/part-{index:05d}.parquet"

    def refresh(self) -> str:
        """What `lakemap refresh` says and does, in a few words."""
        try:
            made = work.refresh_job(load_job(self.job_file, self.overrides))
        except LakemapError as error:
            return f"refused ({error.exit_code}): {error}"
        if not made.changed:
            return "nothing to do"
        found = made.metrics
        if "compared_rows" in found and "rows_new" not in found:
            return (
                f"{', '.join(found['drift_reasons'])}: encoder trained again, rows moved by "
                f"{found['displacement_median']:.1%} (median), {found['displacement_p95']:.1%} "
                "(95th percentile) of the map's diameter"
            )
        if "rows_new" not in found:
            return f"{found['rows_mapped']:,} rows mapped, encoder trained"
        changes = {n: found[f"rows_{n}"] for n in ("new", "changed", "removed", "kept", "bad")}
        return ", ".join(f"{count:,} {name}" for name, count in changes.items() if count)


def make_week(folder: Path, n_rows: int, overrides: tuple[str, ...] = ()) -> Week:
    """A week that is still to come: no lake yet."""
    week = Week(folder, overrides)
    if week.lake.exists() or (folder / "maps").exists():
        raise StageError(f"week: {folder} is in use; name another folder or remove it")
    write_demo_lake(folder / "coming", n_rows, N_FILES)
    week.lake.mkdir()
    week.job_file.write_text(JOB.format(path=week.job_file))
    return week


def arrive(week: Week, *indices: int) -> None:
    """Files of known digits come into the lake."""
    for index in indices:
        table = pq.read_table(week.file(index))
        known = table.filter(pc.not_equal(table["digit"], NEW_DIGIT))
        pq.write_table(known, week.lake / week.file(index).name, row_group_size=1000)


def first_map(week: Week) -> str:
    """The first map of six files."""
    arrive(week, 0, 1, 2, 3, 4, 5)
    return week.refresh()


def ordinary_day(week: Week) -> str:
    """Two new files."""
    arrive(week, 6, 7)
    return week.refresh()


def quiet_day(week: Week) -> str:
    """Nothing new: nothing is written."""
    before = _listing(week.folder / "maps")
    said = week.refresh()
    if _listing(week.folder / "maps") != before:
        raise StageError("week: a refresh with nothing to do wrote to its output")
    return said


def bad_day(week: Week) -> str:
    """A file cut short, then one with too many bad rows, then the file as it should be."""
    log, place = history.entries(week.root), week.lake / week.file(8).name
    place.write_bytes(week.file(8).read_bytes()[:1000])
    cut = week.refresh()
    table = pq.read_table(week.file(8))
    bad = pa.array([None] * (table.num_rows // 2), table["embedding"].type)
    rest = table["embedding"].combine_chunks()[len(bad) :]
    column = pa.concat_arrays([bad, rest])
    pq.write_table(table.set_column(1, table.schema.field("embedding"), column), place)
    spoilt = week.refresh()
    if history.entries(week.root) != log:
        raise StageError("week: a refused refresh was published")
    arrive(week, 8)
    return f"{cut[:11]}, then {spoilt[:11]}; corrected: {week.refresh()}"


def deletions(week: Week) -> str:
    """Two files go, one is written anew with other rows, one is new."""
    for index in (1, 4):
        (week.lake / week.file(index).name).unlink()
    table = pq.read_table(week.lake / week.file(2).name)
    pq.write_table(table.slice(100), week.lake / week.file(2).name)
    arrive(week, 9)
    return week.refresh()


def crash(week: Week) -> str:
    """Three new files; the driver is killed half way, and the command is given again."""
    arrive(week, 10, 11, 12)
    log = history.entries(week.root)
    n_before = len(_commits(week))
    flags = [word for setting in week.overrides for word in ("--set", setting)]
    with (week.folder / "crash.log").open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", "refresh", str(week.job_file), *flags],
            stdout=output,
            stderr=output,
        )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(_commits(week)) == n_before and driver.poll() is None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.002)
    driver.send_signal(signal.SIGKILL)
    if driver.wait() != -signal.SIGKILL or history.entries(week.root) != log:
        raise StageError(f"week: the driver was not killed half way; see {output.name}")
    return f"killed half way, then {week.refresh()}"


def new_cluster(week: Week) -> str:
    """A digit that the encoder never saw: it is trained again, and the map stays in place."""
    for index in range(N_FILES - 3):
        table = pq.read_table(week.file(index))
        new = table.filter(pc.equal(table["digit"], NEW_DIGIT))
        pq.write_table(new, week.lake / f"new-{week.file(index).name}")
    return week.refresh()


def taken_back(week: Week) -> str:
    """Somebody else's files come into the lake; the map is rolled back, and the files go."""
    good = week.current
    table = pq.read_table(week.file(13))
    ids = pc.add(table["digit_id"], 10**9)
    pq.write_table(table.set_column(0, "digit_id", ids), week.lake / "mistake.parquet")
    said = week.refresh()
    work.roll_back(load_job(week.job_file, week.overrides), None)
    (week.lake / "mistake.parquet").unlink()
    if week.current != good:
        raise StageError(f"week: {week.current} was rolled back to, not {good}")
    return f"{said}; rolled back; then {week.refresh()}"


DAYS: dict[str, Callable[[Week], str]] = {
    "sunday": first_map,
    "monday": ordinary_day,
    "tuesday": quiet_day,
    "wednesday": bad_day,
    "thursday": deletions,
    "friday": crash,
    "saturday": new_cluster,
    "next sunday": taken_back,
}


def live(week: Week, day: str) -> Night:
    """One night: what comes, the refresh, and the check of the whole map."""
    story = DAYS[day](week)
    return Night(day, story, week.current, check_map(week))


def check_map(week: Week) -> int:
    """Rows of the map, which is bitwise what the run's encoder makes of the whole lake."""
    run = week.folder / "maps/runs" / week.current
    table = pq.read_table(run / "map")
    order = np.argsort(table["id"].to_numpy())
    xy = np.stack([table["x"].to_numpy()[order], table["y"].to_numpy()[order]], axis=1)
    ids, vectors = _read_lake(week.lake)
    if not np.array_equal(table["id"].to_numpy()[order], ids):
        raise StageError(f"week: {run} has {len(order)} rows, the lake {len(ids)}, or other ones")
    if not np.array_equal(xy, Encoder.load(run / "model").embed(vectors)):
        raise StageError(f"week: {run}: rows are not where the encoder puts them")
    return len(ids)


def _read_lake(lake: Path) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids and vectors of all good rows, in the order of their ids."""
    columns = ["digit_id", "embedding"]
    tables = [pq.read_table(path, columns=columns) for path in sorted(lake.glob("*.parquet"))]
    table = pa.concat_tables(tables)
    whole = pc.equal(pc.list_value_length(table["embedding"]), WIDTH)
    table = table.filter(pc.fill_null(whole, False)).sort_by("digit_id")
    values: Any = table["embedding"].combine_chunks().flatten()
    vectors = values.to_numpy(zero_copy_only=False).reshape(-1, WIDTH)
    finite = np.isfinite(vectors).all(axis=1)
    return table["digit_id"].to_numpy()[finite], vectors[finite]


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def _commits(week: Week) -> list[Path]:
    return list((week.folder / "maps").glob("stores/embed/*/commits/*"))


def watch(
    folder: Annotated[Path, typer.Option(help="Where the week happens.")] = Path("week"),
    rows: Annotated[int, typer.Option(min=2000, help="Rows that come in all.")] = 80_000,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="As for run.")] = None,
) -> None:
    """Live through the week: one line and one picture per night."""
    week = make_week(folder, rows, tuple(overrides or ()))
    (folder / "pictures").mkdir()
    for number, day in enumerate(DAYS):
        started = time.monotonic()
        night = live(week, day)
        picture = folder / f"pictures/{number}-{day.replace(' ', '-')}.png"
        shutil.copyfile(folder / f"maps/runs/{night.run}/map.png", picture)
        seconds = time.monotonic() - started
        line = f"{day + ':':<12} {night.story}; {night.n_rows:,} rows as from scratch"
        typer.echo(f"{line}  ({seconds:.0f} s, {os.path.relpath(picture)})")


if __name__ == "__main__":
    typer.run(watch)

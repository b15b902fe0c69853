"""What is wrong with a job or a lake is said in one line, with exit 2, and nothing is published."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data import Ran, call_cli, make_blobs, run_process, write_job, write_parquet


def lists(rows: list[Any], kind: Any) -> Callable[[Path], None]:
    """Writes a lake with one file of these vectors."""

    def write(lake: Path) -> None:
        lake.mkdir()
        table = pa.table({"item": range(len(rows)), "embedding": pa.array(rows, pa.list_(kind))})
        pq.write_table(table, lake / "a.parquet")

    return write


def good(lake: Path, n_rows: int = 60) -> None:
    write_parquet(lake, make_blobs(n_rows, 4).vectors, n_files=2)


def nothing(_: Path) -> None:
    return


def few(lake: Path) -> None:
    good(lake, 15)


def cut_short(lake: Path) -> None:
    good(lake)
    file = lake / "part-1.parquet"
    file.write_bytes(file.read_bytes()[:-20])


def in_the_way(lake: Path) -> None:
    good(lake)
    (lake.parent / "maps").write_text("a file")


def not_parquet(lake: Path) -> None:
    lake.mkdir()
    (lake / "rows.csv").write_text("1,2\n")


FLOATS, TEXT = pa.float32(), pa.string()
SQUARE = np.arange(240.0).reshape(60, 4).tolist()

# name: what writes the lake, settings laid over the job, what the line must say
LAKES: dict[str, tuple[Callable[[Path], None], dict[str, Any], str]] = {
    "missing path": (nothing, {}, "lake: no such file or folder"),
    "empty folder": (Path.mkdir, {}, "lake: no files there"),
    "no parquet": (not_parquet, {}, "none of them .parquet"),
    "no such column": (
        good,
        {"input": {"vector": "embeddings"}},
        "column 'embeddings' does not exist; the nearest are embedding",
    ),
    "no such label": (good, {"input": {"label": "color"}}, "column 'color' does not exist"),
    "strings": (lists([["a"]] * 60, TEXT), {}, "column 'embedding' is list"),
    "widths differ": (
        lists([*SQUARE[:50], *([[1.0]] * 10)], FLOATS),
        {},
        "10 of 60 rows are bad (16.67%), at most 1.00% may be (width 1, expected 4: 10)",
    ),
    "too many NaN": (
        lists([*SQUARE[:58], [np.nan] * 4, [np.nan] * 4], FLOATS),
        {},
        "2 of 60 rows are bad (3.33%), at most 1.00% may be (not finite: nan: 2)",
    ),
    "all rows bad": (lists([None] * 60, FLOATS), {}, "no row of column 'embedding' holds a number"),
    "too few rows": (few, {}, "15 rows, neighbors.k 15 needs 16"),
    "file cut short": (cut_short, {}, "part-1.parquet: not a Parquet file, or one cut short"),
    "identical rows": (lists([[1.0, 2.0]] * 60, FLOATS), {}, "all 60 rows are identical"),
    "perplexity": (
        good,
        {"affinity": {"perplexity": 6}},
        "affinity.perplexity 6 needs 18 neighbors per row, neighbors.k is 15",
    ),
    "unknown key": (
        good,
        {"neighbors": {"overlp": 2}},
        "unknown key neighbors.overlp; did you mean neighbors.overlap?",
    ),
    "unknown section": (good, {"trian": {"steps": 2}}, "unknown key trian; did you mean train?"),
    "wrong type": (good, {"train": {"steps": "many"}}, "train.steps is 'many'; it must be"),
    "out of range": (good, {"train": {"steps": 0}}, "train.steps is 0; it must be"),
    "file in the way": (in_the_way, {}, "maps is a file; name a folder"),
    "memory": (good, {"cluster": {"memory": "64MiB"}}, "raise cluster.memory"),
}


def check(ran: Ran, said: str, output: Path) -> None:
    """One line on stderr that says it, nothing on stdout, exit 2, nothing published."""
    (line,) = [line for line in ran.err.splitlines() if " INFO " not in line]
    assert line == ran.err.splitlines()[-1]
    assert line.startswith("lakemap: ")
    assert said in line
    assert "Traceback" not in ran.err
    assert (ran.code, ran.out) == (2, "")
    assert not output.is_dir() or not {"CURRENT", "runs"} & {p.name for p in output.iterdir()}


def make_case(name: str, folder: Path) -> Path:
    write, settings, _ = LAKES[name]
    write(folder / "lake")
    return write_job(folder / "job.yaml", folder / "lake", folder / "maps", **settings)


@pytest.mark.parametrize("name", LAKES)
def test_a_bad_lake_or_job(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_case(name, tmp_path)
    check(call_cli(capsys, "run", job), LAKES[name][2], tmp_path / "maps")


@pytest.mark.parametrize("name", ["too many NaN", "file cut short"])
def test_a_process_says_the_same(name: str, tmp_path: Path) -> None:
    job = make_case(name, tmp_path)
    check(run_process("run", job), LAKES[name][2], tmp_path / "maps")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("input: [", "job.yaml, line 1: not YAML"),
        ("a: b: c", "job.yaml, line 1: not YAML (mapping values are not allowed here)"),
        ("- 1\n", "job.yaml: holds a list, a job file holds sections"),
        ("", "job.yaml: holds nothing, a job file holds sections"),
        ("output: maps\n", "input is missing"),
        ("input: {path: lake}\n", "output is missing"),
        ("input: lake\noutput: maps\n", "input is a str; it must be a section"),
        (None, "job.yaml: cannot be read"),
    ],
)
def test_a_bad_job_file(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    if text is not None:
        job.write_text(text)
    check(call_cli(capsys, "run", job), said, tmp_path / "maps")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "JOB", "--set", "train.steps"], "--set train.steps: needs the form"),
        (["run", "JOB", "--set", "train.step=3"], "unknown key train.step"),
        (["run", "JOB", "--set", "output.deep=3"], "output is a str, not a section"),
        (["run", "JOB", "--set", "train.steps=[1"], "--set train.steps=[1"),
        (["stage", "polish", "JOB"], "stage polish: unknown; the stages are ingest, sample"),
        (["plan", "JOB", "--set", "input.vector=x"], "column 'x' does not exist"),
        (["status", "JOB", "--set", "input.path=x"], "no such file or folder"),
        (["report", "JOB"], "no published map"),
    ],
)
def test_a_bad_command(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good(tmp_path / "lake")
    job = write_job(tmp_path / "job.yaml", tmp_path / "lake", tmp_path / "maps")
    ran = call_cli(capsys, *(str(job) if word == "JOB" else word for word in arguments))
    check(ran, said, tmp_path / "maps")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "job.yaml", "--fast"], "No such option: --fast"),
        (["run"], "Missing argument 'JOB'"),
        (["fly"], "No such command 'fly'"),
        (["demo", "--rows", "ten"], "Invalid value for '--rows'"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    ran = call_cli(capsys, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert "Traceback" not in ran.err

"""The command line: what each command says, where, and what it leaves behind."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from jobs import flow
from pipeline.config import InputConfig, Job
from pipeline.job_file import load_job
from tests.data import (
    Ran,
    call_cli,
    make_blobs,
    run_process,
    small_blocks,
    tree,
    write_job,
    write_parquet,
)

COMMANDS = [
    "demo",
    "init",
    "plan",
    "run",
    "refresh",
    "rollback",
    "history",
    "stage",
    "status",
    "report",
    "verify",
    "gc",
]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _small_blocks() -> Iterator[None]:
    with small_blocks():
        yield


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write_parquet(tmp_path / "lake", *make_blobs(300), n_bad=2, n_files=2)
    return write_job(
        tmp_path / "job.yaml",
        tmp_path / "lake",
        tmp_path / "maps",
        input={"label": "blob"},
        sample={"rows": 200},
        train={"steps": 20},
    )


def document(ran: Ran) -> dict[str, Any]:
    """The one JSON document on stdout."""
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_help_of_every_command(capsys: Capture) -> None:
    whole = call_cli(capsys, "--help")
    assert whole.code == 0
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w+", whole.out, re.MULTILINE), command
        ran = call_cli(capsys, command, "--help")
        assert (ran.code, ran.err) == (0, "")
        assert re.match(rf"\s*Usage: .*{command} \[OPTIONS\]", ran.out)
    nothing = call_cli(capsys)
    assert "Usage: " in nothing.out + nothing.err


def test_help_imports_no_heavy_module() -> None:
    code = (
        "import sys; sys.argv = ['lakemap', 'run', '--help']\n"
        "from jobs.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'faiss', 'dask', 'distributed', 'pyarrow', 'numpy', 'zarr', 'sklearn'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stderr.strip() == "[]"


def test_init_writes_the_defaults_and_never_overwrites(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "shop.yaml"
    ran = call_cli(
        capsys, "init", path, "--input", "s3://shop/items", "--vector", "v", "--output", "out"
    )
    assert (ran.code, ran.err) == (0, "")
    assert f"lakemap plan {path}" in ran.out
    expected = Job(
        input=InputConfig(path="s3://shop/items", vector="v"),
        output=str(tmp_path / "out"),
        name="shop",
    )
    assert load_job(path) == expected
    text = path.read_text()
    again = call_cli(capsys, "init", path)
    assert again.code == 2
    assert "exists already" in again.err
    assert path.read_text() == text
    lost = call_cli(capsys, "init", tmp_path / "nowhere/job.yaml")
    assert lost.code == 2
    assert "cannot be written" in lost.err


def test_the_template_names_every_setting(tmp_path: Path, capsys: Capture) -> None:
    """A setting is in it with its default or, where that is None, as a comment."""
    path = tmp_path / "job.yaml"
    call_cli(capsys, "init", path)
    shown = yaml.safe_load(path.read_text())
    template = files("jobs").joinpath("template.yaml").read_text()
    section, commented = "", set()
    for line in template.splitlines():
        section = line.split(":")[0] if re.match(r"\w+:", line) else section
        if match := re.match(r"  # (\w+): ", line):
            commented.add(f"{section}.{match[1]}")
    named = commented | {f"{s}.{key}" for s, keys in shown.items() for key in keys if s != "output"
                         and isinstance(keys, dict)}  # fmt: skip
    defaults = default_values(Job)
    missing = {name for name in defaults if name not in named and "encoder" not in name}
    assert not missing
    assert {name: defaults[name] for name in commented} == dict.fromkeys(commented)
    match = re.search(r"# samples: (\d+)", template)
    assert match is not None
    assert int(match[1]) == defaults["train.steps"] * defaults["train.batch"] // 2


def default_values(job: type[Any]) -> dict[str, Any]:
    """The default of every setting, by section.key; the lake's path has none."""
    found: dict[str, Any] = {}
    for section, kind in get_type_hints(job).items():
        if is_dataclass(kind):
            for field in fields(kind):
                found[f"{section}.{field.name}"] = getattr(kind, field.name, None)
    return found


def test_plan_has_no_side_effects(job: Path, tmp_path: Path, capsys: Capture) -> None:
    before = tree(tmp_path)
    ran = call_cli(capsys, "plan", job, "--json")
    plan = document(ran)
    assert (ran.code, ran.err) == (0, "")
    assert (plan["rows"], plan["width"], plan["files"], plan["training_rows"]) == (300, 64, 2, 200)
    assert (plan["fits"], plan["shortage"], plan["workers"]) == (True, None, 1)
    assert [stage["name"] for stage in plan["stages"]] == [stage.name for stage in flow.STAGES]
    human = call_cli(capsys, "plan", job)
    assert (human.code, human.err) == (0, "")
    assert "300 rows of width 64 in 2 files" in human.out
    assert human.out.rstrip().endswith("fits")
    assert all(stage.name in human.out for stage in flow.STAGES)
    assert tree(tmp_path) == before
    assert not (tmp_path / "maps").exists()


def test_a_plan_that_does_not_fit(job: Path, capsys: Capture) -> None:
    few = ("--set", "cluster.memory=600MiB")
    ran = call_cli(capsys, "plan", job, "--json", *few)
    assert ran.code == 2
    assert document(ran)["fits"] is False
    assert "raise cluster.memory" in document(ran)["shortage"]
    human = call_cli(capsys, "plan", job, *few)
    assert human.code == 2
    assert "does not fit: " in human.out


def test_stages_one_by_one_make_the_run(job: Path, tmp_path: Path, capsys: Capture) -> None:
    def states() -> list[str]:
        found = document(call_cli(capsys, "status", job, "--json"))
        return [stage["state"] for stage in found["stages"]]

    assert set(states()) == {"waiting"}
    early = call_cli(capsys, "stage", "train", job)
    assert early.code == 2
    assert "stage train: ingest is not finished; run the stages before it" in early.err
    assert set(states()) == {"waiting"}
    assert call_cli(capsys, "report", job).code == 2

    *most, last = flow.GROUPS
    for group in most:
        ran = call_cli(capsys, "stage", group, job)
        assert (ran.code, ran.out) == (0, "")
    assert states() == ["done"] * (len(flow.STAGES) - 1) + ["waiting"]
    assert not (tmp_path / "maps/CURRENT").exists()
    ran = call_cli(capsys, "stage", last, job)
    (run,) = (tmp_path / "maps/runs").iterdir()
    assert ran.out == f"published: {run}\n"
    assert set(states()) == {"done"}

    before = tree(tmp_path)
    whole = call_cli(capsys, "run", job)
    assert whole.code == 0
    assert whole.out.startswith("nothing to do: the published map is up to date\n298 rows mapped")
    assert document(call_cli(capsys, "run", job, "--json"))["run"] == run.name

    report = call_cli(capsys, "report", job)
    assert (report.code, report.err) == (0, "")
    assert "298 rows mapped, 2 quarantined, accuracy " in report.out
    assert f"report:  {run}/report.html" in report.out
    exported = call_cli(capsys, "export", "onnx", job, "--to", tmp_path / "encoder.onnx")
    assert exported.code == 0
    assert "positions (n, 2)" in exported.out
    assert (tmp_path / "encoder.onnx").stat().st_size > 1000
    (tmp_path / "encoder.onnx").unlink()
    lost = call_cli(capsys, "export", "onnx", job, "--to", tmp_path / "nowhere/encoder.onnx")
    assert lost.code == 2
    assert "cannot be written" in lost.err
    status = call_cli(capsys, "status", job)
    assert f"published: {run.name}" in status.out

    refused = call_cli(capsys, "run", job, "--set", "gates.trustworthiness=1", "--json")
    assert refused.code == 3
    assert document(refused)["exit_code"] == 3
    assert refused.err.startswith("lakemap: gate trustworthiness: ")
    assert f"lakemap: {document(refused)['error']}\n" == refused.err
    assert tree(tmp_path) == before


def test_status_is_enough_for_a_dashboard(job: Path, tmp_path: Path, capsys: Capture) -> None:
    nothing = document(call_cli(capsys, "status", job, "--json"))
    assert (nothing["job"], nothing["current"], nothing["published"]) == ("blobs", None, None)
    assert {stage["share"] for stage in nothing["stages"]} == {0}
    assert "published: nothing yet" in call_cli(capsys, "status", job).out

    ran = document(call_cli(capsys, "run", job, "--json"))
    found = document(call_cli(capsys, "status", job, "--json"))
    published = found["published"]
    assert (published["run"], published["folder"]) == (ran["run"], ran["folder"])
    assert (published["metrics"], published["lake_changed"]) == (ran["metrics"], False)
    moment = datetime.fromtimestamp((tmp_path / "maps/CURRENT").stat().st_mtime, UTC)
    assert abs(datetime.fromisoformat(published["since"]) - moment) <= timedelta(seconds=1)
    for stage in found["stages"]:
        assert (stage["share"], stage["n_done"]) == (1, stage["n_parts"])
        assert stage["wall_seconds"] > 0
        assert stage["rows_per_task_second"] == stage["n_rows"] / stage["task_seconds"]
        assert (tmp_path / "maps" / stage["store"] / "manifest.json").exists()
    assert "the lake is as it was" in call_cli(capsys, "status", job).out

    embed = tmp_path / "maps" / found["stages"][-4]["store"]
    (embed / "manifest.json").unlink()
    (embed / "commits/000000.json").unlink()
    half = document(call_cli(capsys, "status", job, "--json"))["stages"][-4]
    assert (half["name"], half["state"], half["share"]) == ("embed", "partial", 0.5)
    assert (half["n_rows"], half["wall_seconds"]) == (149, None)
    assert half["task_seconds"] > 0

    (tmp_path / "lake/part-1.parquet").unlink()
    changed = document(call_cli(capsys, "status", job, "--json"))
    assert (changed["published"]["run"], changed["published"]["lake_changed"]) == (ran["run"], True)
    assert {stage["state"] for stage in changed["stages"]} == {"waiting"}
    assert "the lake has changed since" in call_cli(capsys, "status", job).out


def test_run_writes_one_document_and_all_else_to_stderr(job: Path, tmp_path: Path) -> None:
    ran = run_process("run", job, "--json")
    assert ran.code == 0, ran.err
    found = document(ran)
    assert found["changed"] is True
    assert found["folder"] == str(tmp_path / "maps/runs" / found["run"])
    metrics = json.loads((Path(found["folder"]) / "metrics.json").read_bytes())
    assert found["metrics"] == metrics
    assert metrics["rows_mapped"] == 298
    for stage in flow.STAGES:
        assert f" INFO {stage.name}: " in ran.err


def test_an_error_is_a_document_too(job: Path, capsys: Capture) -> None:
    ran = call_cli(capsys, "run", job, "--json", "--set", "neighbors.k=400")
    assert ran.code == 2
    assert document(ran).keys() == {"error", "exit_code"}
    assert "neighbors.k 400 needs 401" in document(ran)["error"]
    assert ran.err == f"lakemap: {document(ran)['error']}\n"


def test_an_error_of_ours_is_one_line_unless_asked(
    job: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(flow, "preflight", fails)
    ran = call_cli(capsys, "plan", job)
    expected = "lakemap: ZeroDivisionError: two lines (--debug shows the traceback)\n"
    assert (ran.code, ran.err) == (1, expected)
    with pytest.raises(ZeroDivisionError, match="two"):
        call_cli(capsys, "plan", job, "--debug")

"""The command line on the demo's lake of 2,000 digits, with two worker processes."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs import flow
from jobs.demo import make_demo
from jobs.demo_lake import find_bad
from pipeline.job_file import load_job
from pipeline.manifest import Store, find_store, load_commits
from pipeline.stores import Folder
from tests.data import run_process

SETTINGS = {
    "cluster.workers": 2,
    "sample.rows": 1500,
    "train.steps": 400,
    "train.batch": 256,
    "train.encoder.hidden": 64,
    "gates.accuracy": 0.5,
    "gates.trustworthiness": 0.8,
}


@pytest.mark.slow
def test_the_demo_makes_a_map(tmp_path: Path) -> None:
    overrides = [f"{key}={value}" for key, value in SETTINGS.items()]
    flags = [word for override in overrides for word in ("--set", override)]
    ran = run_process(
        "demo", "--folder", tmp_path / "demo", "--rows", "2000", "--files", "4", *flags
    )
    assert ran.code == 0, ran.err
    output = tmp_path / "demo/maps"
    (run,) = (output / "runs").iterdir()
    metrics = json.loads((run / "metrics.json").read_bytes())
    n_bad = len(find_bad(0, 2000))
    assert n_bad == metrics["rows_quarantined"] == pq.read_table(run / "quarantine").num_rows == 4
    assert metrics["rows_mapped"] == pq.read_table(run / "map").num_rows == 1996
    assert metrics["evaluated_on"] == "held-out rows"
    assert metrics["accuracy"] > 0.6  # chance is 0.1
    assert metrics["recall"] > 0.99
    assert f"1,996 rows mapped, 4 quarantined, accuracy {metrics['accuracy']:.4f}" in ran.out
    assert (run / "map.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    page = (run / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert not re.search(r'(?:src|href)\s*=\s*"(?!data:|#)', page)
    assert "<script" not in page

    job = load_job(tmp_path / "demo/job.yaml", overrides)
    estimates = flow.preflight(job).estimates
    for stage, store in stores_of(output).items():
        peak = max(commit.effort.peak_bytes for commit in load_commits(store.folder).values())
        assert peak <= estimates[stage].task_bytes, stage
        assert len(store.records) <= estimates[stage].n_parts, stage


def test_an_edited_job_file_is_kept(tmp_path: Path) -> None:
    path = make_demo(tmp_path, 1000, 1)
    text = path.read_text().replace("sample: {rows: 20000}", "sample: {rows: 500}")
    path.write_text(text)
    assert make_demo(tmp_path, 1000, 1) == path
    assert path.read_text() == text
    assert load_job(path).sample.rows == 500


def stores_of(output: Path) -> dict[str, Store]:
    found = {}
    for folder in (output / "stores").glob("*/*"):
        store = find_store(Folder(str(folder)))
        assert store is not None
        found[folder.parent.name] = store
    assert found.keys() == {stage.name for stage in flow.STAGES}
    return found

"""The DAGs, run by Airflow itself; `make test-airflow` installs it."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from jobs.demo import make_demo
from tests.deploy.tools import DEPLOY, ROOT

AIRFLOW = os.environ.get("LAKEMAP_AIRFLOW", "")

pytestmark = pytest.mark.skipif(not AIRFLOW, reason="Airflow is not here; see make test-airflow")


class Try(NamedTuple):
    """What became of a task."""

    task: str
    state: str
    tries: int


@dataclass(frozen=True)
class Airflow:
    """An Airflow of its own, on SQLite, whose DAGs are ours."""

    home: Path

    @property
    def jobs(self) -> Path:
        return self.home / "jobs"

    def call(
        self, *arguments: str, lakemap: str = "", program: str = "airflow"
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(DEPLOY / "airflow"),
            "LAKEMAP_JOBS": str(self.jobs),
            "LAKEMAP_COMMAND": lakemap or f"{sys.executable} -m jobs.cli",
            "LAKEMAP_RETRY_MINUTES": "0.01",
            "PYTHONPATH": str(ROOT),
        }
        return subprocess.run(
            [Path(AIRFLOW) / program, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
            check=False,
        )

    def run(self, dag: str, lakemap: str = "") -> tuple[subprocess.CompletedProcess[str], set[Try]]:
        """How a run of the DAG ended, and what became of its tasks."""
        before = self.tries()
        done = self.call("dags", "test", dag, lakemap=lakemap)
        return done, {attempt for ti, attempt in self.tries().items() if ti not in before}

    def tries(self) -> dict[str, Try]:
        with sqlite3.connect(self.home / "airflow.db") as database:
            rows = database.execute("select id, task_id, state, try_number from task_instance")
            return {str(ti): Try(*rest) for ti, *rest in rows}


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    """With a job named digits, on a demo lake of 2,000 rows."""
    found = Airflow(tmp_path_factory.mktemp("airflow"))
    found.jobs.mkdir()
    job = make_demo(found.jobs, 2000, 2).rename(found.jobs / "digits.yaml")
    settings = yaml.safe_load(job.read_text())
    settings |= {
        "gates": {"recall": 0.9, "trustworthiness": 0.5, "rows_lost": 0.1},
        "train": {"steps": 50, "encoder": {"hidden": 32, "layers": 1}},
        "cluster": {"kind": "serial"},
    }
    job.write_text(yaml.safe_dump(settings))
    done = found.call("db", "migrate")
    assert done.returncode == 0, done.stdout
    return found


def script(folder: Path, text: str) -> str:
    """A command that stands for lakemap."""
    path = folder / "lakemap.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_airflow_reads_the_file(airflow: Airflow) -> None:
    code = (
        "import json\n"
        "from airflow.dag_processing.dagbag import DagBag\n"
        "bag = DagBag()\n"
        "tasks = {d: {t.task_id: sorted(t.downstream_task_ids) for t in dag.tasks}"
        " for d, dag in bag.dags.items()}\n"
        "print(json.dumps([bag.import_errors, tasks]))\n"
    )
    done = airflow.call("-c", code, program="python")
    errors, tasks = json.loads(done.stdout.splitlines()[-1])
    assert errors == {}
    assert tasks == {
        "lakemap_digits_refresh": {"refresh": []},
        "lakemap_digits_build": {
            "ingest": ["graph"],
            "graph": ["train"],
            "train": ["embed"],
            "embed": ["publish"],
            "publish": [],
        },
    }


def test_a_map_is_built_a_gate_refuses_the_next_and_then_it_grows(airflow: Airflow) -> None:
    done, tries = airflow.run("lakemap_digits_build")
    assert done.returncode == 0, done.stdout
    names = ("ingest", "graph", "train", "embed", "publish")
    assert tries == {Try(name, "success", 1) for name in names}
    current, lake = airflow.jobs / "maps/CURRENT", airflow.jobs / "lake"
    published = current.read_bytes()
    assert (airflow.jobs / "maps/runs" / json.loads(published)["run"] / "map.png").exists()

    half = (lake / "part-00001.parquet").rename(airflow.jobs / "gone.parquet")
    done, tries = airflow.run("lakemap_digits_refresh")
    assert done.returncode != 0
    assert tries == {Try("refresh", "failed", 1)}  # of three that it may have
    assert "exit code 3; a gate refused: nothing was published" in done.stdout
    assert "gate rows_lost: 0." in done.stdout
    assert current.read_bytes() == published

    shutil.copy(half, lake / "part-00002.parquet")
    half.rename(lake / "part-00001.parquet")
    done, tries = airflow.run("lakemap_digits_refresh")
    assert done.returncode == 0, done.stdout
    assert tries == {Try("refresh", "success", 1)}
    run = airflow.jobs / "maps/runs" / json.loads(current.read_bytes())["run"]
    assert json.loads((run / "metrics.json").read_bytes())["rows_read"] == 3000


def test_what_another_attempt_may_help_is_tried_again(airflow: Airflow, tmp_path: Path) -> None:
    fails_once = f'echo "$@" >> {tmp_path}/calls; test $(wc -l < {tmp_path}/calls) -gt 1 || exit 4'
    done, tries = airflow.run("lakemap_digits_refresh", script(tmp_path, fails_once))
    assert done.returncode == 0, done.stdout
    assert tries == {Try("refresh", "success", 2)}
    assert "exit code 4; finished work is kept, another attempt goes on" in done.stdout
    call = f"refresh {airflow.jobs / 'digits.yaml'}\n"
    assert (tmp_path / "calls").read_text() == call * 2


def test_a_wrong_job_is_not(airflow: Airflow, tmp_path: Path) -> None:
    done, tries = airflow.run("lakemap_digits_refresh", script(tmp_path, "exit 2"))
    assert done.returncode != 0
    assert tries == {Try("refresh", "failed", 1)}
    assert "exit code 2; the job file or the lake is wrong" in done.stdout

"""Airflow DAGs of Lakemap: two for every job file of a folder.

lakemap_NAME_refresh  every night, or when another DAG says that the lake has changed
lakemap_NAME_build    by hand: the whole map anew, one task per group of stages

They only call the command line, which keeps all state in the job's output: a task that is started
again goes on where it stopped. Settings come from the environment of Airflow's workers:

LAKEMAP_JOBS           the folder of the job files, one map per *.yaml   (/srv/maps)
LAKEMAP_COMMAND        how lakemap is called there                       (lakemap)
LAKEMAP_RETRY_MINUTES  wait before a second attempt, doubled each time   (10)
"""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import DAG, Asset, AssetOrTimeSchedule, BaseOperator, CronTriggerTimetable, chain
from airflow.sdk.exceptions import AirflowException, AirflowFailException

JOBS = Path(os.environ.get("LAKEMAP_JOBS", "/srv/maps"))
COMMAND = shlex.split(os.environ.get("LAKEMAP_COMMAND", "lakemap"))
NIGHTLY = CronTriggerTimetable("30 2 * * *", timezone="UTC")

# The stages of a task are cheap to look at when they are done, so a task has several.
GROUPS = {
    "ingest": ("ingest",),
    "graph": ("sample", "neighbors", "affinity", "symmetrize", "edges"),
    "train": ("train",),
    "embed": ("embed",),
    "publish": ("evaluate", "publish"),
}

# Another attempt would end the same way.
FINAL = {
    2: "the job file or the lake is wrong: correct it, then clear this task",
    3: "a gate refused: nothing was published, the old map is still there; see the figures above",
}

DEFAULTS = {
    "retries": 2,
    "retry_delay": timedelta(minutes=float(os.environ.get("LAKEMAP_RETRY_MINUTES", "10"))),
    "retry_exponential_backoff": True,
    "execution_timeout": timedelta(hours=12),
}


class Lakemap(BaseOperator):
    """Runs lakemap commands one after the other; the exit code decides whether to try again."""

    template_fields: Sequence[str] = ("commands",)

    def __init__(self, *, commands: list[list[str]], **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = commands
        self.hook = SubprocessHook()

    def execute(self, context: Any) -> None:
        """Run all commands; stop at the first that fails."""
        del context
        for command in self.commands:
            code = self.hook.run_command([*COMMAND, *command], cwd=str(JOBS)).exit_code
            line = f"lakemap {shlex.join(command)}: exit code {code}"
            if code in FINAL:
                raise AirflowFailException(f"{line}; {FINAL[code]}")
            if code:
                raise AirflowException(f"{line}; finished work is kept, another attempt goes on")

    def on_kill(self) -> None:
        """Stop the command cleanly; the next attempt goes on from there."""
        with suppress(ProcessLookupError):  # it may just have ended
            self.hook.send_sigterm()


def refresh_dag(job: Path) -> DAG:
    """Every night, or when the lake's asset is updated: one task that brings the map up to date."""
    lake, published = Asset(f"lakemap/{job.stem}/lake"), Asset(f"lakemap/{job.stem}/map")
    with DAG(
        f"lakemap_{job.stem}_refresh",
        schedule=AssetOrTimeSchedule(timetable=NIGHTLY, assets=[lake]),
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        default_args=DEFAULTS,
        tags=["lakemap"],
        doc_md=f"Brings the map of `{job}` up to date. Exit code 3, a refused gate, fails at once.",
    ) as dag:
        Lakemap(task_id="refresh", commands=[["refresh", str(job)]], outlets=[published])
    return dag


def build_dag(job: Path) -> DAG:
    """By hand: the whole map anew, one task per group of stages."""
    with DAG(
        f"lakemap_{job.stem}_build",
        schedule=None,
        catchup=False,
        max_active_runs=1,
        default_args=DEFAULTS,
        tags=["lakemap"],
        doc_md=f"Makes the map of `{job}` anew, with a newly trained encoder: places move.",
    ) as dag:
        *most, last = (
            Lakemap(task_id=name, commands=[["stage", stage, str(job)] for stage in stages])
            for name, stages in GROUPS.items()
        )
        last.outlets.append(Asset(f"lakemap/{job.stem}/map"))
        chain(*most, last)
    return dag


for path in sorted(JOBS.glob("*.yaml")):
    for made in (refresh_dag(path), build_dag(path)):
        globals()[made.dag_id] = made

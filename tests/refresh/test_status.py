"""status: the steps of the run or refresh that is under way or next, and who is at work."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import flow, refresh, retrain
from jobs.status import REFRESH_ANEW, find_status
from pipeline.config import DriftConfig, Job, RetrainConfig
from pipeline.lease import hold
from pipeline.stores import Folder
from tests.data import Recorder, call_cli, one_try, write_job
from tests.refresh.nights import QUICK, change_lake, refresh_job, some, write_file

RUN = [stage.name for stage in flow.STAGES]
STEPS = [stage.name for stage in refresh.STAGES]


class Stop(Recorder):
    """Ends the work after a step."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def stage_finished(self, name: str, *rest: Any, **how: Any) -> None:
        super().stage_finished(name, *rest, **how)
        if name == self._name:
            raise RuntimeError("power cut")


def states(job: Job) -> dict[str, str]:
    return {step.name: step.state for step in find_status(job).steps}


def test_a_published_map_is_due_a_refresh_only(job: Job, lake: Path) -> None:
    assert find_status(job).command == "run"
    assert states(job) == dict.fromkeys(RUN, "done")
    change_lake(lake)
    assert find_status(job).command == "refresh"
    assert states(job) == dict.fromkeys(STEPS, "waiting")
    with pytest.raises(RuntimeError, match="power cut"):
        refresh_job(job, Stop("embed"))
    done = dict.fromkeys(("encoder", "ingest", "embed"), "done")
    assert states(job) == dict.fromkeys(STEPS, "waiting") | done
    refresh_job(job)
    assert find_status(job) == ("refresh", [], None)  # and nothing is due


@pytest.mark.parametrize(("at_work", "shown"), [("gc", "refresh"), ("stage ingest", "run")])
def test_other_commands_at_work_have_no_steps_of_their_own(
    at_work: str, shown: str, job: Job, lake: Path
) -> None:
    change_lake(lake)
    with hold(Folder(job.output), at_work):
        found = find_status(job)
    assert found.command == shown
    assert found.at_work is not None
    assert found.at_work.command == at_work


def test_other_settings_need_a_run(job: Job, lake: Path) -> None:
    change_lake(lake)
    longer = replace(job, train=replace(job.train, steps=5))
    assert find_status(longer).command == "run"
    assert states(longer) == dict.fromkeys(RUN, "waiting")


def test_a_run_that_was_begun_is_shown(job: Job, lake: Path) -> None:
    change_lake(lake)
    with pytest.raises(RuntimeError, match="power cut"):
        flow.run(job, one_try(), Stop("sample"))
    assert find_status(job).command == "run"
    assert list(states(job).values())[:3] == ["done", "done", "waiting"]


def test_training_again_is_part_of_a_refresh(job: Job, lake: Path) -> None:
    job = replace(job, drift=DriftConfig(retrain=RetrainConfig(novel_share=0)))
    write_file(lake / "g.parquet", some(300, 99), 70_000)
    with hold(Folder(job.output), "refresh"):
        with pytest.raises(RuntimeError, match="power cut"):
            refresh_job(job, Stop("train"))
        found = find_status(job)
    assert found.at_work is not None
    steps = [(step.name, step.state) for step in found.steps]
    assert steps[:4] == [(name, "done") for name in STEPS[:4]]
    names = [stage.name for stage in retrain.make_stages(True)]
    assert [name for name, _ in steps[4:]] == names
    n_done = names.index("train") + 1
    assert [state for _, state in steps[4:]] == ["done"] * n_done + ["waiting"] * (
        len(names) - n_done
    )
    with hold(Folder(job.output), REFRESH_ANEW):
        found = find_status(job)
    assert found.command == REFRESH_ANEW
    assert [step.name for step in found.steps] == names


def test_who_is_at_work_is_told(
    lake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path / "job.yaml", lake, tmp_path / "maps", **QUICK)
    assert call_cli(capsys, "run", path).code == 0
    assert json.loads(call_cli(capsys, "status", path, "--json").out)["at_work"] is None
    with hold(Folder(str(tmp_path / "maps")), "refresh"):
        found = json.loads(call_cli(capsys, "status", path, "--json").out)
        text = call_cli(capsys, "status", path).out
    assert found["command"] == found["at_work"]["command"] == "refresh"
    assert found["at_work"].keys() == {"command", "host", "process", "since", "renewed"}
    assert "at work: lakemap refresh since " in text

"""train: resumed to the same bytes, the encoder and telemetry it leaves behind."""

import logging
from pathlib import Path

import numpy as np
import pytest

from encoders import objectives, preprocessing
from encoders.artifact import Encoder
from encoders.fit import COLUMNS
from pipeline import training
from pipeline.errors import ConfigError, StageError
from pipeline.manifest import open_store
from pipeline.stage import run_stage
from pipeline.stages import train
from pipeline.stages.train import TRAIN
from pipeline.stores import Folder
from tests.data import (
    LABELLED,
    Finished,
    Recorder,
    digests,
    make_job,
    one_try,
    read_array,
)


class DiesAt(Recorder):
    """Ends the task when it reports that step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def task_progress(self, name: str, share: float, note: str) -> None:
        super().task_progress(name, share, note)
        if f"step {self._step}/" in note:
            raise RuntimeError("killed")


def train_again(done: Finished, output: Path, seen: Recorder) -> Path:
    """The store of a second training on the same inputs."""
    inputs = {name: done.refs[name] for name in TRAIN.reads}
    ref = run_stage(TRAIN, inputs, Folder(str(output)), done.job, one_try(), seen)
    return Path(ref.folder.url)


@pytest.fixture
def _every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(training, "STEPS_PER_REPORT", 1)


@pytest.mark.usefixtures("_every_step")
def test_a_killed_training_resumes_to_the_same_bytes(done: Finished, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="RuntimeError: killed"):
        train_again(done, tmp_path, DiesAt(11))
    (folder,) = (tmp_path / "stores/train").iterdir()
    assert (folder / train.CHECKPOINT).exists()
    seen = Recorder()
    assert train_again(done, tmp_path, seen) == folder
    # The checkpoint of a step is written after its report, so step 11 is done again.
    assert seen.notes[0].startswith("train 0.37 step 11/30")
    assert len(seen.notes) == 20
    assert digests(folder / "data") == digests(Path(done.refs["train"].folder.url) / "data")
    assert not (folder / train.CHECKPOINT).exists()


@pytest.mark.usefixtures("_every_step")
def test_a_useless_checkpoint_is_not_used(
    done: Finished, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StageError, match="killed"):
        train_again(done, tmp_path, DiesAt(3))
    (folder,) = (tmp_path / "stores/train").iterdir()
    (folder / train.CHECKPOINT).write_bytes(b"not a checkpoint")
    seen = Recorder()
    with caplog.at_level(logging.WARNING):
        train_again(done, tmp_path, seen)
    assert "checkpoint not used" in caplog.text
    assert len(seen.notes) == 30
    assert digests(folder / "data") == digests(Path(done.refs["train"].folder.url) / "data")


def test_telemetry_has_a_row_per_step(done: Finished) -> None:
    store = done.store("train")
    telemetry = store.table(store.records[0], "telemetry")
    assert telemetry.column_names == list(COLUMNS)
    assert telemetry["step"].to_pylist() == list(range(30))
    assert np.isfinite(telemetry["loss"].to_numpy()).all()
    metrics = store.manifest.metrics
    assert metrics["loss"] == pytest.approx(telemetry["loss"].to_numpy().mean())
    assert metrics["pair_clipped"] == metrics["layer_clipped"] == 0


@pytest.mark.parametrize("kind", ["pair", "layer"])
def test_clipping_is_told(kind: str, done: Finished, tmp_path: Path) -> None:
    key = {"pair": "clip_pairwise", "layer": "clip_layer"}[kind]
    job = make_job(done.lake.path, tmp_path, input=LABELLED, train={key: 1e-6, "steps": 3})
    inputs = {name: done.refs[name] for name in TRAIN.reads}
    ref = run_stage(TRAIN, inputs, Folder(str(tmp_path)), job, one_try(), Recorder())
    metrics = open_store(ref.folder, ref.digest).manifest.metrics
    assert metrics[f"{kind}_clipped"] > 0.5
    assert {metrics["pair_clipped"], metrics["layer_clipped"]} > {0.0}


def test_the_digest_and_the_frame_are_the_encoders(done: Finished) -> None:
    store = done.store("train")
    names = ("encoder.safetensors", "encoder.json")
    encoder = Encoder.from_files({name: store.file(store.records[0], name) for name in names})
    rows = read_array(done.store("sample"), "vectors")
    assert store.manifest.metrics["encoder"] == encoder.digest
    assert encoder.info == {"training_rows": 500, "sample": done.refs["sample"].digest}
    x0, x1, y0, y1 = store.manifest.metrics["extent"]
    xy = encoder.embed(rows)
    assert x0 < xy[:, 0].min() < xy[:, 0].max() < x1
    assert y0 < xy[:, 1].min() < xy[:, 1].max() < y1


def test_a_training_that_diverges_is_the_jobs_fault(done: Finished, tmp_path: Path) -> None:
    job = make_job(
        done.lake.path,
        tmp_path,
        input=LABELLED,
        train={"learning_rate": 1e30, "clip_layer": 1e30, "optimizer": "sgd"},
    )
    inputs = {name: done.refs[name] for name in TRAIN.reads}
    with pytest.raises(ConfigError, match="train: fit: loss or gradient is not a number at step"):
        run_stage(TRAIN, inputs, Folder(str(tmp_path)), job, one_try(), Recorder())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": {"kind": "cnn", "shape": [5, 5]}}, r"shape \[5, 5\] holds 25 values"),
        ({"encoder": {"kind": "no_such.module:Net"}}, "no_such.module:Net cannot be imported"),
        ({"batches": "points", "batch": 100_000}, "train.batch is 100000, the sample has"),
    ],
)
def test_networks_and_batches_that_do_not_fit_the_rows_are_the_jobs_fault(
    done: Finished, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    job = make_job(done.lake.path, tmp_path, input=LABELLED, train=settings)
    inputs = {name: done.refs[name] for name in TRAIN.reads}
    with pytest.raises(ConfigError, match=message):
        run_stage(TRAIN, inputs, Folder(str(tmp_path)), job, one_try(), Recorder())


@pytest.mark.parametrize(
    "settings",
    [
        {"batches": "points"},
        {"objective": "largevis"},
        {"objective": "umap", "batches": "negatives"},
        {"encoder": {"kind": "residual", "hidden": 8, "layers": 1}, "preprocessing": {"pca": 6}},
        {"encoder": {"kind": "tests.encoders.own:Own"}, "schedule": "linear"},
    ],
)
def test_every_kind_of_training_leaves_an_encoder(
    done: Finished, tmp_path: Path, settings: dict[str, object]
) -> None:
    job = make_job(done.lake.path, tmp_path, input=LABELLED, train={"steps": 4, **settings})
    inputs = {name: done.refs[name] for name in TRAIN.reads}
    ref = run_stage(TRAIN, inputs, Folder(str(tmp_path)), job, one_try(), Recorder())
    store = open_store(ref.folder, ref.digest)
    names = ("encoder.safetensors", "encoder.json")
    encoder = Encoder.from_files({name: store.file(store.records[0], name) for name in names})
    rows = done.store("sample").rows("vectors", 0, 50)
    assert np.isfinite(encoder.embed(rows)).all()


def test_memory_is_reckoned_for_the_blocks_that_the_encoders_work_on() -> None:
    assert train.BLOCK_ROWS == preprocessing.BLOCK_ROWS
    assert train.BLOCK_POINTS == objectives.BLOCK_POINTS

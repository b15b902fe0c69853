from dataclasses import FrozenInstanceError, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ByteSize

from encoders.fit import FitConfig
from pipeline.cluster_config import ClusterConfig, GpuConfig, SlurmConfig
from pipeline.config import (
    AffinityConfig,
    EdgesConfig,
    EncoderConfig,
    EvaluateConfig,
    GatesConfig,
    InputConfig,
    Job,
    NeighborsConfig,
    SampleConfig,
    TrainConfig,
    to_yaml,
)
from pipeline.errors import ConfigError
from pipeline.job_file import load_job

SMALLEST = "input: {path: lake}\noutput: maps\n"

# Text that a YAML reader can mistake for something else is part of it.
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1) | (
    st.sampled_from(["yes", "null", "1e-3", "0x10", "2026-01-02", "a: b", "- a", "#", "~", "12:30"])
)
paths = st.sampled_from(["/lake", "/a folder/é", "s3://bucket/lake", "file:///lake"])
counts = st.integers(1, 10**9)
seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0, 1)
gates = st.none() | shares


def positive(at_least: float) -> st.SearchStrategy[float]:
    return st.floats(at_least, 1e300)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterConfig:
    kind = draw(st.sampled_from(["local", "serial", "scheduler", "slurm"]))
    memory = st.integers(1, 1 << 50).map(ByteSize)
    lines = st.tuples(words, words)
    return draw(
        st.builds(
            ClusterConfig,
            kind=st.just(kind),
            workers=counts if kind == "slurm" else st.none() | counts,
            memory=memory if kind == "slurm" else st.none() | memory,
            address=words if kind == "scheduler" else st.none(),
            slurm=st.builds(
                SlurmConfig, queue=words, directives=lines, prologue=lines, logs=st.just("/logs")
            )
            if kind == "slurm"
            else st.none(),
            gpu=st.none() | st.builds(GpuConfig, memory, counts, queue=words)
            if kind == "slurm"
            else st.none(),
            wait_seconds=positive(1e-3),
            retries=st.integers(0, 99),
        )
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    perplexity = draw(st.floats(1.01, 100))
    train = draw(
        st.builds(
            TrainConfig,
            encoder=st.builds(EncoderConfig, hidden=counts, layers=st.integers(0, 9)),
            steps=counts,
            batch=st.integers(2, 4096).map(lambda half: 2 * half),
            optimizer=st.sampled_from(["rmsprop", "adam", "sgd"]),
            learning_rate=positive(1e-12),
            exaggeration=positive(1),
            exaggerated_share=shares,
            noise=shares,
            clip_pairwise=positive(1e-12),
            clip_layer=positive(1e-12),
            seed=seeds,
        )
    )
    n_edges = train.steps * train.batch // 2
    return Job(
        input=draw(
            st.builds(
                InputConfig,
                path=paths,
                vector=st.none() | words | st.lists(words, min_size=1).map(tuple),
                id=st.none() | words,
                label=st.none() | words,
                holdout=st.none() | words,
                max_bad_fraction=shares,
                partition_bytes=st.integers(1 << 16, 1 << 40).map(ByteSize),
            )
        ),
        output=draw(paths),
        name=draw(words),
        sample=draw(st.builds(SampleConfig, rows=counts, seed=seeds)),
        neighbors=draw(
            st.builds(
                NeighborsConfig,
                k=st.integers(ceil(3 * perplexity), 1000),
                metric=st.sampled_from(["euclidean", "cosine"]),
                cells=st.none() | counts,
                recall=st.floats(0.01, 0.99),
                memory=st.integers(1 << 20, 1 << 40),
                overlap=st.none() | st.integers(1, 16),
                recall_queries=counts,
                seed=seeds,
            )
        ),
        affinity=AffinityConfig(perplexity),
        edges=draw(
            st.builds(
                EdgesConfig,
                samples=st.none() | st.integers(n_edges, 2 * n_edges),
                negatives=counts,
                seed=seeds,
            )
        ),
        train=train,
        evaluate=draw(
            st.builds(
                EvaluateConfig,
                rows=st.integers(100, 10**9),
                reference_rows=st.integers(100, 10**9),
                k=counts,
                trustworthiness_k=counts,
                seed=seeds,
            )
        ),
        gates=draw(st.builds(GatesConfig, gates, gates, gates, gates, gates)),
        cluster=draw(clusters()),
    )


def load(tmp_path: Path, text: str, *overrides: str) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_job(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    """The one line with which the job is refused, without the path it begins with."""
    with pytest.raises(ConfigError, match=r"\S") as caught:
        load(tmp_path, text, *overrides)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line.removeprefix(f"{tmp_path}/job.yaml")


@given(job=jobs())
def test_a_job_survives_the_way_through_a_file(job: Job) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(to_yaml(job), encoding="utf-8")
        assert load_job(path) == job


def test_input_and_output_are_enough(tmp_path: Path) -> None:
    job = load(tmp_path, SMALLEST)
    assert job == Job(InputConfig(str(tmp_path / "lake")), str(tmp_path / "maps"))
    assert job.neighbors.k >= 3 * job.affinity.perplexity
    fit = FitConfig()
    for name in ("learning_rate", "schedule", "exaggerated_share", "clip_layer", "steps"):
        assert getattr(job.train, name) == getattr(fit, name), name
    for name in ("epsilon", "min_dist", "spread", "batches"):
        assert getattr(job.train, name) == getattr(fit.objective, name), name
    assert job.train.clip_pairwise == fit.objective.clip
    assert (job.gates.recall, job.gates.accuracy) == (0.9, None)
    assert (job.cluster.kind, job.cluster.retries) == ("local", 2)


def test_a_job_cannot_be_changed(tmp_path: Path) -> None:
    job = load(tmp_path, SMALLEST)
    with pytest.raises(FrozenInstanceError, match="output"):
        job.output = "other"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="steps"):
        job.train.steps = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("tran: {}", "unknown key tran; did you mean train?"),
        ("train: {stesp: 1}", "unknown key train.stesp; did you mean train.steps?"),
        (
            "train: {encoder: {hiden: 1}}",
            "unknown key train.encoder.hiden; did you mean train.encoder.hidden?",
        ),
        ("cluster: {worker: 2}", "unknown key cluster.worker; did you mean cluster.workers?"),
        ("affinity: {zzz: 1}", "unknown key affinity.zzz; known: ['perplexity', 'kind']"),
        ("sample: {7: 1}", "unknown key sample.7; known: ['rows', 'seed']"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, SMALLEST + text) == f": {line}"


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("sample.rows=many", "sample.rows is 'many'; it must be a valid integer"),
        ("sample.rows=0", "sample.rows is 0; it must be greater than or equal to 1"),
        ("sample.rows=1.5", "sample.rows is 1.5; it must be a valid integer"),
        ("sample.seed=-1", "sample.seed is -1; it must be greater than or equal to 0"),
        ("sample.seed=4294967296", "sample.seed is 4294967296; it must be less than 4294967296"),
        ("neighbors.metric=dot", "neighbors.metric is 'dot'; it must be 'euclidean' or 'cosine'"),
        ("neighbors.recall=1", "neighbors.recall is 1; it must be less than 1"),
        ("neighbors.overlap=17", "neighbors.overlap is 17; it must be less than or equal to 16"),
        ("neighbors.memory=1000", "neighbors.memory is 1000; it must be greater than or equal"),
        ("affinity.perplexity=1", "affinity.perplexity is 1; it must be greater than 1"),
        ("affinity.perplexity=.inf", "affinity.perplexity is inf; it must be a finite number"),
        ("edges.negatives=0", "edges.negatives is 0; it must be greater than or equal to 1"),
        ("train.learning_rate=0", "train.learning_rate is 0; it must be greater than 0"),
        ("train.learning_rate=.nan", "train.learning_rate is nan; it must be a finite number"),
        ("train.batch=5", "train.batch is 5; it must be a multiple of 2"),
        ("train.batch=2", "train.batch is 2; it must be greater than or equal to 4"),
        ("train.encoder.layers=-1", "train.encoder.layers is -1; it must be greater than or equal"),
        ("train.encoder=7", "train.encoder is a int; it must be a section of keys"),
        ("train.exaggeration=0.5", "train.exaggeration is 0.5; it must be greater than or equal"),
        ("evaluate.rows=99", "evaluate.rows is 99; it must be greater than or equal to 100"),
        ("gates.recall=1.5", "gates.recall is 1.5; it must be less than or equal to 1"),
        ("cluster.kind=cloud", "cluster.kind is 'cloud'; it must be 'local', 'serial', 'schedu"),
        ("cluster.memory=0", "cluster.memory is 0; it must be greater than 0"),
        ("cluster.retries=-1", "cluster.retries is -1; it must be greater than or equal to 0"),
        ("input.vector=7", "input.vector is 7; it must be a valid string"),
        ("input.id=[a]", "input.id is ['a']; it must be a valid string"),
        ("input.partition_bytes=9Foo", "input.partition_bytes is '9Foo'; it must be a size such"),
        ("input.partition_bytes=-5", "input.partition_bytes is -5; it must be a size such as 32M"),
        ("input.partition_bytes=64KB", "input.partition_bytes is 64000; it must be 64KiB or more"),
        ("train=", "train is nothing; it must be a section of keys"),
        ("name=2026-01-02", "name is datetime.date(2026, 1, 2); it must be a valid string"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, setting: str, line: str) -> None:
    assert refusal(tmp_path, SMALLEST, setting).startswith(f": {line}")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ["neighbors.k=44"],
            "affinity.perplexity 15 needs 45 neighbors per row, neighbors.k is 44; "
            "raise neighbors.k or lower the perplexity to 14.6667",
        ),
        (
            ["train.steps=10", "train.batch=8", "edges.samples=39"],
            "edges.samples is 39, training consumes 40 (train.steps x 4 a step); "
            "raise it or leave it out",
        ),
        (
            ["train.batches=negatives"],
            "train.batches is 'negatives', the objective tsne takes edges or points; "
            "change one of them",
        ),
        (
            ["train.objective=umap", "train.batches=points"],
            "train.batches is 'points', the objective umap takes edges or negatives; "
            "change one of them",
        ),
        (
            ["drift.warn.novel_share=0.2"],
            "drift.warn.novel_share is 0.2, drift.retrain.novel_share is 0.05; the warning must "
            "not come after the retraining: lower the first or raise the second",
        ),
        (
            ["train.min_dist=3"],
            "train.min_dist is 3 with train.spread 1; it must be less than 3 times the spread",
        ),
        (
            ["train.encoder.kind=rnn"],
            "train.encoder.kind is 'rnn'; it must be residual, mlp, cnn or package.module:name",
        ),
        (
            ["train.encoder.kind=cnn"],
            "train.encoder.shape is missing; it must be [height, width] or "
            "[height, width, channels]",
        ),
        (
            ["train.encoder.shape=[784]"],
            "train.encoder.shape is [784]; it must be [height, width] or [height, width, channels]",
        ),
        (
            ["train.encoder={kind: cnn, shape: [2, 8]}", "train.preprocessing.pca=10"],
            "train.encoder.kind cnn needs whole images, train.preprocessing.pca is 10; "
            "leave one of them out",
        ),
        (
            ["cluster.kind=scheduler"],
            "cluster.kind scheduler needs cluster.address (tcp://host:8786)",
        ),
    ],
)
def test_settings_that_do_not_go_together(tmp_path: Path, settings: list[str], line: str) -> None:
    assert refusal(tmp_path, SMALLEST, *settings) == f": {line}"


def test_settings_that_just_go_together(tmp_path: Path) -> None:
    settings = ["train.steps=10", "train.batch=8", "edges.samples=40", "affinity.perplexity=15"]
    job = load(tmp_path, SMALLEST, *settings, "cluster.kind=scheduler", "cluster.address=tcp://h:1")
    assert (job.edges.samples, job.cluster.address) == (40, "tcp://h:1")


def test_overrides_lie_over_the_file(tmp_path: Path) -> None:
    text = SMALLEST + "train: {steps: 5, seed: 3, encoder: {layers: 1}}\n"
    job = load(tmp_path, text, "train.steps=7", "train.encoder.hidden=8", "name=a=b", "name=c=d")
    assert (job.train.steps, job.train.seed, job.name) == (7, 3, "c=d")
    assert job.train.encoder == EncoderConfig(hidden=8, layers=1)
    assert load(tmp_path, text, "input.vector=[a, b]").input.vector == ("a", "b")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps", "--set train.steps: needs the form section.key=value"),
        ("=5", "--set =5: needs the form section.key=value"),
        ("output.folder=5", "--set output.folder=5: output is a str, not a section"),
        ("train.steps=[", "--set train.steps=[, line 1: not YAML (expected the node content"),
        ("train.stesp=5", ": unknown key train.stesp; did you mean train.steps?"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path: Path, override: str, line: str) -> None:
    assert refusal(tmp_path, SMALLEST, override).startswith(line)


def test_relative_paths_start_at_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.yaml").write_text("input: {path: ../lake}\noutput: maps\n")
    monkeypatch.chdir(tmp_path)
    job = load_job(Path("jobs/job.yaml"))
    assert job.input.path == f"{tmp_path}/jobs/../lake"
    assert job.output == f"{tmp_path}/jobs/maps"


def test_urls_and_absolute_paths_stay_as_they_are(tmp_path: Path) -> None:
    job = load(tmp_path, "input: {path: 's3://bucket/lake'}\noutput: /maps\n")
    assert (job.input.path, job.output) == ("s3://bucket/lake", "/maps")


@pytest.mark.parametrize("value", ["1e-3", "0.001", "'0.001'", "1E-3"])
def test_every_way_to_write_a_number_is_one(tmp_path: Path, value: str) -> None:
    assert load(tmp_path, SMALLEST, f"train.learning_rate={value}").train.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("value", "n_bytes"), [("32MiB", 32 << 20), ("1.5 GB", 1_500_000_000), ("70000", 70_000)]
)
def test_sizes_have_units(tmp_path: Path, value: str, n_bytes: int) -> None:
    job = load(tmp_path, SMALLEST, f"cluster.memory={value}", f"input.partition_bytes={value}")
    assert job.cluster.memory == job.input.partition_bytes == n_bytes
    assert yaml.safe_load(to_yaml(job))["cluster"]["memory"] == n_bytes


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ": holds nothing, a job file holds sections; see lakemap init"),
        ("# only a comment", ": holds nothing, a job file holds sections; see lakemap init"),
        ("- a\n- b\n", ": holds a list, a job file holds sections; see lakemap init"),
        ("lake", ": holds a str, a job file holds sections; see lakemap init"),
        ("output: maps\n", ": input is missing; add it"),
        ("input: {path: lake}\n", ": output is missing; add it"),
        ("input: {}\noutput: maps\n", ": input.path is missing; add it"),
        ("input: lake\noutput: maps\n", ": input is a str; it must be a section of keys"),
        (SMALLEST + "train: [\n", ", line 4: not YAML (expected the node content, but found"),
        (SMALLEST + "\ttrain: 1\n", r", line 3: not YAML (found character '\t' that cannot start"),
        (SMALLEST + "name: \x01\n", ": not YAML (cannot be parsed); correct it"),
        (SMALLEST + "name: 2026-13-45\n", ": not YAML (month must be in 1..12"),
    ],
)
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, text: str, line: str) -> None:
    assert refusal(tmp_path, text).startswith(line)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, reason in [
        ("none.yaml", "No such file"),
        (".", "Is a direc"),
        ("binary.yaml", "utf"),
    ]:
        with pytest.raises(ConfigError, match=f"cannot be read .*{reason}.*; give a job file"):
            load_job(tmp_path / name)


def test_a_written_job_names_every_setting(tmp_path: Path) -> None:
    job = replace(load(tmp_path, SMALLEST), name="é")
    document: dict[str, Any] = yaml.safe_load(to_yaml(job))
    assert list(document) == list(Job.__dataclass_fields__)
    encoder = {"kind": "residual", "hidden": 128, "layers": 3, "shape": None}
    assert document["train"]["encoder"] == encoder
    assert "é" in to_yaml(job)

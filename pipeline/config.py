"""The job file: one frozen dataclass per section, read once, checked whole.

Defaults for everything but input and output. Relative paths are relative to the job file.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import yaml
from pydantic import ByteSize, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from pipeline.cluster_config import ClusterConfig, check_cluster, place_files
from pipeline.errors import ConfigError

_STRICT_KEYS = ConfigDict(extra="forbid")

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=_STRICT_KEYS)
class InputConfig:
    """Where the lake is, and which columns (or Zarr arrays) mean what."""

    path: str
    vector: str | tuple[str, ...] | None = None
    id: str | None = None
    label: str | None = None
    holdout: str | None = None
    max_bad_fraction: Share = 0.01
    on_change: Literal["stop", "skip"] = "stop"
    partition_bytes: ByteSize = ByteSize(32 << 20)


@dataclass(frozen=True, config=_STRICT_KEYS)
class SampleConfig:
    """How many rows train the encoder."""

    rows: Count = 200_000
    seed: Seed = 0


@dataclass(frozen=True, config=_STRICT_KEYS)
class NeighborsConfig:
    """The kNN graph of the sample."""

    k: Count = 45
    metric: Literal["euclidean", "cosine"] = "euclidean"
    recall: Annotated[float, Field(gt=0, lt=1)] = 0.95
    cells: Count | None = None
    overlap: Annotated[int, Field(ge=1, le=16)] | None = None
    memory: Annotated[ByteSize, Field(ge=1 << 20)] = ByteSize(512 << 20)
    recall_queries: Count = 1000
    seed: Seed = 0


@dataclass(frozen=True, config=_STRICT_KEYS)
class AffinityConfig:
    """How strongly neighbours attract a row; `perplexity` is for kind gaussian alone.

    Without a kind it is umap for the objective umap, gaussian for the others.
    """

    perplexity: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 15.0
    kind: Literal["gaussian", "umap"] | None = None


@dataclass(frozen=True, config=_STRICT_KEYS)
class EdgesConfig:
    """Edge samples; None means as many as training consumes."""

    samples: Count | None = None
    negatives: Count = 5
    seed: Seed = 0


@dataclass(frozen=True, config=_STRICT_KEYS)
class EncoderConfig:
    """The network: residual, mlp, cnn (for images of `shape`) or package.module:name."""

    kind: str = "residual"
    hidden: Count = 256
    layers: Annotated[int, Field(ge=0)] = 3
    shape: tuple[Count, ...] | None = None


@dataclass(frozen=True, config=_STRICT_KEYS)
class PreprocessingConfig:
    """What happens to a row before the network.

    normalize: by default if the metric is cosine. pca: components kept, 0 for no projection; by
    default 100 before the networks mlp and residual, none before others.
    """

    normalize: bool | None = None
    centre: bool = True
    scale: bool = True
    pca: Annotated[int, Field(ge=0)] | None = None


@dataclass(frozen=True, config=_STRICT_KEYS)
class TrainConfig:
    """The training of the encoder; `batch` counts points.

    gamma: weight of the repulsion, by default 7 for largevis and 1 for umap.
    """

    objective: Literal["tsne", "largevis", "umap"] = "tsne"
    batches: Literal["edges", "negatives", "points"] = "edges"
    encoder: EncoderConfig = EncoderConfig()
    preprocessing: PreprocessingConfig = PreprocessingConfig()
    steps: Count = 3000
    batch: Annotated[int, Field(ge=4, multiple_of=2)] = 1024
    optimizer: Literal["rmsprop", "adam", "sgd"] = "rmsprop"
    learning_rate: Positive = 3e-3
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    gamma: Positive | None = None
    min_dist: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    spread: Positive = 1.0
    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-3
    exaggeration: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 4.0
    exaggerated_share: Share = 0.3
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    clip_pairwise: Positive = 16.0
    clip_layer: Positive = 1.0
    seed: Seed = 0


@dataclass(frozen=True, config=_STRICT_KEYS)
class EmbedConfig:
    """What the map's files hold beside id, x, y and label, and how their rows are arranged.

    columns: further columns of the lake. spatial_key: a column `morton`, and every file's rows in
    its order, so that a viewport is a few ranges. partition_by: `label` or one of the columns, by
    whose values the files are put in folders key=value.
    """

    columns: tuple[str, ...] = ()
    spatial_key: bool = False
    partition_by: str | None = None


@dataclass(frozen=True, config=_STRICT_KEYS)
class EvaluateConfig:
    """The rows that measure the map."""

    rows: Annotated[int, Field(ge=100)] = 5000
    reference_rows: Annotated[int, Field(ge=100)] = 20_000
    k: Count = 10
    trustworthiness_k: Count = 12
    seed: Seed = 0


@dataclass(frozen=True, config=_STRICT_KEYS)
class GatesConfig:
    """Measured qualities below which nothing is published; None is no gate.

    rows_lost: a refresh may leave the map with this share fewer rows than were published, no more.
    displacement: a retraining may move 95% of the rows by this share of the map's diameter at most.
    """

    recall: Share | None = 0.90
    trustworthiness: Share | None = 0.85
    continuity: Share | None = None
    neighbor_recall: Share | None = None
    accuracy: Share | None = None
    rows_lost: Share | None = 0.5
    displacement: Share | None = 0.25


@dataclass(frozen=True, config=_STRICT_KEYS)
class WarnConfig:
    """Drift of a refresh's new rows above which it warns; None is never."""

    novel_share: Share | None = 0.03
    occupancy_shift: Share | None = 0.4
    domain_auc: Share | None = 0.7


@dataclass(frozen=True, config=_STRICT_KEYS)
class RetrainConfig:
    """Drift above which a refresh trains the encoder again; None is never.

    Only novel rows are what the encoder lacks: another mix of known rows, which the other two
    notice as well, has its places on the map already.
    """

    novel_share: Share | None = 0.1
    occupancy_shift: Share | None = None
    domain_auc: Share | None = None


@dataclass(frozen=True, config=_STRICT_KEYS)
class DriftConfig:
    """How a refresh judges its new rows; `rows`: fewer than these are not judged."""

    rows: Annotated[int, Field(ge=20)] = 200
    warn: WarnConfig = WarnConfig()
    retrain: RetrainConfig = RetrainConfig()
    seed: Seed = 0


@dataclass(frozen=True, config=_STRICT_KEYS)
class MetricsConfig:
    """Where figures for operators go after a run; never part of what the results depend on."""

    textfile: str | None = None


@dataclass(frozen=True, config=_STRICT_KEYS)
class Job:
    """A whole job file."""

    input: InputConfig
    output: str
    name: str = "map"
    sample: SampleConfig = SampleConfig()
    neighbors: NeighborsConfig = NeighborsConfig()
    affinity: AffinityConfig = AffinityConfig()
    edges: EdgesConfig = EdgesConfig()
    train: TrainConfig = TrainConfig()
    embed: EmbedConfig = EmbedConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    gates: GatesConfig = GatesConfig()
    drift: DriftConfig = DriftConfig()
    cluster: ClusterConfig = ClusterConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def affinity_kind(self) -> Literal["gaussian", "umap"]:
        """The affinities' kind, which follows the objective where it is not given."""
        return self.affinity.kind or ("umap" if self.train.objective == "umap" else "gaussian")

    @property
    def edges_per_step(self) -> int:
        """Edges that one training step consumes."""
        batches, batch = self.train.batches, self.train.batch
        points = {"edges": 2, "negatives": 2 + self.edges.negatives}.get(batches)
        return 0 if points is None else max(1, batch // points)


_JOB = TypeAdapter(Job)


def load_job(path: Path, overrides: Iterable[str] = ()) -> Job:
    """The job in the file, with `section.key=value` settings laid over it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give a job file") from error
    data = _parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: holds {_kind(data)}, a job file holds sections; see lakemap init"
        )
    for override in overrides:
        _override(data, override)
    return build_job(data, str(path), path.absolute().parent)


def build_job(data: Mapping[str, Any], where: str, base: Path) -> Job:
    """The job the data describe; `base` is where relative paths start."""
    try:
        job: Job = _JOB.validate_python(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error)}") from error
    _check_together(job, where)
    source = replace(job.input, path=_absolute(job.input.path, base))
    cluster = place_files(job.cluster, base)
    textfile = job.metrics.textfile and _absolute(job.metrics.textfile, base)
    return replace(
        job,
        input=source,
        output=_absolute(job.output, base),
        cluster=cluster,
        metrics=replace(job.metrics, textfile=textfile),
    )


def _absolute(path: str, base: Path) -> str:
    return path if "://" in path else str(base / path)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"{where}{place}: not YAML ({problem}); correct it") from error
    except ValueError as error:  # a date such as 2026-13-45
        raise ConfigError(f"{where}: not YAML ({error}); correct it") from error


def _override(data: dict[str, Any], text: str) -> None:
    """Lay one `section.key=value` over the data."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--set {text}: needs the form section.key=value")
    *sections, key = name.strip().split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {text}: {section} is {_kind(data)}, not a section")
    data[key] = _parse_yaml(value, f"--set {text}")


def _explain(error: ValidationError) -> str:
    """The first thing wrong, as where, what was found, what was needed."""
    first = error.errors()[0]
    if first["type"] in ("unexpected_keyword_argument", "invalid_key"):
        return _unknown_key([str(step) for step in first["loc"]])
    place = _known_place(first["loc"])
    if first["type"] in ("missing", "missing_argument"):
        return f"{place} is missing; add it"
    needed = first["msg"].removeprefix("Input should be ")
    if first["type"].startswith("byte_size"):
        needed = "a size such as 32MiB"
    if first["type"] in ("dataclass_type", "dataclass_exact_type"):
        return f"{place} is {_kind(first['input'])}; it must be a section of keys"
    return f"{place} is {first['input']!r}; it must be {needed}"


def _known_place(steps: Sequence[int | str]) -> str:
    """The key the steps lead to; those after it say which of several types was tried."""
    section: Any = Job
    known: list[str] = []
    for step in steps:
        known.append(str(step))
        section = _section(get_type_hints(section).get(str(step)))
        if not is_dataclass(section):
            break
    return ".".join(known)


def _section(hint: Any) -> Any:
    """The type of a key, without the None of a section that may be left out."""
    return next((kind for kind in get_args(hint) if is_dataclass(kind)), hint)


def _unknown_key(steps: list[str]) -> str:
    section: Any = Job
    for step in steps[:-1]:
        section = _section(get_type_hints(section)[step])
    known = [field.name for field in fields(section)]
    close = difflib.get_close_matches(steps[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {'.'.join([*steps[:-1], close[0]])}?" if close else f"known: {known}"
    return f"unknown key {'.'.join(steps)}; {hint}"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _check_together(job: Job, where: str) -> None:
    """Settings that are fine alone but not together."""
    perplexity, k = job.affinity.perplexity, job.neighbors.k
    if job.affinity_kind == "gaussian" and 3 * perplexity > k:
        needed = int(-(-3 * perplexity // 1))
        raise ConfigError(
            f"{where}: affinity.perplexity {perplexity:g} needs {needed} neighbors per row, "
            f"neighbors.k is {k}; raise neighbors.k or lower the perplexity to {k / 3:g}"
        )
    needed_edges = job.train.steps * job.edges_per_step
    if job.edges.samples is not None and job.edges.samples < needed_edges:
        raise ConfigError(
            f"{where}: edges.samples is {job.edges.samples}, training consumes {needed_edges} "
            f"(train.steps x {job.edges_per_step} a step); raise it or leave it out"
        )
    _check_training(job.train, where)
    _check_map(job, where)
    _check_drift(job.drift, where)
    check_cluster(job.cluster, where)
    textfile = job.metrics.textfile
    if textfile is not None and ("://" in textfile or not textfile.endswith(".prom")):
        raise ConfigError(
            f"{where}: metrics.textfile is {textfile!r}; it must be a path that ends in .prom, "
            "or node exporter does not read it"
        )
    if job.input.partition_bytes < 1 << 16:
        raise ConfigError(
            f"{where}: input.partition_bytes is {job.input.partition_bytes}; "
            f"it must be 64KiB or more"
        )


def _check_drift(drift: DriftConfig, where: str) -> None:
    """Thresholds that contradict each other."""
    for field in fields(WarnConfig):
        warn, retrain = getattr(drift.warn, field.name), getattr(drift.retrain, field.name)
        if warn is not None and retrain is not None and warn > retrain:
            raise ConfigError(
                f"{where}: drift.warn.{field.name} is {warn:g}, drift.retrain.{field.name} is "
                f"{retrain:g}; the warning must not come after the retraining: lower the first or "
                "raise the second"
            )


MAP_COLUMNS = ("id", "x", "y", "label", "novelty", "morton")


def _check_map(job: Job, where: str) -> None:
    """Columns of the map that would not be clear."""
    columns, by = job.embed.columns, job.embed.partition_by
    clash = next((name for name in columns if name in MAP_COLUMNS), None)
    if clash is not None:
        raise ConfigError(
            f"{where}: embed.columns has {clash!r}, which the map uses for its own; the columns "
            "of input.id and input.label are there as id and label, rename others in the lake"
        )
    known = (*columns, "label") if job.input.label else columns
    if by is not None and by not in known:
        raise ConfigError(
            f"{where}: embed.partition_by is {by!r}; it must be one of embed.columns, or label "
            "where input.label is given"
        )


def _check_training(train: TrainConfig, where: str) -> None:
    """Settings of the training that do not go together."""
    kind, shape = train.encoder.kind, train.encoder.shape
    if kind not in ("residual", "mlp", "cnn") and ":" not in kind:
        raise ConfigError(
            f"{where}: train.encoder.kind is {kind!r}; it must be residual, mlp, cnn or "
            "package.module:name"
        )
    if (kind == "cnn" or shape is not None) and len(shape or ()) not in (2, 3):
        found = "missing" if shape is None else f"{list(shape)}"
        raise ConfigError(
            f"{where}: train.encoder.shape is {found}; it must be [height, width] or "
            "[height, width, channels]"
        )
    allowed = ("edges", "points") if train.objective == "tsne" else ("edges", "negatives")
    if train.batches not in allowed:
        raise ConfigError(
            f"{where}: train.batches is {train.batches!r}, the objective {train.objective} takes "
            f"{' or '.join(allowed)}; change one of them"
        )
    if train.min_dist >= 3 * train.spread:
        raise ConfigError(
            f"{where}: train.min_dist is {train.min_dist:g} with train.spread {train.spread:g}; "
            "it must be less than 3 times the spread"
        )
    if kind == "cnn" and train.preprocessing.pca:
        raise ConfigError(
            f"{where}: train.encoder.kind cnn needs whole images, train.preprocessing.pca is "
            f"{train.preprocessing.pca}; leave one of them out"
        )


def to_yaml(job: Job) -> str:
    """The job, defaults included, as a job file."""
    return yaml.safe_dump(_plain(job), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return int(value) if isinstance(value, ByteSize) else value

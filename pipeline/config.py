"""A job's settings: one frozen dataclass per section; only input and output have no defaults."""

from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal

import yaml
from pydantic import ByteSize, ConfigDict, Field
from pydantic.dataclasses import dataclass

from pipeline.cluster_config import ClusterConfig

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
    hidden: Count = 128
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
    batch: Annotated[int, Field(ge=4, multiple_of=2)] = 2048
    optimizer: Literal["rmsprop", "adam", "sgd"] = "rmsprop"
    learning_rate: Positive = 4e-3
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    gamma: Positive | None = None
    min_dist: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    spread: Positive = 1.0
    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-3
    exaggeration: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 4.0
    exaggerated_share: Share = 0.1
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

    novel_share: Share | None = 0.05
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


def to_yaml(job: Job) -> str:
    """The job, defaults included, as a job file."""
    return yaml.safe_dump(_plain(job), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return int(value) if isinstance(value, ByteSize) else value

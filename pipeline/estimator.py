"""A scikit-learn estimator for notebooks: the pipeline's kernels and trainer on rows in memory."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from encoders.artifact import Encoder
from encoders.fit import Draw, Trained, fit
from encoders.networks import build_network
from encoders.objectives import build_objective
from encoders.preprocessing import fit_preprocessing
from pipeline.batches import EdgeBatches, Edges, PointBatches
from pipeline.config import (
    EdgesConfig,
    EncoderConfig,
    InputConfig,
    Job,
    NeighborsConfig,
    PreprocessingConfig,
    TrainConfig,
)
from pipeline.graph import find_neighbors, join_graph
from pipeline.kernels.edges import draw_negatives, draw_positives
from pipeline.kernels.symmetrize import SparseRows
from pipeline.stages import cells
from pipeline.stages.train import settings as train_settings
from pipeline.training import make_fit_config, network_config, preprocessing_config

DTYPES = (np.float32, np.float16, np.uint8, np.int8)  # others become float32
DEFAULT = TrainConfig()


class Lakemap(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A map of the rows, and a function that places new ones; settings as in the job file.

    n_neighbors and perplexity are lowered to what the rows allow: n - 1, and a third of the
    neighbours. network is mlp, residual, cnn (with shape) or package.module:name.
    """

    def __init__(  # noqa: PLR0913  # scikit-learn reads the settings from here
        self,
        objective: Literal["tsne", "largevis", "umap"] = DEFAULT.objective,
        *,
        batches: Literal["edges", "negatives", "points"] = DEFAULT.batches,
        n_neighbors: int = NeighborsConfig().k,
        perplexity: float = 15.0,
        metric: Literal["euclidean", "cosine"] = "euclidean",
        network: str = DEFAULT.encoder.kind,
        hidden: int = DEFAULT.encoder.hidden,
        layers: int = DEFAULT.encoder.layers,
        shape: tuple[int, ...] | None = None,
        pca: int | None = DEFAULT.preprocessing.pca,
        steps: int = DEFAULT.steps,
        batch: int = DEFAULT.batch,
        learning_rate: float = DEFAULT.learning_rate,
        optimizer: Literal["rmsprop", "adam", "sgd"] = DEFAULT.optimizer,
        exaggeration: float = DEFAULT.exaggeration,
        exaggerated_share: float = DEFAULT.exaggerated_share,
        noise: float = DEFAULT.noise,
        clip_pairwise: float = DEFAULT.clip_pairwise,
        clip_layer: float = DEFAULT.clip_layer,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.objective = objective
        self.batches = batches
        self.n_neighbors = n_neighbors
        self.perplexity = perplexity
        self.metric = metric
        self.network = network
        self.hidden = hidden
        self.layers = layers
        self.shape = shape
        self.pca = pca
        self.steps = steps
        self.batch = batch
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.exaggeration = exaggeration
        self.exaggerated_share = exaggerated_share
        self.noise = noise
        self.clip_pairwise = clip_pairwise
        self.clip_layer = clip_layer
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> "Lakemap":
        """Train the encoder on the rows; y is not used."""
        del y
        rows = self._check(X, reset=True)
        seed = int(check_random_state(self.random_state).randint(2**31))
        job = self._job(len(rows), seed)
        neighbors = find_neighbors(rows, cells.settings(job))
        gaussian = job.affinity_kind == "gaussian"
        graph = join_graph(neighbors, self._perplexity(job.neighbors.k) if gaussian else None)
        self.encoder_, self.telemetry_ = train_encoder(rows, graph, job)
        self._n_features_out = 2
        return self

    def transform(self, X: Any) -> NDArray[np.float32]:
        """(n, 2) float32 positions of the rows; a row's does not depend on the others."""
        check_is_fitted(self)
        positions: NDArray[np.float32] = self.encoder_.embed(self._check(X, reset=False))
        return positions

    def save(self, folder: str | Path) -> None:
        """Write the encoder's two files into the folder: the pipeline's own artefact."""
        check_is_fitted(self)
        self.encoder_.save(Path(folder))

    @classmethod
    def load(cls, folder: str | Path) -> "Lakemap":
        """An estimator that places rows with the encoder in the folder, of whichever origin."""
        encoder = Encoder.load(Path(folder))
        config = encoder.config
        loaded = cls(
            network=config.kind, hidden=config.hidden, layers=config.layers, shape=config.shape
        )
        loaded.encoder_ = encoder
        loaded.n_features_in_ = encoder.n_inputs
        loaded._n_features_out = 2
        return loaded

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float32"]  # what positions always are
        return tags

    def _check(self, X: Any, *, reset: bool) -> NDArray[Any]:
        checked: NDArray[Any] = validate_data(
            self, X, reset=reset, dtype=list(DTYPES), ensure_min_samples=2 if reset else 1
        )
        return checked

    def _perplexity(self, k: int) -> float:
        return max(min(self.perplexity, k / 3), 1.01)

    def _job(self, n_rows: int, seed: int) -> Job:
        """The job file that does the same to a lake of these rows."""
        encoder = EncoderConfig(self.network, self.hidden, self.layers, self.shape)
        training = TrainConfig(
            objective=self.objective,
            batches=self.batches,
            encoder=encoder,
            preprocessing=PreprocessingConfig(pca=self.pca),
            steps=self.steps,
            batch=self.batch,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            exaggeration=self.exaggeration,
            exaggerated_share=self.exaggerated_share,
            noise=self.noise,
            clip_pairwise=self.clip_pairwise,
            clip_layer=self.clip_layer,
            seed=seed,
        )
        k = min(self.n_neighbors, n_rows - 1)
        return Job(
            InputConfig("memory"),
            "memory",
            neighbors=NeighborsConfig(k, self.metric, seed=seed),
            edges=EdgesConfig(seed=seed),
            train=training,
        )


def train_encoder(
    rows: NDArray[Any], graph: SparseRows, job: Job
) -> tuple[Encoder, dict[str, NDArray[Any]]]:
    """The encoder of the job's train section, and the telemetry of its training."""
    settings = train_settings(job)
    preprocessing = fit_preprocessing(rows, preprocessing_config(settings))
    config, fit_config = network_config(job.train), make_fit_config(settings)
    network = build_network(config, preprocessing.n_outputs, job.train.seed)
    trained = Trained(rows, preprocessing, network, build_objective(fit_config.objective))
    fitted = fit(trained, make_batches(graph, job), fit_config)
    return Encoder(config, preprocessing, fitted.network), fitted.telemetry


def make_batches(graph: SparseRows, job: Job) -> Draw:
    """The points of every step, a stretch of edges drawn when it is needed."""
    config, per_step = job.train, job.edges_per_step
    if config.batches == "points":
        return PointBatches(graph, config.batch, config.seed)

    def read(start: int, stop: int) -> Edges:
        rng = np.random.default_rng([config.seed, start])
        heads, tails = draw_positives(graph, np.array([0, stop - start]), rng)
        order = rng.permutation(len(heads))
        heads, tails = heads[order], tails[order]
        if config.batches == "edges":
            return Edges(heads, tails)
        n_rows = len(graph.offsets) - 1
        return Edges(heads, tails, draw_negatives(heads, n_rows, job.edges.negatives, rng))

    return EdgeBatches(read, config.steps * per_step, per_step)

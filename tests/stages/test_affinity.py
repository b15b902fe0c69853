"""affinity: perplexity or memberships of every row; and graphs for the stages after it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from pipeline.config import Job
from pipeline.errors import ConfigError
from pipeline.kernels.memberships import find_memberships
from pipeline.manifest import Part, Plan, Store, open_store
from pipeline.partitions import Partition, split_rows
from pipeline.runner import Runner
from pipeline.stage import Context, Estimate, Shape, Stage, StoreRef, run_stage
from pipeline.stages.affinity import AFFINITY
from pipeline.stages.edges import DRAW, EDGES
from pipeline.stages.symmetrize import SYMMETRIZE, TRANSPOSE, TransposeSettings
from pipeline.stores import Folder
from tests.data import Finished, Recorder, make_blobs, make_job, one_try, read_array

UMAP = {"kind": "umap"}
STEPS: tuple[Stage[Any], ...] = (AFFINITY, TRANSPOSE, SYMMETRIZE, DRAW, EDGES)


class Graph(NamedTuple):
    """Neighbours of every row and their squared distances, (n, k) each."""

    ids: NDArray[np.int64]
    distances: NDArray[np.float32]


def nearest(vectors: NDArray[Any], k: int) -> Graph:
    """The k nearest other rows of every row."""
    distances = cdist(vectors, vectors, "sqeuclidean").astype(np.float32)
    np.fill_diagonal(distances, np.inf)
    ids = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return Graph(ids, np.take_along_axis(distances, ids, axis=1))


def store_neighbors(graph: Graph, job: Job, block_rows: int) -> StoreRef:
    """The graph as the neighbors step leaves it."""

    def prepare(_: Context[TransposeSettings]) -> Plan:
        return Plan(split_rows(len(graph.ids), block_rows))

    def do_part(_: Context[TransposeSettings], partition: Partition, __: Any) -> Part:
        block = slice(partition.start, partition.stop)
        arrays = {name: array[block] for name, array in graph._asdict().items()}
        return Part(partition.n_rows, arrays=arrays)

    stage = Stage(
        name="neighbors",
        version=1,
        reads=(),
        settings=lambda _: TransposeSettings(),
        estimate=lambda _, __: Estimate(1, 1, 1),
        prepare=prepare,
        do_part=do_part,
    )
    return run_stage(stage, {}, Folder(job.output), job, one_try(), Recorder())


def run_graph(
    graph: Graph,
    output: Path,
    last: Stage[Any],
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    block_rows: int = 128,
    runner: Runner | None = None,
) -> dict[str, Store]:
    """The stores of all steps from the graph to `last`."""
    job = make_job(output, output, **(sections or {}))
    refs = {"neighbors": store_neighbors(graph, job, block_rows)}
    for stage in STEPS:
        inputs = {name: refs[name] for name in stage.reads}
        refs[stage.name] = run_stage(
            stage, inputs, Folder(job.output), job, runner or one_try(), Recorder()
        )
        if stage is last:
            break
    return {name: open_store(ref.folder, ref.digest) for name, ref in refs.items()}


def make_shape(n_rows: int) -> Shape:
    """The shape of a sample of that many rows."""
    return Shape(n_rows, 1, n_rows, 8, 4, n_train=n_rows)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return nearest(make_blobs(500).vectors, 15)


@pytest.fixture(scope="module")
def gaussian(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Store:
    return run_graph(graph, tmp_path_factory.mktemp("gaussian"), AFFINITY)["affinity"]


@pytest.fixture(scope="module")
def umap(graph: Graph, tmp_path_factory: pytest.TempPathFactory) -> Store:
    output = tmp_path_factory.mktemp("umap")
    return run_graph(graph, output, AFFINITY, {"affinity": UMAP})["affinity"]


def test_every_row_has_the_perplexity_asked_for(gaussian: Store) -> None:
    values = read_array(gaussian, "values").astype(np.float64)
    assert len(gaussian.records) == 4
    assert values.shape == (500, 15)
    np.testing.assert_allclose(values.sum(axis=1), 1, rtol=1e-6)
    logs = np.log(np.maximum(values, np.finfo(np.float64).tiny))
    np.testing.assert_allclose(np.exp(-(values * logs).sum(axis=1)), 5, rtol=1e-4)
    assert gaussian.manifest.metrics["n_unsolved"] == 0
    assert gaussian.manifest.metrics["worst_error"] < 1e-4


def test_values_are_gaussian_in_the_distance(gaussian: Store, graph: Graph) -> None:
    values = read_array(gaussian, "values").astype(np.float64)
    distances = graph.distances.astype(np.float64)
    beta = np.log(values[:, 0] / values[:, -1]) / (distances[:, -1] - distances[:, 0])
    expected = np.exp(-beta[:, None] * (distances - distances[:, :1]))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(values, expected, rtol=1e-3)
    assert (beta > 0).all()


def test_the_neighbours_of_a_run_have_their_affinities(done: Finished) -> None:
    neighbors, affinity = done.store("neighbors"), done.store("affinity")
    assert [r.partition for r in affinity.records] == [r.partition for r in neighbors.records]
    values = read_array(affinity, "values")
    assert values.shape == read_array(neighbors, "ids").shape
    assert (np.diff(values, axis=1) <= 0).all()
    np.testing.assert_allclose(values.sum(axis=1), 1, rtol=1e-6)


def test_memberships_are_those_of_all_rows_at_once(umap: Store, graph: Graph) -> None:
    """No block has to know of another: see the kernel."""
    values = read_array(umap, "values")
    np.testing.assert_allclose(values, find_memberships(graph.distances).values, rtol=1e-5)
    assert (values[:, 0] == 1).all()
    np.testing.assert_allclose(values.sum(axis=1), np.log2(16), rtol=1e-4)
    assert umap.manifest.metrics["n_unsolved"] == 0
    assert umap.manifest.metrics["worst_error"] < 1e-4


@pytest.mark.parametrize("section", [{}, UMAP])
def test_rows_without_a_solution_are_counted(
    section: dict[str, Any], graph: Graph, tmp_path: Path
) -> None:
    distances = graph.distances.copy()
    distances[[3, 200]] = 0
    distances[499] = 7
    store = run_graph(Graph(graph.ids, distances), tmp_path, AFFINITY, {"affinity": section})[
        "affinity"
    ]
    values = read_array(store, "values")[[3, 200, 499]]
    np.testing.assert_allclose(values, 1 if section else 1 / 15, rtol=1e-6)
    assert store.manifest.metrics["n_unsolved"] == 3
    assert store.manifest.metrics["worst_error"] < 1e-4


def test_memberships_know_no_perplexity(graph: Graph, tmp_path: Path) -> None:
    """Setting one that would not fit is no error, and makes no other store."""
    one, other = (
        run_graph(graph, tmp_path, AFFINITY, {"affinity": UMAP | section})["affinity"]
        for section in ({}, {"perplexity": 100})
    )
    assert one.folder == other.folder
    with pytest.raises(ConfigError, match=r"affinity\.perplexity 100 needs 300 neighbors per row"):
        make_job(tmp_path, tmp_path, affinity={"perplexity": 100})


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"affinity\.kind is 'cauchy'; it must be 'gaussian' or"):
        make_job(tmp_path, tmp_path, affinity={"kind": "cauchy"})

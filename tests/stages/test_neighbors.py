"""neighbors: against brute force in double precision."""

from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.kernels.sampling import draw_positions
from pipeline.manifest import Store
from pipeline.stages import cells
from tests.data import make_blobs, make_job, read_array, run_until, write_parquet

K = 15


class Graph(NamedTuple):
    """The sample's rows, their stored neighbours, and all distances in double precision."""

    ids: NDArray[np.int64]
    distances: NDArray[np.float32]
    exact: NDArray[np.float64]  # (n, n) squared, own is +inf
    recall: dict[str, Any]
    stores: dict[str, Store]


def build(vectors: NDArray[np.float32], folder: Path, **neighbors: Any) -> Graph:
    lake = write_parquet(folder / "lake", vectors)
    job = make_job(lake.path, folder / "maps", neighbors=neighbors)
    stores = run_until(job, "recall")
    rows = read_array(stores["sample"], "vectors").astype(np.float64)
    if neighbors.get("metric") == "cosine":
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    exact = ((rows[:, None] - rows) ** 2).sum(axis=2)
    np.fill_diagonal(exact, np.inf)
    ids, distances = (read_array(stores["neighbors"], name) for name in ("ids", "distances"))
    return Graph(ids, distances, exact, stores["recall"].manifest.metrics, stores)


def check_shape(graph: Graph, k: int = K) -> None:
    """Every row has exactly k sorted, distinct neighbours, never itself, at true distances."""
    n_rows = len(graph.exact)
    assert graph.ids.shape == graph.distances.shape == (n_rows, k)
    assert graph.ids.min() >= 0
    assert graph.ids.max() < n_rows
    assert (graph.ids != np.arange(n_rows)[:, None]).all()
    assert (np.diff(np.sort(graph.ids, axis=1), axis=1) > 0).all()
    assert (np.diff(graph.distances, axis=1) >= 0).all()
    true = np.take_along_axis(graph.exact, graph.ids, axis=1)
    np.testing.assert_allclose(graph.distances, true, rtol=1e-5, atol=1e-6)


def recall_of(graph: Graph, k: int = K) -> NDArray[np.float64]:
    """Share of each row's k nearest that are stored; as near as the k-th by 1e-5 is a tie."""
    farthest = np.sort(graph.exact, axis=1)[:, k - 1 : k]
    found = np.take_along_axis(graph.exact, graph.ids, axis=1)
    shares: NDArray[np.float64] = (found <= farthest * (1 + 1e-5)).sum(axis=1) / k
    return shares


def noise(n_rows: int, width: int = 64, seed: int = 0) -> NDArray[np.float32]:
    """Rows without any structure: the hardest for cells."""
    return np.random.default_rng(seed).normal(size=(n_rows, width)).astype(np.float32)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_one_cell_is_exact(metric: str, tmp_path: Path) -> None:
    vectors = noise(400) * np.random.default_rng(1).uniform(0.5, 20, (400, 1)).astype(np.float32)
    graph = build(vectors, tmp_path, metric=metric)
    assert len(graph.stores["neighbors"].records) > 2
    check_shape(graph)
    assert (graph.ids == np.argsort(graph.exact, axis=1)[:, :K]).all()
    assert graph.recall["recall"] == 1


def test_the_metrics_differ(tmp_path: Path) -> None:
    vectors = noise(200) * np.random.default_rng(1).uniform(0.5, 20, (200, 1)).astype(np.float32)
    one = build(vectors, tmp_path / "1", metric="euclidean")
    other = build(vectors, tmp_path / "2", metric="cosine")
    assert (one.ids != other.ids).mean() > 0.5


def test_forced_cells_lose_what_the_recall_says(tmp_path: Path) -> None:
    graph = build(noise(450, 16), tmp_path, cells=5, overlap=2, recall_queries=10_000)
    check_shape(graph)
    recall = recall_of(graph)
    assert 0.5 < recall.mean() < 0.99  # else this test would see nothing
    assert len(graph.stores["recall"].records) == 3
    assert graph.recall["n_queries"] == 450
    assert graph.recall["recall"] == pytest.approx(recall.mean(), abs=1e-12)
    half = 1.96 * recall.std(ddof=1) / 450**0.5
    assert graph.recall["recall_low"] == pytest.approx(recall.mean() - half)
    assert graph.recall["recall_high"] == pytest.approx(recall.mean() + half)


def test_recall_is_measured_on_seeded_rows(tmp_path: Path) -> None:
    graph = build(noise(450, 16), tmp_path, cells=5, overlap=2, recall_queries=60, seed=3)
    queries = draw_positions(450, 60, [3, crc32(b"recall")])
    assert graph.recall["n_queries"] == 60
    assert graph.recall["recall"] == pytest.approx(recall_of(graph)[queries].mean(), abs=1e-12)


def test_more_overlap_finds_more(tmp_path: Path) -> None:
    found = [
        build(noise(300, 16), tmp_path / str(n), cells=5, overlap=n).recall["recall"]
        for n in (1, 2, 5)
    ]
    assert found[0] < found[1] < found[2] == 1


def test_rows_of_small_cells_are_completed_from_their_bucket(tmp_path: Path) -> None:
    graph = build(noise(120, 16), tmp_path, cells=20, overlap=1)
    check_shape(graph)
    found = graph.stores["search"]
    for record in found.records:
        lists = found.bucket(record, 0)
        assert ((lists["ids"] < 0).any() == (len(lists["rows"]) <= K)).all()


def test_rows_of_small_buckets_are_searched_in_the_whole_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "LEAST_BUCKETS", 20)
    graph = build(noise(120, 16), tmp_path, cells=20, overlap=1)
    found = graph.stores["search"]
    short = sum((found.bucket(record, 0)["ids"] < 0).any(axis=1).sum() for record in found.records)
    assert short > 60
    check_shape(graph)
    assert graph.recall["recall"] > 0.7


def test_blobs_are_each_others_neighbours(tmp_path: Path) -> None:
    blobs = make_blobs(400)
    graph = build(blobs.vectors, tmp_path, cells=5, overlap=1)
    check_shape(graph)
    assert (blobs.labels[graph.ids] == blobs.labels[:, None]).all()


@pytest.mark.parametrize("n_cells", [1, 5])
def test_a_thousand_identical_rows_among_others(
    n_cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = make_blobs(1200).vectors
    vectors[:1000] = vectors[0]
    lake = write_parquet(tmp_path / "lake", vectors, n_files=1)
    monkeypatch.setattr("pipeline.stages.cells.assign_rows", lambda *_: 600)
    monkeypatch.setattr("pipeline.stages.neighbors.graph_rows", lambda _: 600)
    monkeypatch.setattr("pipeline.stages.neighbors.BLOCK_ROWS", 600)
    job = make_job(
        lake.path,
        tmp_path / "maps",
        sample={"rows": 2000},
        neighbors={"cells": n_cells, "overlap": 2},
    )
    stores = run_until(job, "symmetrize")
    ids, distances = (read_array(stores["neighbors"], name) for name in ("ids", "distances"))
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
    assert (ids != np.arange(1200)[:, None]).all()
    assert (ids[:1000] < 1000).all()
    assert (distances[:1000] == 0).all()
    assert (distances[1000:] > 0).all()
    assert stores["recall"].manifest.metrics["recall"] == 1  # ties count
    # No width of the Gaussian gives perplexity 5 to a row with five nearest at one distance.
    n_least = (distances == distances[:, :1]).sum(axis=1)
    assert stores["affinity"].manifest.metrics["n_unsolved"] == (n_least >= 5).sum() >= 1000
    assert stores["symmetrize"].manifest.metrics["mass"] == pytest.approx(1, abs=1e-6)

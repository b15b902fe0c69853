"""edges: draws against the graph, shards in training order."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from pipeline.manifest import Store
from pipeline.runner import Runner
from pipeline.stages import edges
from pipeline.stages.edges import EDGES
from tests.data import make_blobs, one_try, read_array
from tests.stages.test_affinity import UMAP, Graph, nearest, run_graph
from tests.stages.test_symmetrize import joined

N_ROWS, N_EDGES = 200, 120_000


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Rows that many others have as neighbour come first, so that the first block weighs more."""
    vectors = make_blobs(N_ROWS).vectors
    in_degree = np.bincount(nearest(vectors, 15).ids.ravel(), minlength=N_ROWS)
    return nearest(vectors[np.argsort(-in_degree)], 15)


@pytest.fixture(scope="module", params=[{}, UMAP], ids=["gaussian", "umap"])
def stores(
    request: pytest.FixtureRequest, graph: Graph, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Store]:
    """Two blocks, one shard, as many edges as a chi-square test needs."""
    sections = {"affinity": request.param, "edges": {"samples": N_EDGES}}
    return run_graph(graph, tmp_path_factory.mktemp("edges"), EDGES, sections)


def test_heads_and_tails_are_entries_of_the_graph(stores: dict[str, Store]) -> None:
    P = joined(stores["symmetrize"]).toarray()
    heads, tails = (read_array(stores["edges"], name) for name in ("heads", "tails"))
    assert heads.dtype == tails.dtype == np.int64
    assert len(heads) == len(tails) == stores["edges"].n_rows == N_EDGES
    assert (P[heads, tails] > 0).all()


def chi_square(P: NDArray[Any], heads: NDArray[np.int64], tails: NDArray[np.int64]) -> float:
    """How likely edges drawn by P differ from it as these do, or more."""
    found = np.bincount(heads * len(P) + tails, minlength=P.size)
    expected = (P / P.sum()).ravel() * len(heads)
    usual = expected >= 5
    observed = np.append(found[usual], found[~usual].sum())
    wanted = np.append(expected[usual], expected[~usual].sum())
    assert usual.sum() > 1000
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)


def test_edges_come_as_often_as_the_graph_says(stores: dict[str, Store]) -> None:
    P = joined(stores["symmetrize"]).toarray().astype(np.float64)
    heads, tails = (read_array(stores["edges"], name) for name in ("heads", "tails"))
    assert chi_square(P, heads, tails) > 1e-3
    assert chi_square(P**1.1, heads, tails) < 1e-9  # the test can tell


def test_negatives_are_uniform_and_never_the_head(stores: dict[str, Store]) -> None:
    heads, negatives = (read_array(stores["edges"], name) for name in ("heads", "negatives"))
    assert negatives.dtype == np.int64
    assert negatives.shape == (N_EDGES, 5)
    assert (negatives != heads[:, None]).all()
    shifted = (negatives - heads[:, None]) % N_ROWS  # 1..n-1, whatever the head
    assert stats.chisquare(np.bincount(shifted.ravel(), minlength=N_ROWS)[1:]).pvalue > 1e-3


def drawn(graph: Graph, output: Path, **section: Any) -> dict[str, Store]:
    return run_graph(graph, output, EDGES, {"edges": section})


def shards(store: Store) -> list[NDArray[np.int64]]:
    return [store.arrays(record).read("heads") for record in store.records]


@pytest.fixture
def several(graph: Graph, tmp_path: Path) -> dict[str, Store]:
    """Two blocks, five shards of at most 1,000 edges."""
    return drawn(graph, tmp_path, samples=4321, negatives=2)


def test_shards_divide_the_samples(several: dict[str, Store]) -> None:
    sizes = [len(shard) for shard in shards(several["edges"])]
    assert len(several["draw"].records) == 2
    assert len(sizes) == 5
    assert sum(sizes) == several["edges"].n_rows == several["draw"].n_rows == 4321
    # A shard has a bucket of every draw, so their rounding moves an edge or two.
    assert max(sizes) - min(sizes) <= 1 + len(several["draw"].records)
    assert read_array(several["edges"], "negatives").shape == (4321, 2)


def test_a_shard_holds_its_buckets_and_nothing_else(several: dict[str, Store]) -> None:
    draw = several["draw"]
    for number, record in enumerate(several["edges"].records):
        buckets = [draw.bucket(source, number) for source in draw.records]
        shard = several["edges"].arrays(record)
        sent, kept = (
            sorted(zip(heads.tolist(), tails.tolist(), strict=True))
            for heads, tails in (
                [
                    np.concatenate([bucket[name] for bucket in buckets])
                    for name in ("heads", "tails")
                ],
                [shard.read(name) for name in ("heads", "tails")],
            )
        )
        assert sent == kept


def test_every_stretch_of_a_shard_is_a_draw_from_all_rows(several: dict[str, Store]) -> None:
    first_block = several["symmetrize"].records[0].partition.stop
    mass = several["symmetrize"].records[0].metrics["mass"]
    assert mass > 0.55
    for heads in shards(several["edges"]):
        for stretch in np.array_split(heads, 4):
            share = (stretch < first_block).mean()
            assert abs(share - mass) < 5 * (mass * (1 - mass) / len(stretch)) ** 0.5
        assert abs(np.corrcoef(np.arange(len(heads)), heads)[0, 1]) < 0.15


def test_shards_and_negatives_differ_from_each_other(several: dict[str, Store]) -> None:
    first, second = several["edges"].records[:2]
    negatives = [several["edges"].arrays(record).read("negatives") for record in (first, second)]
    assert (negatives[0][:800] != negatives[1][:800]).mean() > 0.9


def test_a_heavy_block_is_drawn_from_by_several_tasks(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "EDGES_PER_DRAW", 7000)
    monkeypatch.setattr(edges, "EDGES_PER_SHARD", 50_000)
    found = drawn(graph, tmp_path, samples=N_EDGES)
    draw, blocks = found["draw"], found["draw"].manifest.facts["blocks"]
    assert len(draw.records) == len(blocks) >= 18
    assert set(blocks) == {0, 1}
    assert max(record.n_rows for record in draw.records) <= 7000
    starts = [record.partition.start for record in draw.records]
    assert starts == np.cumsum([0, *(record.n_rows for record in draw.records)])[:-1].tolist()
    P = joined(found["symmetrize"]).toarray().astype(np.float64)
    heads, tails = (read_array(found["edges"], name) for name in ("heads", "tails"))
    assert len(heads) == N_EDGES
    assert chi_square(P, heads, tails) > 1e-3
    tails_of = [draw.bucket(record, 0)["tails"] for record in draw.records[:2]]
    assert (tails_of[0][:50] != tails_of[1][:50]).any()


def test_a_block_without_draws_has_no_task(graph: Graph, tmp_path: Path) -> None:
    sections = {"edges": {"samples": 2}, "train": {"steps": 1, "batch": 4}}
    found = run_graph(graph, tmp_path, EDGES, sections, 20)
    assert len(found["symmetrize"].records) == 10
    assert 1 <= len(found["draw"].records) <= 2
    assert found["edges"].n_rows == 2


@pytest.mark.parametrize("section", [{}, UMAP], ids=["gaussian", "umap"])
def test_two_workers_draw_the_same_edges(
    section: Mapping[str, Any], graph: Graph, dask_runner: Runner, tmp_path: Path
) -> None:
    settings = {"affinity": section, "edges": {"samples": 9000}}
    serial, parallel = (
        run_graph(graph, tmp_path / name, EDGES, settings, 50, runner)
        for name, runner in (("serial", one_try()), ("dask", dask_runner))
    )
    assert (len(serial["draw"].records), len(serial["edges"].records)) == (4, 9)
    for step in ("draw", "edges"):
        assert serial[step].manifest.digest == parallel[step].manifest.digest


def test_edges_follow_from_the_seed(graph: Graph, tmp_path: Path) -> None:
    same = [
        read_array(drawn(graph, tmp_path / output, samples=2000)["edges"], "tails")
        for output in ("a", "b")
    ]
    other = read_array(drawn(graph, tmp_path / "a", samples=2000, seed=1)["edges"], "tails")
    assert (same[0] == same[1]).all()
    assert (same[0] != other).mean() > 0.9


def test_more_negatives_leave_the_draw_as_it_is(graph: Graph, tmp_path: Path) -> None:
    few, many = (drawn(graph, tmp_path, samples=2000, negatives=n) for n in (2, 7))
    assert few["draw"].folder == many["draw"].folder
    assert read_array(many["edges"], "negatives").shape == (2000, 7)
    assert (read_array(few["edges"], "heads") == read_array(many["edges"], "heads")).all()


def test_training_gets_as_many_edges_as_it_consumes(graph: Graph, tmp_path: Path) -> None:
    sections: dict[str, dict[str, Any]] = {
        "edges": {"samples": None},
        "train": {"steps": 7, "batch": 64},
    }
    assert run_graph(graph, tmp_path, EDGES, sections)["edges"].n_rows == 7 * 32

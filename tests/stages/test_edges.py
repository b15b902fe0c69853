"""edges: draws against P, shards in training order."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from pipeline.manifest import Store
from tests.data import make_blobs, make_job, read_array, run_until, write_parquet
from tests.stages.test_symmetrize import joined

N_ROWS, N_EDGES = 200, 120_000


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("edges") / "lake", make_blobs(N_ROWS).vectors).path


@pytest.fixture(scope="module")
def stores(lake: Path) -> dict[str, Store]:
    """One module, one draw: shards and blocks have the sizes of a real run, so there is one."""
    return run_until(make_job(lake, lake.parent / "maps", edges={"samples": N_EDGES}), "edges")


def test_heads_and_tails_are_entries_of_p(stores: dict[str, Store]) -> None:
    P = joined(stores["symmetrize"]).toarray()
    heads, tails = (read_array(stores["edges"], name) for name in ("heads", "tails"))
    assert heads.dtype == tails.dtype == np.int64
    assert len(heads) == len(tails) == stores["edges"].n_rows == N_EDGES
    assert (P[heads, tails] > 0).all()


def test_edges_come_as_often_as_p_says(stores: dict[str, Store]) -> None:
    P = joined(stores["symmetrize"]).toarray().astype(np.float64)
    heads, tails = (read_array(stores["edges"], name) for name in ("heads", "tails"))
    found = np.bincount(heads * N_ROWS + tails, minlength=N_ROWS**2)
    expected = (P / P.sum()).ravel() * N_EDGES
    usual = expected >= 5
    rest = (found[~usual].sum(), expected[~usual].sum())
    observed, wanted = np.append(found[usual], rest[0]), np.append(expected[usual], rest[1])
    assert usual.sum() > 1000
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_negatives_are_uniform_and_never_the_head(stores: dict[str, Store]) -> None:
    heads, negatives = (read_array(stores["edges"], name) for name in ("heads", "negatives"))
    assert negatives.shape == (N_EDGES, 5)
    assert (negatives != heads[:, None]).all()
    shifted = (negatives - heads[:, None]) % N_ROWS  # 1..n-1, whatever the head
    assert stats.chisquare(np.bincount(shifted.ravel(), minlength=N_ROWS)[1:]).pvalue > 1e-3


def drawn(lake: Path, output: str, **edges: int) -> dict[str, Store]:
    return run_until(make_job(lake, lake.parent / output, edges=edges), "edges")


def shards(store: Store) -> list[NDArray[np.int64]]:
    return [store.arrays(record).read("heads") for record in store.records]


def test_shards_divide_the_samples(lake: Path) -> None:
    stores = drawn(lake, "several", samples=4321, negatives=2)
    sizes = [len(shard) for shard in shards(stores["edges"])]
    assert len(stores["draw"].records) == 2
    assert len(sizes) == 5  # of at most 1,000 edges here
    assert sum(sizes) == stores["edges"].n_rows == 4321
    # A shard is a slice of every block's draws, so their rounding moves an edge or two.
    assert max(sizes) - min(sizes) <= 1 + len(stores["draw"].records)
    assert read_array(stores["edges"], "negatives").shape == (4321, 2)


def test_shards_hold_the_draws_and_nothing_else(lake: Path) -> None:
    stores = drawn(lake, "several", samples=4321, negatives=2)

    def edges_of(store: Store) -> list[tuple[int, ...]]:
        columns = [read_array(store, name) for name in ("heads", "tails")]
        rows = np.column_stack([*columns, read_array(store, "negatives")])
        return sorted(map(tuple, rows.tolist()))

    assert edges_of(stores["edges"]) == edges_of(stores["draw"])


def test_every_stretch_of_a_shard_is_a_draw_from_all_rows(lake: Path) -> None:
    stores = drawn(lake, "several", samples=4321, negatives=2)
    first_block = stores["draw"].records[0].partition.stop
    mass = stores["symmetrize"].records[0].metrics["mass"]
    for heads in shards(stores["edges"]):
        for stretch in np.array_split(heads, 4):
            share = (stretch < first_block).mean()
            assert abs(share - mass) < 5 * (mass * (1 - mass) / len(stretch)) ** 0.5
        assert abs(np.corrcoef(np.arange(len(heads)), heads)[0, 1]) < 0.15


def test_edges_follow_from_the_seed(lake: Path) -> None:
    same = [
        read_array(drawn(lake, output, samples=2000)["edges"], "tails") for output in ("a", "b")
    ]
    other = read_array(drawn(lake, "a", samples=2000, seed=1)["edges"], "tails")
    assert (same[0] == same[1]).all()
    assert (same[0] != other).mean() > 0.9


def test_training_gets_as_many_edges_as_it_consumes(lake: Path) -> None:
    job = make_job(
        lake, lake.parent / "default", edges={"samples": None}, train={"steps": 7, "batch": 64}
    )
    assert run_until(job, "edges")["edges"].n_rows == 7 * 32

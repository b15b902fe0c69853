"""symmetrize: the blocks together are the symmetric graph, against scipy."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import sparse

from jobs.checks import check_after
from pipeline.errors import StageError
from pipeline.manifest import Store
from pipeline.partitions import graph_rows
from pipeline.runner import Runner
from pipeline.stage import PROCESS_BYTES, Context, Stage, StoreRef
from pipeline.stages import edges
from pipeline.stages.symmetrize import SYMMETRIZE
from tests.data import (
    Finished,
    make_blobs,
    make_job,
    one_try,
    read_array,
    run_job,
    write_parquet,
)
from tests.stages.test_affinity import UMAP, Graph, make_shape, nearest, run_graph

KINDS = pytest.mark.parametrize("section", [{}, UMAP], ids=["gaussian", "umap"])


def joined(store: Store) -> sparse.csr_array:
    """All blocks, one below the other."""
    blocks = []
    for record in store.records:
        block = store.arrays(record)
        parts = (block.read("values"), block.read("columns"), block.read("offsets"))
        blocks.append(sparse.csr_array(parts, shape=(record.n_rows, store.n_rows)))
    return sparse.csr_array(sparse.vstack(blocks))


def one_way(neighbors: Store, affinity: Store) -> sparse.csr_array:
    """What every row sends, as one matrix in float64."""
    ids, values = read_array(neighbors, "ids"), read_array(affinity, "values")
    rows = np.repeat(np.arange(len(ids)), ids.shape[1])
    entries = (values.ravel().astype(np.float64), (rows, ids.ravel()))
    return sparse.csr_array(sparse.coo_array(entries, shape=(len(ids), len(ids))))


def check(stores: dict[str, Store], fuzzy: bool = False) -> sparse.csr_array:
    """The graph, after a comparison with scipy's and of its sums with the metrics."""
    store = stores["symmetrize"]
    found = joined(store)
    forward = one_way(stores["neighbors"], stores["affinity"])
    both = forward + forward.T
    wanted = both - forward * forward.T if fuzzy else both / (2 * store.n_rows)
    gap = abs(found.astype(np.float64) - wanted)
    assert gap.max() <= 1e-6 * wanted.max()
    assert sparse.csr_array(found - found.T).nnz == 0  # to the bit
    assert (found.diagonal() == 0).all()
    assert found.data.min() >= 0
    mass = found.sum(dtype=np.float64)
    assert store.manifest.metrics["n_entries"] == found.nnz
    assert store.manifest.metrics["mass"] == pytest.approx(mass)
    assert fuzzy or mass == pytest.approx(1, abs=1e-6)
    return found


@KINDS
def test_the_blocks_together_are_the_symmetric_graph(
    section: dict[str, Any], tmp_path: Path
) -> None:
    graph = nearest(make_blobs(500).vectors, 15)
    stores = run_graph(graph, tmp_path, SYMMETRIZE, {"affinity": section})
    assert len(stores["symmetrize"].records) == 4
    found = check(stores, fuzzy=bool(section))
    assert not section or found.data.max() == 1


def test_the_blocks_of_a_run_together_are_p(done: Finished) -> None:
    assert len(done.store("symmetrize").records) > 2
    check({name: done.store(name) for name in ("neighbors", "affinity", "symmetrize")})


def test_every_entry_travels_to_the_block_of_its_neighbour(tmp_path: Path) -> None:
    graph = nearest(make_blobs(500).vectors, 15)
    stores = run_graph(graph, tmp_path, SYMMETRIZE)
    transpose, values = stores["transpose"], read_array(stores["affinity"], "values")
    starts = [*(record.partition.start for record in transpose.records), 500]
    assert transpose.manifest.facts["block_starts"] == starts
    travelled: dict[tuple[int, int], float] = {}
    for record in transpose.records:
        assert sum(transpose.bucket_index(record).n_rows) == record.n_rows * 15
        for bucket, first in enumerate(starts[:-1]):
            found = transpose.bucket(record, bucket)
            assert (found["targets"] < starts[bucket + 1] - first).all()
            rows = found["sources"].astype(np.int64) + record.partition.start
            columns = found["targets"].astype(np.int64) + first
            pairs = zip(rows.tolist(), columns.tolist(), strict=True)
            travelled |= dict(zip(pairs, found["values"].tolist(), strict=True))
    owners = np.repeat(np.arange(500), 15).tolist()
    pairs = zip(owners, graph.ids.ravel().tolist(), strict=True)
    assert travelled == dict(zip(pairs, values.ravel().tolist(), strict=True))


@KINDS
def test_two_workers_write_the_same_bytes(
    section: dict[str, Any], dask_runner: Runner, tmp_path: Path
) -> None:
    graph = nearest(make_blobs(500).vectors, 15)
    serial, parallel = (
        run_graph(graph, tmp_path / name, SYMMETRIZE, {"affinity": section}, runner=runner)
        for name, runner in (("serial", one_try()), ("dask", dask_runner))
    )
    for step in ("affinity", "transpose", "symmetrize"):
        assert serial[step].manifest.digest == parallel[step].manifest.digest


def test_a_hub_and_rows_no_one_points_at(tmp_path: Path) -> None:
    """A row that is everyone's neighbour, and far rows that are no one's."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(300, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[0] = 0  # the centre of the sphere is nearer to each row than any other row is
    vectors[1:10] *= 30
    stores = run_graph(nearest(vectors, 15), tmp_path, SYMMETRIZE)
    in_degree = np.bincount(read_array(stores["neighbors"], "ids").ravel(), minlength=300)
    assert in_degree[0] > 250
    assert (in_degree == 0).any()
    check(stores)


def hub_graph(n_rows: int) -> Graph:
    """Every row's neighbours are row 0 and the next three of the others."""
    others = np.arange(n_rows - 1)[:, np.newaxis]
    following = 1 + (others + np.arange(1, 4)) % (n_rows - 1)
    ids = np.concatenate([np.zeros_like(others), following], axis=1)
    ids = np.concatenate([[[1, 2, 3, 4]], ids])
    distances = np.tile(np.array([1, 2, 3, 4], np.float32), (n_rows, 1))
    return Graph(ids, distances)


def peak_of_largest_task(stage: Stage[Any], stores: dict[str, Store], job: Any) -> int:
    """Bytes that the task with the hub allocates, its encoding included."""
    refs = {
        name: StoreRef(stores[name].folder, stores[name].manifest.digest) for name in stage.reads
    }
    store = stores[stage.name]
    context = Context(stage.settings(job), refs, store.folder, store.manifest.facts)
    tracemalloc.start()
    try:
        part = stage.do_part(context, store.records[0].partition, lambda *_: None)
        part.encode()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@KINDS
def test_a_row_that_100_000_rows_point_at(section: dict[str, Any], tmp_path: Path) -> None:
    n_rows = 100_002
    settings = {
        "neighbors": {"k": 4},
        "affinity": {"perplexity": 1.3, **section},
        "edges": {"samples": 50_000},
    }
    stores = run_graph(hub_graph(n_rows), tmp_path, edges.EDGES, settings, graph_rows(n_rows))
    found = check(stores, fuzzy=bool(section))
    assert found.indptr[1] == n_rows - 1
    hub_share = found[[0]].sum(dtype=np.float64) / found.sum(dtype=np.float64)
    assert 0.1 < hub_share < 0.5
    heads = read_array(stores["edges"], "heads")
    assert (heads == 0).mean() == pytest.approx(hub_share, rel=0.05)
    job = make_job(tmp_path, tmp_path, **settings)
    for stage in (SYMMETRIZE, edges.DRAW):
        bound = stage.estimate(job, make_shape(n_rows)).task_bytes - PROCESS_BYTES
        assert 0.1 * bound < peak_of_largest_task(stage, stores, job) < bound


def test_a_graph_that_is_no_distribution_stops_the_run(done: Finished) -> None:
    manifest = done.store("symmetrize").manifest
    wrong = replace(manifest, metrics=manifest.metrics | {"mass": 1.001})
    check_after("symmetrize", manifest, done.job)
    with pytest.raises(StageError, match=r"symmetrize: P sums to 1\.001, must be 1"):
        check_after("symmetrize", wrong, done.job)
    umap = replace(done.job, affinity=replace(done.job.affinity, kind="umap"))
    check_after("symmetrize", wrong, umap)


def test_a_job_with_memberships_ends_in_a_map(tmp_path: Path) -> None:
    lake = write_parquet(tmp_path / "lake", *make_blobs(600))
    job = make_job(lake.path, tmp_path / "maps", affinity=UMAP)
    assert run_job(job).metrics["rows_mapped"] == 600

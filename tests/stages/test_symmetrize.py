"""symmetrize: the blocks together are P, against scipy."""

from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from pipeline.manifest import Store
from tests.data import Finished, make_job, read_array, run_until, write_parquet


def joined(store: Store) -> sparse.csr_array:
    """All blocks, one below the other."""
    blocks = []
    for record in store.records:
        block = store.arrays(record)
        parts = (block.read("values"), block.read("columns"), block.read("offsets"))
        blocks.append(sparse.csr_array(parts, shape=(record.n_rows, store.n_rows)))
    return sparse.csr_array(sparse.vstack(blocks))


def conditional(neighbors: Store, affinity: Store) -> sparse.csr_array:
    """p(j|i) as one matrix."""
    ids, values = read_array(neighbors, "ids"), read_array(affinity, "values")
    rows = np.repeat(np.arange(len(ids)), ids.shape[1])
    entries = (values.ravel().astype(np.float64), (rows, ids.ravel()))
    return sparse.csr_array(sparse.coo_array(entries, shape=(len(ids), len(ids))))


def check(stores: dict[str, Store]) -> None:
    P = joined(stores["symmetrize"])
    forward = conditional(stores["neighbors"], stores["affinity"])
    expected = (forward + forward.T) / (2 * stores["symmetrize"].n_rows)
    np.testing.assert_allclose(P.toarray(), expected.toarray(), rtol=1e-6, atol=1e-12)
    assert (P.toarray() == P.toarray().T).all()  # to the bit
    assert P.sum(dtype=np.float64) == pytest.approx(1, abs=1e-6)
    assert (P.diagonal() == 0).all()
    assert P.data.min() >= 0
    metrics = stores["symmetrize"].manifest.metrics
    assert metrics["n_entries"] == P.nnz
    assert metrics["mass"] == pytest.approx(P.sum(dtype=np.float64))


def test_the_blocks_together_are_p(done: Finished) -> None:
    names = ("neighbors", "affinity", "symmetrize")
    assert len(done.store("symmetrize").records) > 2
    check({name: done.store(name) for name in names})


def test_a_hub_and_rows_no_one_points_at(tmp_path: Path) -> None:
    """A row that is everyone's neighbour, and far rows that are no one's."""
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(300, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[0] = 0  # the centre of the sphere is nearer to each row than any other row is
    vectors[1:10] *= 30
    lake = write_parquet(tmp_path / "lake", vectors)
    stores = run_until(make_job(lake.path, tmp_path / "maps"), "symmetrize")
    in_degree = np.bincount(read_array(stores["neighbors"], "ids").ravel(), minlength=300)
    assert in_degree[0] > 250
    assert (in_degree == 0).any()
    check(stores)

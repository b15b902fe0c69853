"""affinity: the perplexity of every row, and the transposed entries."""

import numpy as np
import pytest

from tests.data import Finished, read_array


def test_every_row_has_the_perplexity_asked_for(done: Finished) -> None:
    values = read_array(done.store("affinity"), "values").astype(np.float64)
    assert values.shape == (500, 15)
    np.testing.assert_allclose(values.sum(axis=1), 1, rtol=1e-6)
    logs = np.log(np.maximum(values, np.finfo(np.float64).tiny))
    perplexity = np.exp(-(values * logs).sum(axis=1))
    np.testing.assert_allclose(perplexity, done.job.affinity.perplexity, rtol=1e-4)
    metrics = done.store("affinity").manifest.metrics
    assert metrics["n_unsolved"] == 0
    assert metrics["worst_error"] < 1e-4


def test_nearer_rows_weigh_more(done: Finished) -> None:
    values = read_array(done.store("affinity"), "values")
    assert (np.diff(values, axis=1) <= 0).all()
    assert (values[:, 0] > values[:, -1]).all()


def test_values_are_gaussian_in_the_distance(done: Finished) -> None:
    values = read_array(done.store("affinity"), "values").astype(np.float64)
    distances = read_array(done.store("neighbors"), "distances").astype(np.float64)
    beta = np.log(values[:, 0] / values[:, -1]) / (distances[:, -1] - distances[:, 0])
    expected = np.exp(-beta[:, None] * (distances - distances[:, :1]))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(values, expected, rtol=1e-3)


def test_the_transposed_entries_are_the_same_ones_by_column(done: Finished) -> None:
    affinity, neighbors = done.store("affinity"), done.store("neighbors")
    starts = affinity.manifest.facts["block_starts"]
    assert len(affinity.records) > 2
    assert starts == [*(record.partition.start for record in affinity.records), 500]
    for record in affinity.records:
        part, block = record.partition, affinity.arrays(record)
        ids = neighbors.rows("ids", part.start, part.stop)
        rows, columns = block.read("column_rows"), block.read("column_columns")
        forward = {
            (part.start + row, int(column)): value
            for row, (names, values) in enumerate(zip(ids, block.read("values"), strict=True))
            for column, value in zip(names, values, strict=True)
        }
        backward = {
            (int(j), int(i)): value
            for i, j, value in zip(rows, columns, block.read("column_values"), strict=True)
        }
        assert forward == backward
        assert (np.diff(rows) >= 0).all()
        cuts = block.read("column_starts")
        for bucket in range(len(starts) - 1):
            inside = rows[cuts[bucket] : cuts[bucket + 1]]
            assert ((starts[bucket] <= inside) & (inside < starts[bucket + 1])).all()
        assert (cuts[0], cuts[-1]) == (0, len(rows))


def test_affinities_stay_inside_a_blob(done: Finished) -> None:
    """With blobs far apart, no row is pulled to another's."""
    sample, lake = done.store("sample"), done.lake
    starts = np.cumsum([0, *(record.n_rows for record in done.store("ingest").records)])
    rows = lake.good[starts[read_array(sample, "partition")] + read_array(sample, "rank")]
    labels = lake.labels[rows]
    ids = read_array(done.store("neighbors"), "ids")
    values = read_array(done.store("affinity"), "values")
    assert values[labels[ids] != labels[:, None]].sum() == pytest.approx(0, abs=1e-6)

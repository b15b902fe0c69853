"""The whole graph in memory, by the kernels of the stages: for the estimator, not for lakes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.kernels.affinity import calibrate
from pipeline.kernels.cells import assign_cells, trim_cells
from pipeline.kernels.memberships import find_memberships
from pipeline.kernels.neighbors import (
    Neighbors,
    group_members,
    search_cells,
    search_exact,
    widen,
)
from pipeline.kernels.sampling import draw_positions
from pipeline.kernels.symmetrize import (
    Received,
    SparseRows,
    join_memberships,
    join_probabilities,
    send_entries,
)
from pipeline.stages.cells import (
    CellSettings,
    bucket_row_bytes,
    choose,
    count_drawn,
    make_probe,
)


def find_neighbors(rows: NDArray[Any], config: CellSettings) -> Neighbors:
    """The k neighbours of every row, (n, k), as `centroids` to `neighbors` find them."""
    vectors = widen(rows, config.metric)
    n_rows, width = vectors.shape
    drawn = draw_positions(n_rows, count_drawn(config, n_rows, width), [config.seed])
    probe = make_probe(vectors[np.sort(drawn)], n_rows, config.k)
    option = choose(probe, config, bucket_row_bytes(width, 4, config.k))
    assigned = assign_cells(vectors, option.centroids, option.overlap)
    numbers = trim_cells(assigned, option.reach)
    found = search_cells(vectors, group_members(numbers, numbers >= 0), config.k)
    ids, distances = found.ids.astype(np.int64), found.distances
    short = np.flatnonzero(ids[:, -1] < 0)
    if len(short):
        exact = search_exact(vectors[short], short, vectors, np.arange(n_rows), config.k)
        ids[short], distances[short] = exact
    return Neighbors(ids, distances)


def join_graph(neighbors: Neighbors, perplexity: float | None) -> SparseRows:
    """The symmetric graph: joint probabilities of that perplexity, or UMAP's fuzzy union."""
    n_rows = len(neighbors.ids)
    if perplexity is None:
        values, join = find_memberships(neighbors.distances).values, join_memberships
    else:
        values, join = calibrate(neighbors.distances, perplexity).affinities, join_probabilities
    _, targets, sources, sent = send_entries(neighbors.ids, values, np.array([0, n_rows]))
    return join(neighbors.ids, values, Received(targets, sources.astype(np.int64), sent), n_rows)

"""One neighbour search of others on one data set, in a process of its own; imports nothing of ours.

python graph_peers.py METHOD ROWS.npy QUERIES.npy FOUND.npz REQUEST

REQUEST is JSON: `k`, `threads`, `rounds`, `trials` (a list of settings), `share` (search every
share-th row only and multiply), `warm_rows` (rows of a first build that is not counted) and
`reuse` (trials that differ in search alone share one index). Writes the neighbours of the query
rows, one array per trial, and prints seconds as JSON. Exit code 3: the method is not installed.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

NOT_INSTALLED = 3
Settings = dict[str, Any]


class Method(NamedTuple):
    """A method: `build` makes an index of rows with the `keys` of the settings, `search` asks it.

    build(module, rows, settings, threads) returns the index; search(module, index, rows, settings)
    the neighbours of the rows, themselves among them, (n, settings["k"] + 1) or more.
    """

    module: str
    distribution: str
    keys: tuple[str, ...]
    build: Callable[[Any, Any, Settings, int], Any]
    search: Callable[[Any, Any, Any, Settings], Any] | None  # None: the index is the graph


def build_descent(module: Any, rows: Any, settings: Settings, threads: int) -> Any:
    """The graph, which is what is wanted."""
    chosen = {key: settings[key] for key in METHODS["pynndescent"].keys if key in settings}
    return module.NNDescent(rows, n_jobs=threads, random_state=0, **chosen).neighbor_graph[0]


def build_hnsw(module: Any, rows: Any, settings: Settings, threads: int) -> Any:
    """The layered graph."""
    index = module.Index(space="l2", dim=rows.shape[1])
    chosen = {key: settings[key] for key in METHODS["hnswlib"].keys}
    index.init_index(max_elements=len(rows), random_seed=0, **chosen)
    index.set_num_threads(threads)
    index.add_items(rows)
    return index


def search_hnsw(_: Any, index: Any, rows: Any, settings: Settings) -> Any:
    """One query per row."""
    index.set_ef(max(settings["ef"], settings["k"] + 1))
    return index.knn_query(rows, settings["k"] + 1)[0]


def build_lists(module: Any, rows: Any, settings: Settings, threads: int) -> Any:
    """Trained and filled k-means lists."""
    module.omp_set_num_threads(threads)
    index = module.index_factory(rows.shape[1], f"IVF{settings['nlist']},Flat")
    index.train(rows)
    index.add(rows)
    return index


def search_lists(_: Any, index: Any, rows: Any, settings: Settings) -> Any:
    """A scan of the nearest lists per row."""
    index.nprobe = settings["nprobe"]
    return index.search(rows, settings["k"] + 1)[1]


def keep_rows(module: Any, rows: Any, _: Settings, threads: int) -> Any:
    """The rows themselves."""
    module.omp_set_num_threads(threads)
    return rows


def search_rows(module: Any, index: Any, rows: Any, settings: Settings) -> Any:
    """A scan of all rows per row."""
    return module.knn(rows, index, settings["k"] + 1)[1]


DESCENT_KEYS = ("n_neighbors", "n_trees", "n_iters", "max_candidates", "leaf_size", "delta")
METHODS = {
    "pynndescent": Method("pynndescent", "pynndescent", DESCENT_KEYS, build_descent, None),
    "hnswlib": Method("hnswlib", "hnswlib", ("M", "ef_construction"), build_hnsw, search_hnsw),
    "faiss IVF": Method("faiss", "faiss-cpu", ("nlist",), build_lists, search_lists),
    "faiss exact": Method("faiss", "faiss-cpu", (), keep_rows, search_rows),
}


class Data(NamedTuple):
    """All rows, those that are searched, and where the query rows are among these."""

    rows: Any
    searched: Any
    queries: Any
    in_graph: Any  # where the query rows are among all rows

    @property
    def scale(self) -> float:
        """By what the seconds of the search are multiplied."""
        return len(self.rows) / len(self.searched)


def load(rows_file: str, queries_file: str, share: int) -> Data:
    """The rows; all of them are searched, or the query rows and others up to one share."""
    rows, queries = np.load(rows_file), np.load(queries_file)
    if share == 1:
        return Data(rows, rows, queries, queries)
    others = np.setdiff1d(np.arange(len(rows)), queries)
    n_others = max(0, len(rows) // share - len(queries))
    others = np.random.default_rng(0).choice(others, n_others, replace=False)
    chosen = np.concatenate([queries, others])
    return Data(rows, rows[chosen], np.arange(len(queries)), queries)


class Clock(NamedTuple):
    """One round: what building and searching took, the search as if for all rows."""

    seconds: float
    ended: float  # the time of day, had all rows been searched


class Bench:
    """Runs a method's trials on the data."""

    def __init__(self, method: Method, module: Any, data: Data, request: dict[str, Any]) -> None:
        self._method, self._module = method, module
        self._data, self._request = data, request
        self._built: tuple[Settings, Any, float] | None = None

    def round(self, settings: Settings) -> tuple[Clock, Any]:
        """The time of one round and the neighbours of the query rows."""
        index, build_seconds = self._index(settings)
        search, data = self._method.search, self._data
        if search is None:
            return Clock(build_seconds, time.time()), index[data.in_graph]
        started = time.perf_counter()
        found = search(self._module, index, data.searched, settings)
        search_seconds = time.perf_counter() - started
        scaled = search_seconds * data.scale
        ended = time.time() + scaled - search_seconds
        return Clock(build_seconds + scaled, ended), found[data.queries]

    def _index(self, settings: Settings) -> tuple[Any, float]:
        """The index and the seconds it took; an earlier trial's where that is allowed."""
        chosen = {key: settings.get(key) for key in self._method.keys}
        if self._request["reuse"] and self._built and self._built[0] == chosen:
            return self._built[1:]
        self._built = None  # free the last one first
        started = time.perf_counter()
        index = self._method.build(
            self._module, self._data.rows, settings, self._request["threads"]
        )
        seconds = time.perf_counter() - started
        if self._request["reuse"]:
            self._built = (chosen, index, seconds)
        return index, seconds


def main(name: str, rows_file: str, queries_file: str, found_file: str, request_text: str) -> None:
    """Load, warm up, run every trial, write, report."""
    method, request = METHODS[name], json.loads(request_text)
    try:
        module = importlib.import_module(method.module)
    except ImportError:
        sys.exit(NOT_INSTALLED)
    data = load(rows_file, queries_file, request["share"])
    if request["warm_rows"]:
        method.build(
            module, data.rows[: request["warm_rows"]], request["trials"][0], request["threads"]
        )
    bench, results, found = Bench(method, module, data, request), [], {}
    for number, trial in enumerate(request["trials"]):
        clocks = []
        for _ in range(request["rounds"]):
            clock, found[str(number)] = bench.round({"k": request["k"], **trial})
            clocks.append(clock)
        results.append({"settings": trial, "rounds": [clock._asdict() for clock in clocks]})
    np.savez(found_file, **found)
    print(json.dumps({"version": version(method.distribution), "trials": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])

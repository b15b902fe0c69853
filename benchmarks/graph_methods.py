"""The peers of the graph benchmarks: how each is set to reach the recall, and how it is run."""

import json
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import graph_recall, measure
from benchmarks.graph_peers import METHODS, NOT_INSTALLED

RECALL = 0.95
THREADS = 2
SLOW_SHARE = 10
Settings = dict[str, Any]


def _descent(n_neighbors: int, max_candidates: int, n_iters: int, n_trees: int) -> Settings:
    return {
        "n_neighbors": n_neighbors,
        "max_candidates": max_candidates,
        "n_iters": n_iters,
        "n_trees": n_trees,
    }


def _hnsw(M: int, ef_construction: int, ef: int) -> Settings:
    return {"M": M, "ef_construction": ef_construction, "ef": ef}


def _lists(nlist: int, nprobe: int) -> Settings:
    return {"nlist": nlist, "nprobe": nprobe}


# The fastest that reach the recall among 3 to 15 trials each, by data set, k and method.
TUNED: dict[tuple[str, int], dict[str, Settings]] = {
    ("mnist", 15): {
        "pynndescent": _descent(16, 10, 3, 5),
        "hnswlib": _hnsw(12, 30, 20),
        "faiss IVF": _lists(512, 8),
        "faiss exact": {},
    },
    ("mnist", 45): {
        "pynndescent": _descent(46, 12, 3, 6),
        "hnswlib": _hnsw(12, 30, 50),
        "faiss IVF": _lists(512, 10),
        "faiss exact": {},
    },
    ("fashion_mnist", 15): {
        "pynndescent": _descent(16, 10, 3, 5),
        "hnswlib": _hnsw(12, 30, 20),
        "faiss IVF": _lists(512, 6),
        "faiss exact": {},
    },
    ("fashion_mnist", 45): {
        "pynndescent": _descent(46, 12, 3, 6),
        "hnswlib": _hnsw(12, 30, 50),
        "faiss IVF": _lists(512, 8),
        "faiss exact": {},
    },
    ("glove", 15): {
        "pynndescent": _descent(34, 80, 18, 20),
        "hnswlib": _hnsw(32, 120, 250),
        "faiss IVF": _lists(1024, 50),
        "faiss exact": {},
    },
    ("glove", 45): {
        "pynndescent": _descent(60, 60, 18, 20),
        "hnswlib": _hnsw(32, 120, 400),
        "faiss IVF": _lists(1024, 68),
        "faiss exact": {},
    },
    ("generated", 15): {"pynndescent": _descent(16, 10, 4, 4)},
}


def grid(method: str, k: int) -> list[Settings]:
    """Settings that --tune tries; those of one index follow each other."""
    if method == "pynndescent":
        easy = [_descent(k + 1, many, 3, trees) for many in (8, 10, 12, 15) for trees in (5, 6, 9)]
        hard = [_descent(n, many, 18, 11) for n in (k + 11, k + 31) for many in (30, 60)]
        return easy + hard
    if method == "hnswlib":
        builds = ((8, 40), (12, 30), (12, 60), (16, 100))
        return [_hnsw(*build, scale * (k + 5)) for build in builds for scale in (1, 2, 4, 8)]
    if method == "faiss IVF":
        return [_lists(n, probes) for n in (256, 1024) for probes in (4, 6, 8, 12, 24, 48, 64)]
    return [{}]


@dataclass(frozen=True)
class Task:
    """A data set in files, for a peer to find k neighbours of every row."""

    folder: Path  # holds rows.npy and queries.npy; results and caches go there too
    rows: NDArray[Any]
    truth: graph_recall.Truth
    k: int
    python: str


@dataclass(frozen=True)
class Effort:
    """How thoroughly a peer is measured."""

    rounds: int = 1  # the first of them is the cold one
    share: int = 1  # every share-th row is searched, its seconds multiplied
    warm_rows: int = 0  # rows of a first build that is not counted
    reuse: bool = False  # trials that differ in search alone share one index


class Found(NamedTuple):
    """What a peer did with some settings."""

    method: str
    version: str
    settings: Settings
    recall: float
    seconds: list[float]  # of each round
    colds: list[float]  # from the start of a process to the end of its first round
    peak_bytes: int
    share: int

    @property
    def warm_seconds(self) -> float:
        """The median of the rounds after the first; of one round, that one."""
        return statistics.median(self.seconds[1:] or self.seconds)

    @property
    def cold_seconds(self) -> float:
        """The median of the cold starts."""
        return statistics.median(self.colds)

    @property
    def n_runs(self) -> int:
        """Rounds that the median is of."""
        return max(1, len(self.seconds) - 1)


def save_task(
    folder: Path, rows: NDArray[Any], truth: graph_recall.Truth, k: int, python: str
) -> Task:
    """The task with its files in the folder; rows become float32, which all peers take."""
    folder.mkdir(exist_ok=True)
    if not (folder / "rows.npy").exists():
        np.save(folder / "rows.npy", rows.astype(np.float32))
    np.save(folder / "queries.npy", truth.queries)
    return Task(folder, rows, truth, k, python)


def run_peer(task: Task, method: str, trials: list[Settings], effort: Effort) -> list[Found]:
    """What the peer did with each of the settings, in one new process; nothing if not installed."""
    cache, places = task.folder / "numba", task.folder / "found.npz"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    request = {"k": task.k, "threads": THREADS, "trials": trials, **effort.__dict__}
    script = Path(__file__).with_name("graph_peers.py")
    files = [str(path) for path in (task.folder / "rows.npy", task.folder / "queries.npy", places)]
    started = time.time()
    try:
        measured = measure.run_measured(
            [task.python, str(script), method, *files, json.dumps(request)],
            {"NUMBA_CACHE_DIR": str(cache)},
        )
    except measure.CommandError as error:
        if error.code != NOT_INSTALLED:
            raise
        print(f"{METHODS[method].distribution} not installed: left out", file=sys.stderr)
        return []
    return _read_found(task, method, effort, started, measured)


def run_colds(task: Task, found: Found, times: int) -> Found:
    """What was found, with so many cold starts in all."""
    more = (
        run_peer(task, found.method, [found.settings], Effort(share=found.share))
        for _ in range(times - len(found.colds))
    )
    return found._replace(colds=found.colds + [again[0].cold_seconds for again in more])


def _read_found(
    task: Task, method: str, effort: Effort, started: float, measured: measure.Measured
) -> list[Found]:
    """The process's report, with the recall of what it found."""
    told = json.loads(measured.stdout.splitlines()[-1])
    results = []
    with np.load(task.folder / "found.npz", allow_pickle=False) as arrays:
        for number, trial in enumerate(told["trials"]):
            recall = graph_recall.score(task.rows, task.truth, arrays[str(number)], task.k)
            rounds = trial["rounds"]
            results.append(
                Found(
                    method=method,
                    version=told["version"],
                    settings=trial["settings"],
                    recall=recall,
                    seconds=[clock["seconds"] for clock in rounds],
                    colds=[rounds[0]["ended"] - started],
                    peak_bytes=measured.largest_bytes,
                    share=effort.share,
                )
            )
    return results


def tune(task: Task, method: str) -> Found | None:
    """The fastest settings of the grid that reach the recall; prints every trial."""
    warm = Effort(warm_rows=5000, reuse=True, share=1 if method == "pynndescent" else SLOW_SHARE)
    trials = run_peer(task, method, grid(method, task.k), warm)
    for found in trials:
        print(f"{method} k={task.k} {found.settings}: {found.recall:.4f} {found.seconds[0]:.2f} s")
    good = [found for found in trials if found.recall >= RECALL]
    return min(good, key=lambda found: found.seconds[0], default=None)


def describe(settings: Settings) -> str:
    """The settings in a table's cell."""
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "-"


def show_recall(recall: float) -> str:
    """The recall in a table's cell, marked where it is too low."""
    return f"{recall:.4f}" + ("" if recall >= RECALL else " (short)")

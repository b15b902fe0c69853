"""MNIST and Fashion-MNIST from a Parquet lake to a measured map, beside umap-learn and openTSNE.

Lakemap runs as people run it: `lakemap run` with default settings on 60,000 training rows, the
10,000 test rows held out. The peers fit the same training rows and transform the same test rows.
All are scored by the same code on the same rows.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from sklearn.manifold import trustworthiness
from sklearn.neighbors import KNeighborsClassifier

from benchmarks import measure
from benchmarks.peers import DISTRIBUTIONS, NOT_INSTALLED

SETS = ("mnist", "fashion_mnist")
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
ACCURACY_K = 10
TRUST_K = 12
TRUST_ROWS = 5000
ROWS_PER_FILE = 10_000
PACKAGES = ("lakemap", "torch", "faiss-cpu", "faiss-gpu", "dask", "pyarrow", "scikit-learn")
JOB = """\
input: {path: lake, vector: pixels, id: row, label: label, holdout: held_out}
output: maps
sample: {rows: 60000}
"""
RUNS: dict[str, tuple[str, ...]] = {
    "lakemap": (),
    "lakemap, 1,000 steps": ("train.steps=1000",),
    "lakemap, 6,000 steps": ("train.steps=6000",),
}
QUICK = ("train.steps=100", "train.batch=256", measure.NO_GATES)


class Rows(NamedTuple):
    """A data set: vectors (n, d) and labels (n,) of the training and of the test rows."""

    x_train: NDArray[Any]
    y_train: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]


class Places(NamedTuple):
    """Map positions (n, 2) of the training and of the test rows."""

    train: NDArray[Any]
    test: NDArray[Any]


def main() -> None:
    """Measure every method on every data set."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the .npz files")
    parser.add_argument("--sets", nargs="+", default=SETS, help="names of .npz files with a split")
    parser.add_argument("--peers-python", default=sys.executable, help="Python that has the peers")
    options = parser.parse_args()
    files = {name: find_file(options.data, name) for name in options.sets}
    facts, packages = measure.machine(), measure.versions(PACKAGES)
    found = {}
    for name, path in files.items():
        with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as folder:
            found[name] = compare(path, Path(folder), options)
    for results in found.values():
        packages |= {
            r["package"]: r["version"] for r in results["methods"].values() if "package" in r
        }
    document = {"machine": facts, "versions": packages, "quick": options.quick, "sets": found}
    measure.publish(options, "lake_to_map", document, report(document))


def find_file(folder: Path, name: str) -> Path:
    """The data set's file; ends the program when it is not there."""
    path = folder / f"{name}.npz"
    if not folder.is_dir():
        measure.stop(f"{folder} is no folder; give --data the folder of the .npz files")
    if not path.is_file():
        measure.stop(f"{path} is missing; benchmarks/README.md says what it must hold")
    with np.load(path, allow_pickle=False) as arrays:
        lacking = [array for array in ARRAYS if array not in arrays.files]
    if lacking:
        measure.stop(f"{path} has no {', '.join(lacking)}; the set needs a train/test split")
    return path


def load_rows(path: Path, quick: bool) -> Rows:
    """The data set, with --quick its first 4,000 and 1,000 rows."""
    with np.load(path, allow_pickle=False) as arrays:
        rows = Rows(*(arrays[name] for name in ARRAYS))
    if not quick:
        return rows
    return Rows(rows.x_train[:4000], rows.y_train[:4000], rows.x_test[:1000], rows.y_test[:1000])


def compare(path: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Lakemap's and the peers' figures on one data set."""
    rows = load_rows(path, options.quick)
    print(f"{path.stem}: {len(rows.x_train):,} + {len(rows.x_test):,} rows", file=sys.stderr)
    write_lake(folder / "lake", rows)
    (folder / "job.yaml").write_text(JOB)
    methods: dict[str, dict[str, Any]] = {}
    stages: dict[str, dict[str, Any]] = {}
    for title, settings in RUNS.items():
        chosen = [*settings, *(QUICK if options.quick else ())]
        output = folder / f"maps-{len(methods)}"
        stages[title], methods[title] = run_lakemap(folder / "job.yaml", output, rows, chosen)
    for peer in DISTRIBUTIONS:
        measured = run_peer(peer, path, folder, rows, options.peers_python)
        if measured is not None:
            methods[peer] = measured
    shape = {"training": len(rows.x_train), "test": len(rows.x_test)}
    return {"rows": shape, "stages": stages["lakemap"], "methods": methods}


def write_lake(folder: Path, rows: Rows) -> None:
    """The rows as Parquet files; test rows are marked as held out."""
    folder.mkdir()
    vectors = np.concatenate([rows.x_train, rows.x_test])
    labels = np.concatenate([rows.y_train, rows.y_test])
    for start in range(0, len(vectors), ROWS_PER_FILE):
        part = vectors[start : start + ROWS_PER_FILE]
        numbers = np.arange(start, start + len(part))
        columns = {
            "row": pa.array(numbers),
            "pixels": pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), part.shape[1]),
            "label": pa.array(labels[start : start + len(part)]),
            "held_out": pa.array(numbers >= len(rows.x_train)),
        }
        pq.write_table(pa.table(columns), folder / f"part-{start:07d}.parquet")


def run_lakemap(
    job: Path, output: Path, rows: Rows, settings: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cost of every step, and the figures of the map."""
    command = [measure.lakemap_command(), "run", str(job), "--json"]
    command += [f"--set={setting}" for setting in (f"output={output}", *settings)]
    measured = measure.run_measured(command)
    run = measure.read_run(output)
    embed, until = run.stages["embed"], list(run.stages).index("embed")
    fit_seconds = sum(found.wall_seconds for found in list(run.stages.values())[:until])
    figures = {
        "seconds": measured.seconds,
        "fit_seconds": fit_seconds,
        "transform_rows_per_second": embed.rows / embed.wall_seconds,
        "peak_bytes": measured.peak_bytes,
        "largest_process_bytes": measured.largest_bytes,
        **score(rows, read_places(run.folder / "map", rows)),
        "own_metrics": run.metrics,
    }
    return measure.plain_stages(run.stages), figures


def read_places(folder: Path, rows: Rows) -> Places:
    """The published map, in the order of the rows."""
    found = pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("*.parquet")))
    places = np.full((len(rows.x_train) + len(rows.x_test), 2), np.nan)
    places[found["id"].to_numpy()] = np.stack([found["x"].to_numpy(), found["y"].to_numpy()], 1)
    if not np.isfinite(places).all():
        measure.stop(f"{folder}: the map lacks rows of the lake")
    return Places(places[: len(rows.x_train)], places[len(rows.x_train) :])


def run_peer(name: str, path: Path, folder: Path, rows: Rows, python: str) -> dict[str, Any] | None:
    """The peer's figures; None when it is not installed."""
    places = folder / f"{name}.npz"
    script = Path(__file__).with_name("peers.py")
    sizes = [str(len(rows.x_train)), str(len(rows.x_test))]
    try:
        measured = measure.run_measured([python, str(script), name, str(path), *sizes, str(places)])
    except measure.CommandError as error:
        if error.code != NOT_INSTALLED:
            raise
        print(
            f"{DISTRIBUTIONS[name]} not installed: pip install umap-learn openTSNE", file=sys.stderr
        )
        return None
    told = json.loads(measured.stdout.splitlines()[-1])
    with np.load(places, allow_pickle=False) as arrays:
        scores = score(rows, Places(arrays["train"], arrays["test"]))
    return {
        "package": DISTRIBUTIONS[name],
        "version": told["version"],
        "seconds": measured.seconds,
        "fit_seconds": told["fit_seconds"],
        "transform_rows_per_second": len(rows.x_test) / told["transform_seconds"],
        "peak_bytes": measured.peak_bytes,
        "largest_process_bytes": measured.largest_bytes,
        **scores,
    }


def score(rows: Rows, places: Places) -> dict[str, float]:
    """10-NN accuracy of all test rows among all training rows; trustworthiness of 5,000."""
    guess = KNeighborsClassifier(ACCURACY_K).fit(places.train, rows.y_train)
    rng = np.random.default_rng(0)
    n_rows = min(TRUST_ROWS, len(rows.x_test))
    chosen = rng.choice(len(rows.x_test), n_rows, replace=False)
    vectors = rows.x_test[chosen].astype(np.float32)
    return {
        "accuracy": float(guess.score(places.test, rows.y_test)),
        "trustworthiness": float(
            trustworthiness(vectors, places.test[chosen], n_neighbors=TRUST_K)
        ),
    }


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts = ["# Lake to map", "", measure.conditions(document["machine"], document["versions"])]
    parts += ["", *NOTES]
    if document["quick"]:
        parts += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    for name, found in document["sets"].items():
        stages = {step: measure.StageTime(**cost) for step, cost in found["stages"].items()}
        sizes = f"{found['rows']['training']:,} training and {found['rows']['test']:,} test rows"
        parts += ["", f"## {name}: {sizes}", "", _methods_table(found["methods"])]
        parts += ["", "Lakemap, step by step:", "", measure.stage_table(stages)]
    return "\n".join(parts) + "\n"


NOTES = (
    f"- accuracy: {ACCURACY_K}-NN on the map, all test rows among all training rows.",
    f"- trustworthiness: k={TRUST_K}, the same seeded test rows, at most {TRUST_ROWS:,}, for all.",
    "- seconds: the whole process, from start to end; Lakemap's include its report and picture.",
    "- fit: until the encoder is trained; for the peers `fit`, compilation included.",
    "- transform: rows per second of the embed step (two workers, reading and writing Parquet); "
    "for the peers one call of `transform` in memory.",
    "- memory: resident, all processes together, sampled; pages they share count in each.",
)


def _methods_table(methods: dict[str, dict[str, Any]]) -> str:
    head = ["method", "accuracy", "trustworthiness", "seconds", "fit s", "transform rows/s", "MiB"]
    rows = [
        [
            f"{found['package']} {found['version']}" if "package" in found else name,
            f"{found['accuracy']:.4f}",
            f"{found['trustworthiness']:.4f}",
            f"{found['seconds']:.0f}",
            f"{found['fit_seconds']:.0f}",
            f"{found['transform_rows_per_second']:,.0f}",
            measure.mebibytes(found["peak_bytes"]),
        ]
        for name, found in methods.items()
    ]
    return measure.table(head, rows)


if __name__ == "__main__":
    main()

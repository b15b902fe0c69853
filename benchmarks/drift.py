"""Refreshes that meet new clusters: what the drift scores say, and how well the map stays put.

For every digit, a lake of MNIST without it is mapped. Then come a night of rows like the others, a
night of one known digit alone, and a night of which a part is the digit that the encoder has never
seen. After the last the encoder is trained again (by drift, else with --retrain), and compared with
one trained from the beginning on the same lake. `none` is a lake with all digits.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors

from benchmarks import measure

PACKAGES = ("lakemap", "torch", "dask", "pyarrow")
NIGHTS = ("ordinary", "one known digit", "new digit")
SCORES = ("novel_share", "occupancy_shift", "domain_auc")
KNOWN_ROWS, NIGHT_ROWS, NEW_SHARE = 10_000, 1000, 0.3
FIRST_NIGHT, SECOND_NIGHT, LAST_NIGHT = 12_000, 13_000, 15_000  # where each draws its rows from
ROWS_PER_FILE = 2500
K = 10


class Digits(NamedTuple):
    """MNIST: vectors (n, 784) uint8, labels (n,)."""

    vectors: NDArray[np.uint8]
    labels: NDArray[np.int64]


def main() -> None:
    """Measure one lake per digit."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist.npz")
    parser.add_argument("--new", nargs="+", default=["none", *map(str, range(10))])
    parser.add_argument("--steps", type=int, default=3000, help="of training")
    options = parser.parse_args()
    path = options.data / "mnist.npz"
    if not path.is_file():
        measure.stop(f"{path} is missing; benchmarks/README.md says where")
    with np.load(path, allow_pickle=False) as arrays:
        digits = Digits(arrays["x_train"], arrays["y_train"].astype(np.int64))
    facts, found = measure.machine(), []
    for new in options.new[:2] if options.quick else options.new:
        with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as folder:
            found.append(measure_lake(Path(folder), digits, new, options))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    document = {
        "machine": facts,
        "versions": measure.versions(PACKAGES),
        "quick": options.quick,
        "steps": options.steps,
        "lakes": found,
    }
    measure.publish(options, "drift", document, report(document))


def measure_lake(
    folder: Path, digits: Digits, new: str, options: argparse.Namespace
) -> dict[str, Any]:
    """A first map, three nights, a training in place and one from the beginning."""
    is_new = digits.labels == (int(new) if new != "none" else -1)
    known, strange = np.flatnonzero(~is_new), np.flatnonzero(is_new)
    write_rows(folder / "lake/first", digits, known[:KNOWN_ROWS])
    job = write_job(folder, "maps", options)
    run_lakemap("run", job)

    alone = known[SECOND_NIGHT:]
    alone = alone[digits.labels[alone] == digits.labels[alone[0]]][:NIGHT_ROWS]
    n_new = int(NEW_SHARE * NIGHT_ROWS) if len(strange) else 0
    last = np.concatenate([known[LAST_NIGHT:][: NIGHT_ROWS - n_new], strange[:n_new]])
    rows = {
        "ordinary": known[FIRST_NIGHT:][:NIGHT_ROWS],
        "one known digit": alone,
        "new digit": last,
    }
    nights, retrained = {}, False
    for number, name in enumerate(NIGHTS):
        write_rows(folder / f"lake/night-{number}", digits, rows[name])
        metrics = run_lakemap("refresh", job)
        retrained = "displacement_median" in metrics
        nights[name] = {key: metrics[key] for key in (*SCORES, "drift")}
    if not retrained:
        metrics = run_lakemap("refresh", job, "--retrain")
    fresh = run_lakemap("run", write_job(folder, "fresh", options))
    return {
        "new": new,
        "nights": nights,
        "by_drift": retrained,
        "displacement_median": metrics["displacement_median"],
        "displacement_p95": metrics["displacement_p95"],
        "in_place": judge(folder / "maps", metrics, new),
        "from_the_beginning": judge(folder / "fresh", fresh, new),
    }


def write_rows(folder: Path, digits: Digits, rows: NDArray[np.int64]) -> None:
    """The rows as Parquet files."""
    folder.mkdir(parents=True)
    for index, start in enumerate(range(0, len(rows), ROWS_PER_FILE)):
        some = rows[start : start + ROWS_PER_FILE]
        vectors = pa.array(digits.vectors[some].ravel())
        columns = {
            "row": pa.array(some),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, digits.vectors.shape[1]),
            "digit": pa.array(digits.labels[some]),
        }
        pq.write_table(pa.table(columns), folder / f"{index:03d}.parquet")


def write_job(folder: Path, output: str, options: argparse.Namespace) -> Path:
    """A job with default settings but for the length of the training."""
    path = folder / f"{output}.yaml"
    document = {
        "input": {"path": "lake", "vector": "vector", "id": "row", "label": "digit"},
        "output": output,
        "train": {"steps": 100 if options.quick else options.steps},
        "gates": {"trustworthiness": None, "displacement": None},
    }
    path.write_text(yaml.safe_dump(document))
    return path


def run_lakemap(command: str, job: Path, *options: str) -> dict[str, Any]:
    """The metrics of what the command published."""
    words = [measure.lakemap_command(), command, str(job), "--json", *options]
    found: dict[str, Any] = json.loads(measure.run_measured(words).stdout)["metrics"]
    return found


def judge(output: Path, metrics: dict[str, Any], new: str) -> dict[str, float | None]:
    """Trustworthiness, accuracy, and the share of the new digit's rows that lie among their own."""
    table = pq.read_table(measure.published_folder(output) / "map")
    xy = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
    strange = table["label"].to_numpy() == (int(new) if new != "none" else -1)
    among = None
    if strange.any():
        search = NearestNeighbors(n_neighbors=K + 1).fit(xy)
        near = search.kneighbors(xy[strange], return_distance=False)[:, 1:]
        among = float(strange[near].mean())
    return {
        "trustworthiness": metrics["trustworthiness"],
        "accuracy": metrics["accuracy"],
        "among_their_own": among,
    }


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Drift, and training again in place", ""]
    lines.append(measure.conditions(document["machine"], document["versions"]))
    lines += [
        "",
        f"MNIST, {KNOWN_ROWS:,} rows without the new digit, nights of {NIGHT_ROWS:,} rows; of the "
        f"last {NEW_SHARE:.0%} are the new digit. {document['steps']:,} steps of training.",
    ]
    if document["quick"]:
        lines += ["", "**A quick run with hardly any training: these figures mean nothing.**"]
    head = ["new digit", "night", *SCORES, "verdict"]
    rows = [
        [lake["new"], name, *(f"{night[key]:.3f}" for key in SCORES), night["drift"]]
        for lake in document["lakes"]
        for name, night in lake["nights"].items()
    ]
    lines += ["", "## Scores of the nights", "", measure.table(head, rows)]
    head = ["new digit", "trained again by", "moved, median", "95%"]
    for name in ("trustworthiness", "accuracy", "among their own"):
        head += [f"{name}, in place", "fresh"]
    lines += ["", "## The encoder trained again in place, and one trained from the beginning", ""]
    lines.append(measure.table(head, [_training_row(lake) for lake in document["lakes"]]))
    lines += ["", "Moved: shares of the map's diameter, of rows in files that stayed."]
    lines.append("Among their own: the share of the ten nearest rows that are the new digit too.")
    return "\n".join(lines) + "\n"


def _training_row(lake: dict[str, Any]) -> list[str]:
    row = [lake["new"], "drift" if lake["by_drift"] else "--retrain"]
    row += [f"{lake['displacement_median']:.2%}", f"{lake['displacement_p95']:.2%}"]
    for name in ("trustworthiness", "accuracy", "among_their_own"):
        found = (lake["in_place"][name], lake["from_the_beginning"][name])
        row += ["" if value is None else f"{value:.3f}" for value in found]
    return row


if __name__ == "__main__":
    main()

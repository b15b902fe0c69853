"""The map stage as lakes grow: rows, partitions, files, and a store across the network.

rows        embed of 1M, 10M (and with --largest more) rows: cost per row, memory of workers, driver
partitions  100,000 tiny partitions through runner, ledger and finaliser
idle        a run with nothing to do on a lake of 10,000 files
refresh     a refresh of such a lake with nothing to do, and with ten new files
s3          embed from and to an S3 server on loopback, against the same on disk
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks import measure
from pipeline.stores import Folder
from tests.s3 import BUCKET, OWNER, run_server

PARTS = ("rows", "partitions", "idle", "refresh", "s3")
PACKAGES = ("lakemap", "torch", "dask", "pyarrow", "obstore")
WORKERS = 2
WIDTH = 32
ROWS_PER_FILE = 500_000
JOB: dict[str, Any] = {
    "sample": {"rows": 5000},
    "train": {
        "steps": 20,
        "batch": 256,
        "encoder": {"kind": "mlp", "hidden": 256},
        "preprocessing": {"pca": 0},
    },
    "evaluate": {"rows": 200, "reference_rows": 200},
    "gates": {"recall": None, "trustworthiness": None},
    "cluster": {"kind": "local", "workers": WORKERS},
}


def main() -> None:
    """Measure the parts that were asked for."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--largest", type=int, default=10_000_000, help="rows of the largest lake")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions where they are short")
    options = parser.parse_args()
    facts = measure.machine()
    found: dict[str, Any] = {}
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as folder:
            found[part] = globals()[f"measure_{part}"](Path(folder), options)
            print(f"{part}: {found[part]}", file=sys.stderr, flush=True)
    document = {
        "machine": facts,
        "versions": measure.versions(PACKAGES),
        "quick": options.quick,
        **found,
    }
    measure.publish(options, "map_scale", document, report(document))


def write_lake(folder: Path, n_rows: int, rows_per_file: int) -> None:
    """Random float32 vectors in Parquet files."""
    folder.mkdir(parents=True)
    for index, start in enumerate(range(0, n_rows, rows_per_file)):
        count = min(rows_per_file, n_rows - start)
        values = np.random.default_rng([0, index]).standard_normal(count * WIDTH, dtype=np.float32)
        columns = {
            "row": pa.array(np.arange(start, start + count)),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(values), WIDTH),
        }
        path = folder / f"part-{index:06d}.parquet"
        pq.write_table(pa.table(columns), path, compression="none", use_dictionary=False)


def write_job(path: Path, lake: str, output: str) -> Path:
    """A job that trains for a moment: the weights do not matter here."""
    source = {"path": lake, "vector": "embedding", "id": "row"}
    path.write_text(yaml.safe_dump({**JOB, "input": source, "output": output}))
    return path


def measure_rows(folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """The embed stage on larger and larger lakes, each the tenfold of the one before."""
    n_rows, found = 20_000 if options.quick else 1_000_000, []
    largest = 10 * n_rows if options.quick else options.largest
    while n_rows <= largest:
        write_lake(folder / "lake", n_rows, ROWS_PER_FILE)
        job = write_job(folder / "job.yaml", "lake", "maps")
        run_lakemap("run", job)
        shutil.rmtree(folder / "maps/stores/embed")
        measured = run_lakemap("stage", "embed", job)
        step = measure.read_run(folder / "maps").stages["embed"]
        found.append(
            {
                "rows": n_rows,
                "seconds": step.wall_seconds,
                "rows_per_second": n_rows / step.wall_seconds,
                "worker_bytes": step.peak_bytes,
                "driver_bytes": measured.own_bytes,
            }
        )
        print(found[-1], file=sys.stderr, flush=True)
        shutil.rmtree(folder / "lake")
        shutil.rmtree(folder / "maps")
        n_rows *= 10
    return found


def run_lakemap(*words: str | Path) -> measure.Measured:
    """The command in this environment."""
    return measure.run_measured([measure.lakemap_command(), *map(str, words)])


def measure_partitions(_: Path, options: argparse.Namespace) -> dict[str, float]:
    """A stage of tiny tasks, of which nothing but the ledger costs anything."""
    n_parts = 1000 if options.quick else 100_000
    command = [sys.executable, "-m", "benchmarks.tiny_stage", str(n_parts)]
    told = json.loads(measure.run_measured(command).stdout.splitlines()[-1])
    return {
        "partitions": n_parts,
        **told,
        "milliseconds_each": 1000 * told["seconds"] / n_parts,
    }


def measure_idle(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """A second run of a job whose lake has many files and has not changed."""
    n_files = 100 if options.quick else 10_000
    write_lake(folder / "lake", 20 * n_files, 20)
    job = write_job(folder / "job.yaml", "lake", "maps")
    run_lakemap("run", job)
    again = [run_lakemap("run", job) for _ in range(options.rounds)]
    return {
        "files": n_files,
        "seconds": statistics.median(measured.seconds for measured in again),
        "driver_bytes": max(measured.own_bytes for measured in again),
    }


def measure_refresh(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Refreshes of a lake of many files: nothing has changed; then ten files have come."""
    n_files = 100 if options.quick else 10_000
    write_lake(folder / "lake", 20 * n_files, 20)
    job = write_job(folder / "job.yaml", "lake", "maps")
    run_lakemap("run", job)
    idle, busy = [], []
    for number in range(options.rounds):
        idle.append(run_lakemap("refresh", job))
        write_lake(folder / f"lake/night-{number}", 200, 20)
        busy.append(run_lakemap("refresh", job))
    return {
        "files": n_files,
        "seconds": statistics.median(measured.seconds for measured in idle),
        "seconds_new": statistics.median(measured.seconds for measured in busy),
        "driver_bytes": max(measured.own_bytes for measured in (*idle, *busy)),
    }


def measure_s3(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rows per second of embed from and to disk, and from and to a bucket."""
    n_rows = 20_000 if options.quick else 1_000_000
    write_lake(folder / "lake", n_rows, 100_000)
    disk = write_job(folder / "disk.yaml", "lake", "maps")
    (folder / "s3").mkdir()
    with run_server(folder / "s3") as server:
        os.environ |= server.environment(OWNER)
        bucket = Folder(f"s3://{BUCKET}")
        for path in (folder / "lake").iterdir():
            bucket.put(f"lake/{path.name}", path.read_bytes())
        remote = write_job(folder / "remote.yaml", f"{bucket.url}/lake", f"{bucket.url}/maps")
        rates: dict[str, list[float]] = {"disk": [], "s3": []}
        for job in (disk, remote):
            run_lakemap("run", job)
        for _ in range(options.rounds):
            rates["disk"].append(embed_again(disk, Folder(str(folder / "maps"))))
            rates["s3"].append(embed_again(remote, bucket.join("maps")))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {"rows": n_rows, **rates, "ratio": medians["s3"] / medians["disk"]}


def embed_again(job: Path, output: Folder) -> float:
    """Rows per second of the embed stage, done anew."""
    for key in output.list("stores/embed"):
        output.delete(f"{key}")
    run_lakemap("stage", "embed", job)
    (name,) = output.folders("stores/embed")
    store = output.join(f"stores/embed/{name}")
    rows = yaml.safe_load(store.get("manifest.json"))["n_rows"]
    return float(rows / yaml.safe_load(store.get("timing.json"))["wall_seconds"])


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# The map stage as lakes grow", ""]
    lines.append(measure.conditions(document["machine"], document["versions"]))
    if document["quick"]:
        lines += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    if "rows" in document:
        head = ["rows", "embed, s", "rows/s", "of the first", "worker peak MiB", "driver peak MiB"]
        first = document["rows"][0]["rows_per_second"]
        rows = [
            [
                f"{found['rows']:,}",
                f"{found['seconds']:.1f}",
                f"{found['rows_per_second']:,.0f}",
                f"{found['rows_per_second'] / first:.2f}",
                measure.mebibytes(int(found["worker_bytes"])),
                measure.mebibytes(int(found["driver_bytes"])),
            ]
            for found in document["rows"]
        ]
        lines += ["", f"## Rows of {WIDTH} float32, {WORKERS} workers", ""]
        lines.append(measure.table(head, rows))
    if "partitions" in document:
        found = document["partitions"]
        size = measure.mebibytes(int(found["driver_bytes"]))
        lines += ["", "## Tiny partitions", ""]
        lines.append(
            f"{found['partitions']:,} partitions in {found['seconds']:.1f} s: "
            f"{found['milliseconds_each']:.2f} ms each, driver peak {size} MiB."
        )
    if "idle" in document:
        found = document["idle"]
        size = measure.mebibytes(int(found["driver_bytes"]))
        lines += ["", "## Nothing to do", ""]
        lines.append(
            f"`lakemap run` on an unchanged lake of {found['files']:,} files: "
            f"{found['seconds']:.1f} s, peak {size} MiB."
        )
    if "refresh" in document:
        found = document["refresh"]
        size = measure.mebibytes(int(found["driver_bytes"]))
        lines += ["", "## Refresh", ""]
        lines.append(
            f"`lakemap refresh` on a lake of {found['files']:,} files: {found['seconds']:.1f} s "
            f"if nothing has changed, {found['seconds_new']:.1f} s with ten new files, "
            f"peak {size} MiB."
        )
    if "s3" in document:
        found = document["s3"]
        head = ["", "rows/s, each round"]
        rows = [[k, ", ".join(f"{v:,.0f}" for v in found[k])] for k in ("disk", "s3")]
        lines += ["", "## S3 on loopback against a disk", "", measure.table(head, rows)]
        lines += ["", f"Medians: {found['ratio']:.2f} of the disk's rows per second."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

"""Rows per second of the embed stage against the bare forward pass of the same network.

The limit: as many one-thread processes as there are workers, rows already in memory, nothing but
the network. The stage: read Parquet, check, forward, write Parquet, commit. The network's weights
do not matter here, so it is trained for a few steps only.
"""

import multiprocessing
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import measure
from encoders.artifact import EMBED_BATCH
from encoders.networks import NetworkConfig, build_network

PACKAGES = ("lakemap", "torch", "dask", "pyarrow")
ROWS_PER_FILE = 50_000
ROWS_IN_MEMORY = 1 << 17  # of the limit; walked over again and again
WARM_BATCHES = 20
JOB = """\
input: {{path: lake, vector: embedding, id: row}}
output: maps
sample: {{rows: 2000}}
train: {{steps: 20, batch: 256}}
evaluate: {{rows: 200, reference_rows: 200}}
gates: {{recall: null, trustworthiness: null}}
cluster: {{kind: local, workers: {workers}}}
"""


class Rate(NamedTuple):
    """One round of the embed stage."""

    rows_per_second: float
    busy_share: float  # of the workers' time that was spent inside tasks
    peak_bytes: int


def main() -> None:
    """Measure the limit, then the stage, several times each."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the lake")
    parser.add_argument("--width", type=int, default=128, help="columns of the vectors")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    options = parser.parse_args()
    n_rows = 20_000 if options.quick else options.rows
    facts = measure.machine()
    limits = [measure_limit(n_rows, options.width, options.workers) for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as name:
        folder = Path(name)
        write_lake(folder / "lake", n_rows, options.width)
        (folder / "job.yaml").write_text(JOB.format(workers=options.workers))
        measure.run_measured([measure.lakemap_command(), "run", str(folder / "job.yaml")])
        rounds = [measure_embed(folder, options.workers) for _ in range(options.rounds)]
    rate = statistics.median(found.rows_per_second for found in rounds)
    document = {
        "machine": facts,
        "versions": measure.versions(PACKAGES),
        "quick": options.quick,
        "rows": n_rows,
        "width": options.width,
        "workers": options.workers,
        "limit_rows_per_second": limits,
        "embed": [found._asdict() for found in rounds],
        "ratio": rate / max(limits),
    }
    measure.publish(options, "embed_rate", document, report(document))


def write_lake(folder: Path, n_rows: int, width: int) -> None:
    """Random float32 vectors in Parquet files, one row group each."""
    folder.mkdir()
    for index, start in enumerate(range(0, n_rows, ROWS_PER_FILE)):
        count = min(ROWS_PER_FILE, n_rows - start)
        values = np.random.default_rng([0, index]).standard_normal(count * width, dtype=np.float32)
        columns = {
            "row": pa.array(np.arange(start, start + count)),
            "embedding": pa.FixedSizeListArray.from_arrays(pa.array(values), width),
        }
        pq.write_table(pa.table(columns), folder / f"part-{index:05d}.parquet")


def measure_embed(folder: Path, workers: int) -> Rate:
    """One round of the embed stage alone, on the finished stores before it."""
    shutil.rmtree(folder / "maps/stores/embed")
    measure.run_measured([measure.lakemap_command(), "stage", "embed", str(folder / "job.yaml")])
    found = measure.read_run(folder / "maps").stages["embed"]
    return Rate(
        found.rows / found.wall_seconds,
        found.task_seconds / (workers * found.wall_seconds),
        found.peak_bytes,
    )


def measure_limit(n_rows: int, width: int, workers: int) -> float:
    """Rows per second of the bare network, one one-thread process per worker."""
    spawn = multiprocessing.get_context("spawn")
    barrier, times = spawn.Barrier(workers), spawn.SimpleQueue()
    share = n_rows // workers
    processes = [
        spawn.Process(target=forward, args=(barrier, times, share, width)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        measure.stop("a process of the limit measurement failed; see above")
    slowest = max(float(times.get()) for _ in processes)
    return workers * share / slowest


def forward(barrier: Any, times: Any, n_rows: int, width: int) -> None:
    """Put the seconds of a forward pass over n_rows rows into the queue; all start together."""
    torch.set_num_threads(1)
    network = build_network(NetworkConfig(), width).eval()
    rows = torch.randn(min(ROWS_IN_MEMORY, max(n_rows, EMBED_BATCH)), width)
    with torch.inference_mode():
        for _ in range(WARM_BATCHES):
            network(rows[:EMBED_BATCH])
        barrier.wait()
        started = time.perf_counter()
        at = 0
        for done in range(0, n_rows, EMBED_BATCH):
            at = at if at + EMBED_BATCH <= len(rows) else 0
            network(rows[at : at + min(EMBED_BATCH, n_rows - done)])
            at += EMBED_BATCH
        times.put(time.perf_counter() - started)


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    limits, rounds = document["limit_rows_per_second"], document["embed"]
    rows = [
        ["bare forward pass (best)", f"{max(limits):,.0f}", "1.00", "", ""],
        *(
            [
                f"embed stage, round {number}",
                f"{found['rows_per_second']:,.0f}",
                f"{found['rows_per_second'] / max(limits):.2f}",
                f"{found['busy_share']:.0%}",
                measure.mebibytes(found["peak_bytes"]),
            ]
            for number, found in enumerate(rounds, 1)
        ),
    ]
    head = ["", "rows/s", "of the limit", "workers busy", "worker peak MiB"]
    parts = [
        f"# Embed: {document['rows']:,} rows of {document['width']} float32, "
        f"{document['workers']} workers",
        "",
        measure.conditions(document["machine"], document["versions"]),
        "",
        "The stage's time is its wall time in `lakemap stage embed`, from its plan to its "
        "manifest: reading and checking Parquet, loading torch and the encoder in new workers, "
        "the forward pass, writing and committing Parquet.",
        "",
        measure.table(head, rows),
        "",
        f"Median of the rounds: {document['ratio']:.2f} of the limit.",
    ]
    if document["quick"]:
        parts += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()

"""Rows per second of the embed stage against the bare forward pass of the same network.

The limit: as many one-thread processes as there are workers, rows already in memory, nothing but
the paper's MLP. The stage: read Parquet, check, forward, write Parquet, commit. The network's
weights do not matter here, so it is trained for a few steps only. With --data and --peers-python
also: the peers' transform of MNIST's test rows, once they are warm.
"""

import argparse
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import measure, transform_peers
from benchmarks.silent import Silent
from encoders.artifact import EMBED_BATCH, Encoder
from encoders.networks import NetworkConfig, build_network
from jobs import flow
from jobs.cluster import open_runner
from pipeline.config import Job
from pipeline.job_file import load_job
from pipeline.runner import Runner

PACKAGES = ("lakemap", "torch", "dask", "pyarrow")
FILE_BYTES = 32 << 20
ROWS_IN_MEMORY = 1 << 17  # of the limit; walked over again and again
FEW_ROWS = 10_000
WARM_BATCHES = 20
NETWORK = NetworkConfig(kind="mlp")
JOB = """\
input: {{path: lake, vector: embedding, id: row}}
output: maps
sample: {{rows: 2000}}
train: {{steps: 20, batch: 256, encoder: {{kind: mlp, hidden: 256}}, preprocessing: {{pca: 0}}}}
evaluate: {{rows: 200, reference_rows: 200}}
gates: {{recall: null, trustworthiness: null}}
cluster: {{kind: local, workers: {workers}}}
"""


class Kind(NamedTuple):
    """The rows of a lake: lists of numbers, or bytes of a fixed number."""

    width: int
    stored: str

    @property
    def dtype(self) -> str:
        """What the numbers are."""
        return "uint8" if self.stored == "bytes" else self.stored


KINDS = (Kind(128, "float32"), Kind(784, "uint8"), Kind(784, "bytes"))


class Rate(NamedTuple):
    """One round of the embed stage."""

    rows_per_second: float
    busy_share: float  # of the workers' time that was spent inside tasks
    peak_bytes: int


def main() -> None:
    """Measure the limit, then the stage, several times each; then the peers."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the lakes")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of each measurement")
    parser.add_argument("--data", type=Path, help="folder of the .npz files, for the peers")
    parser.add_argument("--peers-python", default=sys.executable, help="Python that has the peers")
    parser.add_argument("--parametric-python", help="Python that has umap-learn and tensorflow")
    options = parser.parse_args()
    if options.data is not None and not (options.data / "mnist.npz").exists():
        measure.stop(f"{options.data}: has no mnist.npz; give --data the folder that has it")
    facts = measure.machine()
    kinds = [measure_kind(kind, options) for kind in KINDS]
    document = {
        "machine": facts,
        "versions": measure.versions(PACKAGES),
        "quick": options.quick,
        "workers": options.workers,
        "kinds": kinds,
        "peers": measure_peers(options),
    }
    measure.publish(options, "embed_rate", document, report(document))


def measure_kind(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    """Limit, stage and calls in memory for rows of a kind."""
    n_rows = 20_000 if options.quick else options.rows
    limits = [measure_limit(n_rows, kind, options.workers) for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as name:
        folder = Path(name)
        write_lake(folder / "lake", n_rows, kind)
        (folder / "job.yaml").write_text(JOB.format(workers=options.workers))
        job = load_job(folder / "job.yaml")
        with open_runner(job.cluster, lambda _: None) as runner:
            flow.run(job, runner, Silent())
            rounds = [measure_embed(job, runner) for _ in range(options.rounds)]
        cold = measure_cold(folder)
        (model,) = (folder / "maps/runs").glob("*/model")
        called = measure_calls(Encoder.load(model), kind, options.rounds)
    rate = statistics.median(found.rows_per_second for found in rounds)
    found = {
        "rows": n_rows,
        **kind._asdict(),
        "limit_rows_per_second": limits,
        "embed": [found._asdict() for found in rounds],
        "cold_rows_per_second": cold,
        "ratio": rate / max(limits),
        "call_rows_per_second": called,
    }
    print(found, file=sys.stderr, flush=True)
    return found


def make_rows(kind: Kind, n_rows: int, seed: int) -> Any:
    """Random rows of the kind."""
    rng = np.random.default_rng([seed, kind.width])
    if kind.dtype == "uint8":
        return rng.integers(0, 256, (n_rows, kind.width), np.uint8)
    return rng.standard_normal((n_rows, kind.width), dtype=np.float32)


def write_lake(folder: Path, n_rows: int, kind: Kind) -> None:
    """Random vectors in Parquet files of one partition's size, one row group each."""
    folder.mkdir()
    rows_per_file = FILE_BYTES // (kind.width * np.dtype(kind.dtype).itemsize)
    for index, start in enumerate(range(0, n_rows, rows_per_file)):
        count = min(rows_per_file, n_rows - start)
        columns = {
            "row": pa.array(np.arange(start, start + count)),
            "embedding": to_column(make_rows(kind, count, index), kind),
        }
        pq.write_table(pa.table(columns), folder / f"part-{index:05d}.parquet")


def to_column(rows: Any, kind: Kind) -> pa.Array:
    """The rows as Arrow has them."""
    if kind.stored == "bytes":
        data = pa.py_buffer(rows.tobytes())
        return pa.Array.from_buffers(pa.binary(kind.width), len(rows), [None, data])
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), kind.width)


def measure_embed(job: Job, runner: Runner) -> Rate:
    """One round of the embed stage alone, on workers that have the network already."""
    output = Path(job.output)
    shutil.rmtree(output / "stores/embed")
    flow.run(job, runner, Silent(), only="embed")
    found = measure.read_run(output).stages["embed"]
    return Rate(
        found.rows / found.wall_seconds,
        found.task_seconds / (runner.n_workers * found.wall_seconds),
        found.peak_bytes,
    )


def measure_cold(folder: Path) -> float:
    """Rows per second of the stage in a command of its own, whose workers load torch first."""
    shutil.rmtree(folder / "maps/stores/embed")
    measure.run_measured([measure.lakemap_command(), "stage", "embed", str(folder / "job.yaml")])
    found = measure.read_run(folder / "maps").stages["embed"]
    return found.rows / found.wall_seconds


def measure_calls(encoder: Encoder, kind: Kind, rounds: int) -> float:
    """Rows per second of one call for a few thousand rows in memory, as a service would make it."""
    rows = make_rows(kind, FEW_ROWS, 0)
    encoder.embed(rows)
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        encoder.embed(rows)
        seconds.append(time.perf_counter() - started)
    return len(rows) / statistics.median(seconds)


def measure_limit(n_rows: int, kind: Kind, workers: int) -> float:
    """Rows per second of the bare network, one one-thread process per worker."""
    spawn = multiprocessing.get_context("spawn")
    barrier, times = spawn.Barrier(workers), spawn.SimpleQueue()
    share = n_rows // workers
    processes = [
        spawn.Process(target=forward, args=(barrier, times, share, kind.width))
        for _ in range(workers)
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
    network = build_network(NETWORK, width).eval()
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


def measure_peers(options: argparse.Namespace) -> dict[str, Any]:
    """Each peer's transform of MNIST's test rows, as its own process tells."""
    if options.data is None:
        return {}
    path = options.data / "mnist.npz"
    n_train = 1000 if options.quick else 60_000
    found: dict[str, Any] = {}
    for name in transform_peers.PEERS:
        is_parametric = name == "umap.parametric_umap"
        python = options.parametric_python if is_parametric else options.peers_python
        if python is None:
            continue
        command = [python, transform_peers.__file__, name, str(path), str(n_train)]
        try:
            told = json.loads(measure.run_measured(command).stdout.splitlines()[-1])
        except measure.CommandError as error:
            if error.code == transform_peers.NOT_INSTALLED:
                print(f"{name} is not installed in {python}; left out", file=sys.stderr)
                continue
            raise
        first, *warm = told["seconds"]
        rate = told["rows"] / statistics.median(warm)
        found[name] = {**told, "cold": told["rows"] / first, "warm": rate}
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts = [f"# Embed, {document['workers']} workers", ""]
    parts.append(measure.conditions(document["machine"], document["versions"]))
    parts += [
        "",
        "The stage's time is its wall time from its plan to its manifest, on workers that have "
        "done it before: reading and checking Parquet, the forward pass of the paper's MLP, "
        "writing and committing Parquet. Cold: `lakemap stage embed`, whose workers load torch "
        "and the encoder first.",
    ]
    for kind in document["kinds"]:
        parts += ["", f"## {kind['rows']:,} rows of {kind['width']} {kind['stored']}", ""]
        parts.append(_kind_table(kind))
        parts += ["", f"Median of the rounds: {kind['ratio']:.2f} of the limit."]
    if document["peers"]:
        parts += ["", "## The peers' transform, 10,000 rows of MNIST", ""]
        parts.append(_peer_table(document))
    if document["quick"]:
        parts += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    return "\n".join(parts) + "\n"


def _kind_table(kind: dict[str, Any]) -> str:
    limits, rounds = kind["limit_rows_per_second"], kind["embed"]
    called, cold = kind["call_rows_per_second"], kind["cold_rows_per_second"]
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
        ["embed stage, cold", f"{cold:,.0f}", f"{cold / max(limits):.2f}", "", ""],
        [f"`Encoder.embed`, {FEW_ROWS:,} rows", f"{called:,.0f}", "", "", ""],
    ]
    return measure.table(["", "rows/s", "of the limit", "workers busy", "worker peak MiB"], rows)


def _peer_table(document: dict[str, Any]) -> str:
    kind = document["kinds"][-1]
    stage = statistics.median(found["rows_per_second"] for found in kind["embed"])
    called = kind["call_rows_per_second"]
    head = ["peer", "cold rows/s", "warm rows/s", "stage, times", "`Encoder.embed`, times"]
    rows = [
        [
            f"{name} {found['version']}",
            f"{found['cold']:,.0f}",
            f"{found['warm']:,.0f}",
            f"{stage / found['warm']:.0f}",
            f"{called / found['warm']:.0f}",
        ]
        for name, found in document["peers"].items()
    ]
    return measure.table(head, rows)


if __name__ == "__main__":
    main()

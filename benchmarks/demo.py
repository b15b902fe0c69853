"""The demo from nothing to picture: seconds per step, held-out accuracy, and a second run.

The same command that `make demo` starts, less the making of the environment.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import measure

PACKAGES = ("lakemap", "torch", "faiss-cpu", "faiss-gpu", "dask", "pyarrow")
QUICK = ("sample.rows=2000", "train.steps=50", "train.batch=256", measure.NO_GATES)
SHOWN = ("accuracy", "trustworthiness", "continuity", "neighbor_recall", "recall")


def main() -> None:
    """Run the demo twice in a new folder."""
    parser = measure.parser(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the lake")
    options = parser.parse_args()
    n_rows = 6000 if options.quick else options.rows
    facts = measure.machine()
    with tempfile.TemporaryDirectory(prefix="lakemap-bench-") as folder:
        command = [measure.lakemap_command(), "demo", f"--folder={folder}", f"--rows={n_rows}"]
        command += [f"--set={setting}" for setting in (QUICK if options.quick else ())]
        first = measure.run_measured(command)
        run = measure.read_run(Path(folder) / "maps")
        second = measure.run_measured(command)
    document = {
        "machine": facts,
        "versions": measure.versions(PACKAGES),
        "quick": options.quick,
        "rows": n_rows,
        "seconds": first.seconds,
        "peak_bytes": first.peak_bytes,
        "second_run_seconds": second.seconds,
        "second_run_idle": "nothing to do" in second.stdout,
        "stages": measure.plain_stages(run.stages),
        "metrics": run.metrics,
    }
    measure.publish(options, "demo", document, report(document))


def report(document: dict[str, Any]) -> str:
    """The results as Markdown."""
    stages = {step: measure.StageTime(**cost) for step, cost in document["stages"].items()}
    figures = document["metrics"]
    idle = "did nothing" if document["second_run_idle"] else "DID WORK AGAIN"
    parts = [
        f"# The demo: {document['rows']:,} rows",
        "",
        measure.conditions(document["machine"], document["versions"]),
        "",
        f"- {document['seconds']:.0f} s from nothing to map, picture and report, "
        "the making of the lake included",
        f"- a second run {idle}, in {document['second_run_seconds']:.1f} s",
        f"- {measure.mebibytes(document['peak_bytes'])} MiB resident at most, all processes "
        "together; pages they share count in each",
        f"- {figures['rows_mapped']:,} rows mapped, {figures['rows_quarantined']:,} quarantined "
        f"of {figures['rows_read']:,} read",
        f"- on {figures['n_queries']:,} {figures['evaluated_on']}: "
        + ", ".join(f"{name} {figures[name]:.4f}" for name in SHOWN),
    ]
    if document["quick"]:
        parts += ["", "**A quick run on a few rows: these figures mean nothing.**"]
    return "\n".join([*parts, "", measure.stage_table(stages)]) + "\n"


if __name__ == "__main__":
    main()

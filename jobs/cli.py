"""The command line: one function per command, one line and an exit code per error."""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="lakemap",
    help="Turns a data lake of vectors into a 2-D map that can be refreshed without moving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

export = typer.Typer(help="Write the published encoder for other systems.", no_args_is_help=True)
app.add_typer(export, name="export")

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Lay a setting over the job file."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="Every line on stderr is a JSON object.")
    ] = False,
) -> None:
    del debug, log_json  # main() has already looked for them, so that they may stand anywhere


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where lake and map go.")] = Path("demo"),
    rows: Annotated[int, typer.Option(min=1000, help="Rows of the lake.")] = 200_000,
    files: Annotated[int, typer.Option(min=1, help="Parquet files of the lake.")] = 16,
    overrides: Overrides = None,
) -> None:
    """Make a lake of handwritten digits and map it, from nothing to picture and report."""
    from jobs.demo import make_demo

    run(make_demo(folder, rows, files), overrides)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The job file to write.")] = Path("lakemap.yaml"),
    lake: Annotated[str, typer.Option("--input", help="Where the lake is.")] = "lake",
    vector: Annotated[str, typer.Option(help="Vector column or Zarr array.")] = "embedding",
    output: Annotated[str, typer.Option(help="Where the map goes.")] = "maps",
) -> None:
    """Write a commented job file."""
    from jobs.template import write_job_file

    write_job_file(path, lake, vector, output)
    typer.echo(f"wrote {path}; look at it, then: lakemap plan {path}")


@app.command()
def plan(job_file: JobFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Say what a run will need, without side effects."""
    from jobs import cluster, flow
    from jobs.tables import plan_document, show_plan
    from pipeline.job_file import load_job

    job = load_job(job_file, overrides or ())
    flow.check_place(job)
    needs = flow.preflight(job)
    offer = cluster.find_offer(job.cluster)
    shortage = flow.find_shortage(job, needs, offer.task_bytes, offer.train_bytes)
    document = plan_document(job, needs, offer, shortage)
    if as_json:
        _print_json(document)
    else:
        show_plan(document)
    if shortage:
        raise typer.Exit(2)


@app.command()
def run(job_file: JobFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Make the map, or go on where an earlier run stopped."""
    from jobs.work import run_job
    from pipeline.job_file import load_job

    _show_published(run_job(load_job(job_file, overrides or ())), as_json)


@app.command()
def refresh(
    job_file: JobFile,
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train the encoder again, whatever the drift.")
    ] = False,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Bring the published map to today's lake; rows that stay do not move."""
    from jobs.work import refresh_job
    from pipeline.job_file import load_job

    _show_published(refresh_job(load_job(job_file, overrides or ()), again=retrain), as_json)


@app.command()
def rollback(
    job_file: JobFile,
    run_id: Annotated[
        str | None, typer.Argument(metavar="RUN", help="By default the one before the current.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Publish an earlier run again."""
    from jobs.work import roll_back
    from pipeline.job_file import load_job

    entry = roll_back(load_job(job_file, overrides or ()), run_id)
    typer.echo(f"published: {entry.run} ({entry.rows:,} rows) in place of {entry.previous}")


@app.command()
def history(job_file: JobFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """List what was published, when and by what; the last is the published map."""
    from jobs.tables import show_history
    from pipeline.history import entries
    from pipeline.job_file import load_job
    from pipeline.stores import Folder

    log = entries(Folder(load_job(job_file, overrides or ()).output))
    if as_json:
        _print_json([asdict(entry) for entry in log])
    else:
        show_history(log)


def _show_published(published: Any, as_json: bool) -> None:
    """Say what is published now, and whether anything was done."""
    folder, metrics = published.run.url, published.metrics
    if as_json:
        _print_json(
            {
                "run": folder.rsplit("/", 1)[1],
                "folder": folder,
                "changed": published.changed,
                "metrics": dict(metrics),
            }
        )
        return
    if not published.changed:
        typer.echo("nothing to do: the published map is up to date")
    elif "files_kept" in metrics:
        typer.echo(_changes(metrics))
    typer.echo(_headline(metrics))
    typer.echo(f"picture: {folder}/map.png")
    typer.echo(f"report:  {folder}/report.html")


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="ingest, sample, neighbors, … publish.")],
    job_file: JobFile,
    overrides: Overrides = None,
) -> None:
    """Run one stage alone, for schedulers that want a task per stage."""
    from jobs.work import run_job
    from pipeline.job_file import load_job

    published = run_job(load_job(job_file, overrides or ()), name)
    if published is not None:
        typer.echo(f"published: {published.run.url}")


@app.command()
def status(job_file: JobFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Say how far a job is, what is published, and whether the lake has changed since."""
    from jobs import flow
    from jobs.status import find_status
    from jobs.tables import show_status, status_document
    from pipeline.job_file import load_job

    job = load_job(job_file, overrides or ())
    flow.check_place(job)
    document = status_document(job, find_status(job))
    if as_json:
        _print_json(document)
    else:
        show_status(document)


@app.command()
def report(job_file: JobFile, overrides: Overrides = None) -> None:
    """Print the published map's figures and where its report is."""
    from pipeline.job_file import load_job

    folder = _published(load_job(job_file, overrides or ()), job_file)
    metrics = json.loads(folder.get("metrics.json"))
    typer.echo(_headline(metrics))
    for key, value in metrics.items():
        typer.echo(f"  {key}: {value}")
    typer.echo(f"picture: {folder.url}/map.png")
    typer.echo(f"report:  {folder.url}/report.html")


@app.command()
def verify(job_file: JobFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Read every committed file again and compare it with its checksum and row count."""
    from jobs.tables import human_bytes
    from pipeline.errors import StoreError
    from pipeline.job_file import load_job
    from pipeline.stores import Folder
    from pipeline.upkeep import verify as verify_output

    job = load_job(job_file, overrides or ())
    found = verify_output(Folder(job.output))
    if as_json:
        _print_json(asdict(found))
    else:
        for line in found.damaged:
            typer.echo(line)
        typer.echo(f"{found.n_files:,} files read, {human_bytes(found.n_bytes)}")
    if found.damaged:
        raise StoreError(
            f"{job.output}: {len(found.damaged)} of {found.n_files} files are damaged; "
            f"lakemap run {job_file} makes those of its stores again"
        )


@app.command()
def gc(
    job_file: JobFile,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    min_age_hours: Annotated[
        float, typer.Option(min=0, help="Younger files stay: a run may be writing them.")
    ] = 24.0,
    keep_runs: Annotated[int, typer.Option(min=1, help="Last published runs that stay.")] = 7,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Remove old runs and what dead attempts and earlier settings left; never what is needed."""
    import time
    from contextlib import nullcontext

    from jobs.status import used_stores
    from jobs.tables import human_bytes
    from pipeline.job_file import load_job
    from pipeline.lease import hold
    from pipeline.stores import Folder
    from pipeline.upkeep import collect

    job = load_job(job_file, overrides or ())
    root, oldest = Folder(job.output), time.time() - 3600 * min_age_hours
    with nullcontext() if dry_run else hold(root, "gc"):
        found = collect(root, used_stores(job), oldest, delete=not dry_run, keep_runs=keep_runs)
    if as_json:
        _print_json({**asdict(found), "dry_run": dry_run})
        return
    for place in found.places:
        typer.echo(place)
    done = "would be removed" if dry_run else "removed"
    typer.echo(f"{found.n_files:,} files, {human_bytes(found.n_bytes)}, {done}")


@export.command("onnx")
def export_onnx(
    job_file: JobFile,
    target: Annotated[Path, typer.Option("--to", help="The file.")] = Path("encoder.onnx"),
    overrides: Overrides = None,
) -> None:
    """Write the published encoder as an ONNX model: raw float32 rows in, positions out."""
    from encoders.artifact import ArtifactError, Encoder
    from encoders.export import to_onnx
    from pipeline.errors import InputError
    from pipeline.job_file import load_job

    folder = _published(load_job(job_file, overrides or ()), job_file)
    names = ("encoder.safetensors", "encoder.json")
    try:
        encoder = Encoder.from_files({name: folder.get(f"model/{name}") for name in names})
        content = to_onnx(encoder)
    except (ArtifactError, ValueError) as error:
        raise InputError(f"{folder.url}: {error}") from error
    try:
        target.write_bytes(content)
    except OSError as error:
        raise InputError(f"{target}: cannot be written ({error}); give another --to") from error
    typer.echo(f"wrote {target}: rows (n, {encoder.n_inputs}) float32 to positions (n, 2)")


def _published(job: Any, job_file: Path) -> Any:
    """The folder of the published run."""
    from pipeline.errors import InputError
    from pipeline.history import current_run
    from pipeline.stores import Folder

    current = current_run(Folder(job.output))
    if current is None:
        raise InputError(f"{job.output}: no published map; lakemap run {job_file} makes one")
    return Folder(job.output).join(f"runs/{current}")


def _headline(metrics: Mapping[str, Any]) -> str:
    shown = ("accuracy", "trustworthiness", "recall")
    figures = [f"{name} {metrics[name]:.4f}" for name in shown if metrics.get(name) is not None]
    return f"{metrics['rows_mapped']:,} rows mapped, " + ", ".join(
        [f"{metrics['rows_quarantined']:,} quarantined", *figures]
    )


def _changes(metrics: Mapping[str, Any]) -> str:
    """What a refresh found in the lake, as one line."""
    kinds = ("new", "changed", "removed", "kept")
    counts = {kind: (metrics[f"files_{kind}"], metrics[f"rows_{kind}"]) for kind in kinds}
    found = [f"{files:,} {kind} ({rows:,} rows)" for kind, (files, rows) in counts.items() if files]
    return f"files: {', '.join(found)}; bad rows among the new: {metrics['rows_bad']:,}"


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=1))


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt  # a scheduler's SIGTERM stops as cleanly as Ctrl-C


def main() -> None:
    """Run the command line; every error becomes one line and its exit code."""
    from jobs.logs import fields, log, set_up_logs

    given = sys.argv[1:]
    log_json = "--log-json" in given
    arguments = [argument for argument in given if argument not in ("--debug", "--log-json")]
    set_up_logs(log_json)
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as on workers, see jobs/sites/site.py
    started = time.monotonic()
    code = _call(arguments, debug="--debug" in given)
    if log_json:
        event = fields("ended", exit_code=code, seconds=time.monotonic() - started)
        log.info("exit code %d", code, extra=event)
    sys.exit(code)


def _call(arguments: list[str], debug: bool) -> int:
    """The exit code of the command."""
    try:
        app(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    except Exception as error:
        if debug:
            raise
        return _explain(error, "--json" in arguments)
    return 0


def _explain(error: Exception, as_json: bool) -> int:
    """Print the error as one line (and as JSON where that was asked for); return the exit code."""
    from jobs.logs import print_error
    from pipeline.errors import LakemapError

    code = error.exit_code if isinstance(error, LakemapError) else 1
    line = str(error) if isinstance(error, LakemapError) else f"{type(error).__name__}: {error}"
    line = " ".join(line.split())
    hint = "" if isinstance(error, LakemapError) else " (--debug shows the traceback)"
    print_error(f"lakemap: {line}{hint}", code)
    if as_json:
        _print_json({"error": line, "exit_code": code})
    return code


if __name__ == "__main__":
    main()

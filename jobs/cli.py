"""The command line: one function per command, one line and an exit code per error."""

import json
import logging
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

STOPPED = 130


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
    from pipeline.config import load_job

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
    published = _run(job_file, overrides, None)
    assert published is not None
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
    published = _run(job_file, overrides, name)
    if published is not None:
        typer.echo(f"published: {published.run.url}")


@app.command()
def status(job_file: JobFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Say how far a job is, what is published, and whether the lake has changed since."""
    from jobs import flow
    from jobs.tables import show_status, status_document
    from pipeline.config import load_job

    job = load_job(job_file, overrides or ())
    flow.check_place(job)
    document = status_document(job, flow.status(job))
    if as_json:
        _print_json(document)
    else:
        show_status(document)


@app.command()
def report(job_file: JobFile, overrides: Overrides = None) -> None:
    """Print the published map's figures and where its report is."""
    from pipeline.config import load_job

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
    from pipeline.config import load_job
    from pipeline.errors import StoreError
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
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Remove what dead attempts and earlier settings left; never what a run or the job needs."""
    from jobs import flow
    from jobs.tables import human_bytes
    from pipeline.config import load_job
    from pipeline.stores import Folder
    from pipeline.upkeep import collect

    job = load_job(job_file, overrides or ())
    oldest = time.time() - 3600 * min_age_hours
    found = collect(Folder(job.output), flow.used_stores(job), oldest, delete=not dry_run)
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
    from pipeline.config import load_job
    from pipeline.errors import InputError

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
    from jobs.tables import current_run
    from pipeline.errors import InputError
    from pipeline.stores import Folder

    current = current_run(job.output)
    if current is None:
        raise InputError(f"{job.output}: no published map; lakemap run {job_file} makes one")
    return Folder(job.output).join(f"runs/{current}")


def _run(job_file: Path, overrides: list[str] | None, only: str | None) -> Any:
    """Run the job, or one stage of it, and leave figures for operators."""
    from jobs import flow
    from jobs.metrics import recorded
    from pipeline.config import load_job
    from pipeline.errors import ConfigError

    job = load_job(job_file, overrides or ())
    if only is not None and only not in flow.GROUPS:
        raise ConfigError(f"stage {only}: unknown; the stages are {', '.join(flow.GROUPS)}")
    with recorded(job) as record:
        published = _work(job, only, record)
        if published is not None:
            record.succeeded(published.metrics)
    return published


def _work(job: Any, only: str | None, record: Any) -> Any:
    """Check the job against the workers, then run it, or one stage of it."""
    from rich.console import Console

    from jobs import flow
    from jobs.cluster import open_runner
    from jobs.progress import make_observer
    from pipeline.errors import ConfigError
    from pipeline.runner import SerialRunner

    console = Console(stderr=True)
    flow.check_place(job)
    if only is None and flow.is_finished(job):  # no workers to start, only a look at the stores
        with make_observer(console) as observer:
            return flow.run(job, SerialRunner(task_bytes=0), record.watch(observer))
    flow.check_installation()
    needs = flow.preflight(job)
    flow.check_output(job)
    with open_runner(job.cluster, lambda link: _announce(console, link)) as runner:
        shortage = flow.find_shortage(job, needs, runner.task_bytes, runner.train_bytes)
        if shortage:
            raise ConfigError(shortage)
        for warning in needs.warnings:
            logging.getLogger("lakemap").warning("%s", warning)
        try:
            with make_observer(console) as observer:
                return flow.run(job, runner, record.watch(observer), only)
        except KeyboardInterrupt:
            line = "stopped; finished partitions are kept, the same command goes on from here"
            console.print(line, highlight=False, soft_wrap=True)
            raise typer.Exit(STOPPED) from None


def _announce(console: Any, link: str) -> None:
    console.print(f"dashboard: {link}", highlight=False, soft_wrap=True)


def _headline(metrics: Mapping[str, Any]) -> str:
    shown = ("accuracy", "trustworthiness", "recall")
    figures = [f"{name} {metrics[name]:.4f}" for name in shown if metrics.get(name) is not None]
    return f"{metrics['rows_mapped']:,} rows mapped, " + ", ".join(
        [f"{metrics['rows_quarantined']:,} quarantined", *figures]
    )


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
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as on workers, see jobs/cluster.py
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

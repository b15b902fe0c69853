"""Reading a job file: where it is wrong, one line says what was found and what was needed.

Relative paths in it are relative to the file.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from pipeline.cluster_config import check_cluster, place_files
from pipeline.config import DriftConfig, Job, TrainConfig, WarnConfig
from pipeline.errors import ConfigError

_JOB = TypeAdapter(Job)


def load_job(path: Path, overrides: Iterable[str] = ()) -> Job:
    """The job in the file, with `section.key=value` settings laid over it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give a job file") from error
    data = _parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: holds {_kind(data)}, a job file holds sections; see lakemap init"
        )
    for override in overrides:
        _override(data, override)
    return build_job(data, str(path), path.absolute().parent)


def build_job(data: Mapping[str, Any], where: str, base: Path) -> Job:
    """The job the data describe; `base` is where relative paths start."""
    try:
        job: Job = _JOB.validate_python(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(error)}") from error
    _check_together(job, where)
    source = replace(job.input, path=_absolute(job.input.path, base))
    cluster = place_files(job.cluster, base)
    textfile = job.metrics.textfile and _absolute(job.metrics.textfile, base)
    return replace(
        job,
        input=source,
        output=_absolute(job.output, base),
        cluster=cluster,
        metrics=replace(job.metrics, textfile=textfile),
    )


def _absolute(path: str, base: Path) -> str:
    return path if "://" in path else str(base / path)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"{where}{place}: not YAML ({problem}); correct it") from error
    except ValueError as error:  # a date such as 2026-13-45
        raise ConfigError(f"{where}: not YAML ({error}); correct it") from error


def _override(data: dict[str, Any], text: str) -> None:
    """Lay one `section.key=value` over the data."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--set {text}: needs the form section.key=value")
    *sections, key = name.strip().split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {text}: {section} is {_kind(data)}, not a section")
    data[key] = _parse_yaml(value, f"--set {text}")


def _explain(error: ValidationError) -> str:
    """The first thing wrong, as where, what was found, what was needed."""
    first = error.errors()[0]
    if first["type"] in ("unexpected_keyword_argument", "invalid_key"):
        return _unknown_key([str(step) for step in first["loc"]])
    place = _known_place(first["loc"])
    if first["type"] in ("missing", "missing_argument"):
        return f"{place} is missing; add it"
    needed = first["msg"].removeprefix("Input should be ")
    if first["type"].startswith("byte_size"):
        needed = "a size such as 32MiB"
    if first["type"] in ("dataclass_type", "dataclass_exact_type"):
        return f"{place} is {_kind(first['input'])}; it must be a section of keys"
    return f"{place} is {first['input']!r}; it must be {needed}"


def _known_place(steps: Sequence[int | str]) -> str:
    """The key the steps lead to; those after it say which of several types was tried."""
    section: Any = Job
    known: list[str] = []
    for step in steps:
        known.append(str(step))
        section = _section(get_type_hints(section).get(str(step)))
        if not is_dataclass(section):
            break
    return ".".join(known)


def _section(hint: Any) -> Any:
    """The type of a key, without the None of a section that may be left out."""
    return next((kind for kind in get_args(hint) if is_dataclass(kind)), hint)


def _unknown_key(steps: list[str]) -> str:
    section: Any = Job
    for step in steps[:-1]:
        section = _section(get_type_hints(section)[step])
    known = [field.name for field in fields(section)]
    close = difflib.get_close_matches(steps[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {'.'.join([*steps[:-1], close[0]])}?" if close else f"known: {known}"
    return f"unknown key {'.'.join(steps)}; {hint}"


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _check_together(job: Job, where: str) -> None:
    """Settings that are fine alone but not together."""
    perplexity, k = job.affinity.perplexity, job.neighbors.k
    if job.affinity_kind == "gaussian" and 3 * perplexity > k:
        needed = int(-(-3 * perplexity // 1))
        raise ConfigError(
            f"{where}: affinity.perplexity {perplexity:g} needs {needed} neighbors per row, "
            f"neighbors.k is {k}; raise neighbors.k or lower the perplexity to {k / 3:g}"
        )
    needed_edges = job.train.steps * job.edges_per_step
    if job.edges.samples is not None and job.edges.samples < needed_edges:
        raise ConfigError(
            f"{where}: edges.samples is {job.edges.samples}, training consumes {needed_edges} "
            f"(train.steps x {job.edges_per_step} a step); raise it or leave it out"
        )
    _check_training(job.train, where)
    _check_map(job, where)
    _check_drift(job.drift, where)
    check_cluster(job.cluster, where)
    textfile = job.metrics.textfile
    if textfile is not None and ("://" in textfile or not textfile.endswith(".prom")):
        raise ConfigError(
            f"{where}: metrics.textfile is {textfile!r}; it must be a path that ends in .prom, "
            "or node exporter does not read it"
        )
    if job.input.partition_bytes < 1 << 16:
        raise ConfigError(
            f"{where}: input.partition_bytes is {job.input.partition_bytes}; "
            f"it must be 64KiB or more"
        )


def _check_drift(drift: DriftConfig, where: str) -> None:
    """Thresholds that contradict each other."""
    for field in fields(WarnConfig):
        warn, retrain = getattr(drift.warn, field.name), getattr(drift.retrain, field.name)
        if warn is not None and retrain is not None and warn > retrain:
            raise ConfigError(
                f"{where}: drift.warn.{field.name} is {warn:g}, drift.retrain.{field.name} is "
                f"{retrain:g}; the warning must not come after the retraining: lower the first or "
                "raise the second"
            )


MAP_COLUMNS = ("id", "x", "y", "label", "novelty", "morton")


def _check_map(job: Job, where: str) -> None:
    """Columns of the map that would not be clear."""
    columns, by = job.embed.columns, job.embed.partition_by
    clash = next((name for name in columns if name in MAP_COLUMNS), None)
    if clash is not None:
        raise ConfigError(
            f"{where}: embed.columns has {clash!r}, which the map uses for its own; the columns "
            "of input.id and input.label are there as id and label, rename others in the lake"
        )
    known = (*columns, "label") if job.input.label else columns
    if by is not None and by not in known:
        raise ConfigError(
            f"{where}: embed.partition_by is {by!r}; it must be one of embed.columns, or label "
            "where input.label is given"
        )


def _check_training(train: TrainConfig, where: str) -> None:
    """Settings of the training that do not go together."""
    kind, shape = train.encoder.kind, train.encoder.shape
    if kind not in ("residual", "mlp", "cnn") and ":" not in kind:
        raise ConfigError(
            f"{where}: train.encoder.kind is {kind!r}; it must be residual, mlp, cnn or "
            "package.module:name"
        )
    if (kind == "cnn" or shape is not None) and len(shape or ()) not in (2, 3):
        found = "missing" if shape is None else f"{list(shape)}"
        raise ConfigError(
            f"{where}: train.encoder.shape is {found}; it must be [height, width] or "
            "[height, width, channels]"
        )
    allowed = ("edges", "points") if train.objective == "tsne" else ("edges", "negatives")
    if train.batches not in allowed:
        raise ConfigError(
            f"{where}: train.batches is {train.batches!r}, the objective {train.objective} takes "
            f"{' or '.join(allowed)}; change one of them"
        )
    if train.min_dist >= 3 * train.spread:
        raise ConfigError(
            f"{where}: train.min_dist is {train.min_dist:g} with train.spread {train.spread:g}; "
            "it must be less than 3 times the spread"
        )
    if kind == "cnn" and train.preprocessing.pca:
        raise ConfigError(
            f"{where}: train.encoder.kind cnn needs whole images, train.preprocessing.pca is "
            f"{train.preprocessing.pca}; leave one of them out"
        )

"""What is refused between two stages, because the job cannot end well."""

from pipeline.config import Job
from pipeline.errors import GateError, InputError, StageError
from pipeline.gates import check_gates
from pipeline.manifest import Manifest


def check_after(name: str, manifest: Manifest, job: Job) -> None:
    """Refuse to go on where a finished stage shows that the job cannot end well."""
    if name == "ingest":
        _check_rows(manifest, job)
    if name == "sample":
        check_enough(job, manifest.n_rows, "rows to train on")
        _check_measuring(job, manifest)
    probabilities = name == "symmetrize" and job.affinity_kind == "gaussian"
    if probabilities and abs(manifest.metrics["mass"] - 1) > 1e-5:
        raise StageError(f"symmetrize: P sums to {manifest.metrics['mass']}, must be 1")
    if name in ("recall", "displacement", "evaluate"):
        check_gates(job.gates, manifest.metrics)


def _check_rows(manifest: Manifest, job: Job) -> None:
    metrics, found = manifest.metrics, _find_bad_rows(manifest, job, "rows")
    if found:
        raise InputError(found)
    if metrics["identical"]:
        raise InputError(
            f"{job.input.path}: all {metrics['n_good']} rows are identical; "
            f"a map needs rows that differ"
        )


def check_bad_rows(manifest: Manifest, job: Job) -> None:
    """Refuse a refresh whose new rows are too bad; the published map stays."""
    found = _find_bad_rows(manifest, job, "new rows")
    if found:
        raise GateError(f"{found}; nothing was published, CURRENT is as it was")


def _find_bad_rows(manifest: Manifest, job: Job, what: str) -> str | None:
    """What is wrong, as one line, if the share of bad rows is larger than the job allows."""
    metrics, n_rows = manifest.metrics, manifest.facts["n_rows"]
    n_bad = metrics["n_bad"] - metrics["n_changed"]  # those are left for the next run, not bad
    share = n_bad / max(1, n_rows)
    if share <= job.input.max_bad_fraction:
        return None
    reasons = ", ".join(f"{reason}: {count}" for reason, count in metrics["reasons"].items())
    return (
        f"{job.input.path}: {n_bad} of {n_rows} {what} are bad ({share:.2%}), at most "
        f"{job.input.max_bad_fraction:.2%} may be ({reasons}); "
        f"correct them or raise input.max_bad_fraction"
    )


def check_enough(job: Job, n_rows: int, what: str) -> None:
    """Refuse fewer rows than a row has neighbours."""
    needed = job.neighbors.k + 1
    if n_rows < needed:
        raise InputError(
            f"{job.input.path}: {n_rows} {what}, neighbors.k {job.neighbors.k} needs {needed}; "
            f"lower neighbors.k and affinity.perplexity or add rows"
        )


def _check_measuring(job: Job, sample: Manifest) -> None:
    """Refuse, before the encoder is trained, when too few rows are there to measure the map."""
    n_rows = sum(record.metrics["n_evaluate"] for record in sample.records)
    config = job.evaluate
    needed = max(2 * config.trustworthiness_k, config.k) + 1
    if n_rows < needed:
        raise InputError(
            f"{job.input.path}: {n_rows} {sample.facts['evaluated_on']} to measure the map on, "
            f"evaluate.trustworthiness_k {config.trustworthiness_k} and evaluate.k {config.k} "
            f"need {needed}; lower them, hold out more rows or lower sample.rows"
        )

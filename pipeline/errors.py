"""Errors a user can cause, one line each: where, what was found, what was needed, what to do.

Every error takes a single message, so that it survives pickling between processes.
"""


class LakemapError(Exception):
    """Base of every error that is reported as one line; `exit_code` is the command's."""

    exit_code = 1


class ConfigError(LakemapError):
    """The job file or a command-line setting is wrong."""

    exit_code = 2


class InputError(LakemapError):
    """The lake, or a row in it, is not what the job needs."""

    exit_code = 2


class GateError(LakemapError):
    """A measured quality is below the gate the job sets; nothing was published."""

    exit_code = 3


class StoreError(LakemapError):
    """A store cannot be read or written, or is damaged."""

    exit_code = 4


class ClusterError(LakemapError):
    """Workers cannot be had, or a partition kept failing on them."""

    exit_code = 4


class StageError(LakemapError):
    """A stage failed for a reason that is not the user's."""

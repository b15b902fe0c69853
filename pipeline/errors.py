"""Errors a user can cause, one line each: where, what was found, what was needed, what to do.

Arguments are plain text, so that every error survives pickling between processes.
"""

from typing import Self


class LakemapError(Exception):
    """Base of every error that is reported as one line; `exit_code` is the command's."""

    exit_code = 1

    def at(self, where: str) -> Self:
        """The same error, its line beginning with where it happened."""
        return type(self)(f"{where}: {self}", *self.args[1:])


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


class DamagedError(StoreError):
    """An object of a committed partition is missing or differs from what was committed."""

    def __init__(self, message: str, partition_url: str) -> None:
        super().__init__(message, partition_url)
        self.partition_url = partition_url

    def __str__(self) -> str:
        return str(self.args[0])


class ClusterError(LakemapError):
    """Workers cannot be had, or a partition kept failing on them."""

    exit_code = 4


class BusyError(LakemapError):
    """Another run is at work on the same output, or published before this one could."""

    exit_code = 5


class StageError(LakemapError):
    """A stage failed for a reason that is not the user's."""

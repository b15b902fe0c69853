"""An observer for benchmarks, that imports little: it must not add to what they measure."""

from pipeline.manifest import Commit, Manifest, Timing


class Silent:
    """An observer that says nothing."""

    def stage_started(self, name: str, n_parts: int, n_done: int, n_rows: int) -> None:
        """Nothing."""

    def part_done(self, name: str, commit: Commit) -> None:
        """Nothing."""

    def task_progress(self, name: str, share: float, note: str) -> None:
        """Nothing."""

    def stage_finished(self, name: str, manifest: Manifest, timing: Timing, skipped: bool) -> None:
        """Nothing."""

"""Times in records: UTC, to the second, as text that people and programs read."""

import time
from datetime import UTC, datetime

from pipeline.errors import StoreError

SLACK_SECONDS = 60.0  # by which the clocks of two machines may differ


def write_time(seconds: float) -> str:
    """The time as text, 2026-01-31T04:05:06Z."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_time(text: str) -> float:
    """Seconds since 1970; ValueError for what is no time."""
    return datetime.fromisoformat(text).timestamp()


def check_past(text: str, where: str) -> None:
    """Refuse a record that was written later than now: one of two clocks is wrong."""
    now = time.time()
    if read_time(text) > now + SLACK_SECONDS:
        raise StoreError(
            f"{where}: written at {text}, but the clock of this machine says {write_time(now)}; "
            "set the clock that is wrong, and remove the file if it was the other machine's"
        )

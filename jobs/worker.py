"""What a local worker process does first; Dask loads it as a preload module."""

import signal
from typing import Any


def dask_setup(_: Any) -> None:
    """Leave Ctrl-C, which reaches the whole process group, to the driver."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

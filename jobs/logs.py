"""Log lines on standard error: text for people, or one JSON object a line for programs."""

import io
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

log = logging.getLogger("lakemap")


def fields(event: str, **values: Any) -> dict[str, Any]:
    """What a log call passes as `extra`, so that programs need not read its message."""
    return {"fields": {"event": event, **values}}


def set_up_logs(as_json: bool) -> None:
    """Send our lines and others' warnings to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(JsonFormatter())
        sys.stderr = JsonLines(sys.stderr)
        logging.captureWarnings(capture=True)
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.INFO)


def print_error(line: str, exit_code: int) -> None:
    """Print the line that a failed command ends with."""
    if isinstance(sys.stderr, JsonLines):
        log.error("%s", line, extra=fields("failed", exit_code=exit_code))
    else:
        sys.stderr.write(f"{line}\n")


class JsonFormatter(logging.Formatter):
    """Makes a log record one line: time, level, event, message and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a JSON object."""
        known = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": "line",
            "message": record.getMessage(),
        }
        if record.exc_info:
            known["traceback"] = self.formatException(record.exc_info)
        return json.dumps(known | getattr(record, "fields", {}))


class JsonLines(io.TextIOBase):
    """A standard error whose lines, whoever writes them, come out as JSON objects."""

    def __init__(self, target: TextIO) -> None:
        self._handler = logging.StreamHandler(target)
        self._handler.setFormatter(JsonFormatter())
        self._rest = ""

    def writable(self) -> bool:
        """True: it is for writing."""
        return True

    def write(self, text: str) -> int:
        """Hand on every line that is complete."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._emit(line)
        return len(text)

    def flush(self) -> None:
        """Hand on a last line without an end."""
        self._emit(self._rest)
        self._rest = ""

    def _emit(self, line: str) -> None:
        if line.strip():
            record = logging.LogRecord("stderr", logging.INFO, "", 0, "%s", (line,), None)
            self._handler.emit(record)

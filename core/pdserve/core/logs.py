"""Logs as text or JSON, with request, session and attempt where they are known.

A JSON line also has the role and the incarnation of its process; text is for a terminal, where the supervisor puts the name of
the process before each line.
"""

import json
import logging
import sys
import time
from collections.abc import MutableMapping
from typing import Any, TextIO

from pdserve.core.ids import Incarnation

ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
"""Control characters, which may come from outside, never reach a terminal or start a line."""
_PROCESS: dict[str, str] = {}

FIELDS = ("request_id", "owner", "session_id", "attempt", "incarnation", "transfer_id", "peer")
"""Extra attributes that a record may carry; `logger.info(…, extra={"attempt": 2})`."""


def set_up_logs(role: str, log_format: str, level: str, stream: TextIO | None = None) -> None:
    """Send the process's logs to `stream` (standard error by default) in one format. Called once, at start."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(role) if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("pdserve").setLevel(level.upper())


def identify(incarnation: Incarnation) -> None:
    """Put this run of the process into every JSON line from now on. Called once, when it is known."""
    _PROCESS["incarnation"] = incarnation.hex()


class RequestLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds the same fields to every record."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Merge this logger's fields with those of the call."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


class TextFormatter(logging.Formatter):
    """One line for people: time, level, message, then name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        message = record.getMessage()
        # A peer that the message names already would only be read twice.
        told = {name for name, value in _fields(record).items() if name == "peer" and str(value) in message}
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items() if name not in told)
        line = f"{clock}.{int(record.msecs):03d} {record.levelname.lower():7} {message}"
        line = (f"{line}  {fields}" if fields else line).translate(ESCAPED)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line for programs."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry: dict[str, object] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "role": self.role,
            "logger": record.name,
            "message": record.getMessage(),
            **_PROCESS,
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) not in (None, "")}

"""Logging to standard error, as text or as JSON lines."""

import logging
import sys
import time
from types import TracebackType
from typing import Any, final

import orjson

from penstock.serve.settings import TelemetrySettings


def set_up_logging(telemetry: TelemetrySettings, process: str) -> None:
    """Send this process's log to standard error.

    Args:
        telemetry: Format and level.
        process: Name of the process, such as `front-end 2`.
    """
    handler = logging.StreamHandler()
    if telemetry.log_format == "json":
        handler.setFormatter(JsonFormatter(process))
        # Python's own warnings and uncaught exceptions become JSON lines too.
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if telemetry.verbose else logging.WARNING, handlers=[handler], force=True)


@final
class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, process, logger, message, and the exception if there is one.

    The entries of a record's `fields` attribute are added.

    Args:
        process: Name of the process.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        whole_s = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole_s}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": _valid_utf8(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = _valid_utf8(self.formatException(record.exc_info))
        return orjson.dumps(line).decode()


def _valid_utf8(text: str) -> str:
    # File names may hold bytes that are not UTF-8, which JSON cannot represent.
    return text.encode(errors="replace").decode()


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("penstock").critical("the process ends by an error", exc_info=(kind, error, trace))

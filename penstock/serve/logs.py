"""Logs as lines of text for people, or as lines of JSON for what collects them."""

import logging
import time
from typing import Any, final

import orjson

from penstock.serve.settings import Settings


def set_up_logging(settings: Settings, process: str) -> None:
    """Send this process's log to standard error.

    Args:
        settings: In which form, and how much.
        process: What the process is, `front-end 2` say.
    """
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonFormatter(process))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if settings.verbose else logging.WARNING, handlers=[handler], force=True)


@final
class JsonFormatter(logging.Formatter):
    """One JSON object a line: time in RFC 3339 UTC, level, process, logger, message, and the exception if there is one.

    Args:
        process: What the process is.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        whole_s = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole_s}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()

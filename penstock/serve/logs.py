"""Logs as lines of text for people, or as lines of JSON for what collects them."""

import logging
import sys
import time
from types import TracebackType
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
        # What Python itself would write as text is a line of JSON too.
        logging.captureWarnings(True)
        sys.excepthook = _log_the_end
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process} %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if settings.verbose else logging.WARNING, handlers=[handler], force=True)


@final
class JsonFormatter(logging.Formatter):
    """One JSON object a line: time in RFC 3339 UTC, level, process, logger, message, and the exception if there is one.

    What a record has as `fields`, by name, stands beside them.

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
            "message": _sayable(record.getMessage()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = _sayable(self.formatException(record.exc_info))
        return orjson.dumps(line).decode()


def _sayable(text: str) -> str:
    # A file's name may hold bytes that are no UTF-8, which JSON has no way to write.
    return text.encode(errors="replace").decode()


def _log_the_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("penstock").critical("the process ends by an error", exc_info=(kind, error, trace))

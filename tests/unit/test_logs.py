"""Lines of JSON: whatever is logged, each line parses and says when, how bad, by whom and what."""

import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.serve.observe.logs import JsonFormatter, set_up_logging
from penstock.serve.settings import TelemetrySettings


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a logger of its own writes as JSON."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter("front-end 2"))
    log.addHandler(handler)
    yield written
    log.removeHandler(handler)


# Outside the tree of loggers, so that pytest does not report its lines: not all of them can be sent between processes.
log = logging.Logger("tests.lines", logging.INFO)


def only(written: io.StringIO) -> dict[str, Any]:
    text = written.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    return json.loads(text)


def test_a_line_says_when_how_bad_by_whom_and_what(lines: io.StringIO) -> None:
    before = datetime.now(UTC)
    log.info("%d requests", 3)
    line = only(lines)
    when = datetime.fromisoformat(line.pop("time"))
    assert abs((when - before).total_seconds()) < 1
    assert when.utcoffset() is not None
    assert line == {"level": "INFO", "process": "front-end 2", "logger": "tests.lines", "message": "3 requests"}


def test_an_exception_stays_on_its_line(lines: io.StringIO) -> None:
    try:
        raise ValueError("thirteen\nand more")
    except ValueError:
        log.exception("it failed")
    line = only(lines)
    assert (line["level"], line["message"]) == ("ERROR", "it failed")
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("ValueError: thirteen\nand more")


@pytest.mark.parametrize(
    "message", ["two\nlines", 'quotes " and \\', "\x00\x1b[31m\x7f", "größer 💧", "a path with \udcff in it", ""]
)
def test_whatever_is_logged_is_one_line_that_parses(lines: io.StringIO, message: str) -> None:
    log.warning("%s", message)
    assert only(lines)["message"] == message.replace("\udcff", "?")


def test_fields_of_a_record_stand_beside_its_message(lines: io.StringIO) -> None:
    log.info("asked", extra={"fields": {"status": 200, "milliseconds": 1.5, "client": None}})
    line = only(lines)
    assert (line["status"], line["milliseconds"], line["client"]) == (200, 1.5, None)
    assert line["message"] == "asked"


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What this process writes to standard error once its logging is set up."""
    written = io.StringIO()
    root = logging.getLogger()
    handlers, level, hook = list(root.handlers), root.level, sys.excepthook
    monkeypatch.setattr("sys.stderr", written)
    set_up_logging(TelemetrySettings(log_format="json"), "penstock")
    yield written
    logging.captureWarnings(False)
    sys.excepthook = hook
    root.handlers[:] = handlers
    root.setLevel(level)


def test_warnings_and_the_end_of_a_process_are_lines_too(everything: io.StringIO) -> None:
    logging.getLogger("penstock.serve").info("not said without --verbose")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    first, second = map(json.loads, everything.getvalue().splitlines())
    assert (first["level"], first["logger"]) == ("WARNING", "py.warnings")
    assert "DeprecationWarning: old" in first["message"]
    assert (second["level"], second["process"]) == ("CRITICAL", "penstock")
    assert "ZeroDivisionError" in second["exception"]

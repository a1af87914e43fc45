"""One line a request: what it says, and that it says it once."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.application import MAX_NAME
from penstock.core.errors import InvalidInput, Overloaded, TooLarge
from penstock.serve.exchange.access import Access, Keys
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Response, rejected
from penstock.serve.observe.call_record import CallRecord
from penstock.serve.observe.logs import JsonFormatter
from penstock.serve.observe.request_log import CallLog, RequestLog, log
from tests.support.clock import Clock

KEY = "anna-0123456789abcdef"
INFER = "/inference.GRPCInferenceService/ModelInfer"


def requested(path: str = "/v1/apps/x", **headers: str) -> Request:
    return Request(Head("POST", path, headers), b"")


class Later:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.cancelled = 0

    def __call__(self, request: Request, answer: Answer) -> Callable[[], None]:
        self.answer = answer
        return self._cancel

    def _cancel(self) -> None:
        self.cancelled += 1


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == log.name]


def test_a_line_says_what_was_asked_and_what_came_of_it(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"anna {KEY}\n")
    clock, later = Clock(), Later()
    requests = RequestLog(later, lambda error, head: rejected(error), Access(Keys.read(tmp_path / "keys")), clock)
    answers: list[Response] = []
    requests.handle(requested(authorization=f"Bearer {KEY}"), answers.append)
    clock.now_s += 0.0123
    assert lines(caplog) == []
    assert later.answer is not None
    later.answer(Response(200, b"12345"))
    assert lines(caplog) == ["POST '/v1/apps/x' 200 12.300 ms 5 bytes anna"]
    assert [answer.body for answer in answers] == [b"12345"]
    line = json.loads(JsonFormatter("front-end 0").format(caplog.records[-1]))
    told = {name: line[name] for name in ("method", "path", "status", "milliseconds", "bytes", "client", "error")}
    assert told == {
        "method": "POST",
        "path": "/v1/apps/x",
        "status": 200,
        "milliseconds": 12.3,
        "bytes": 5,
        "client": "anna",
        "error": None,
    }


def test_an_answer_at_once_a_refusal_and_a_client_that_leaves(caplog: pytest.LogCaptureFixture) -> None:
    later = Later()
    full = rejected(Overloaded("full"))
    at_once = RequestLog(lambda request, answer: answer(full), lambda error, head: rejected(error), Access(), Clock())
    at_once.handle(requested(), lambda response: None)
    leaving = RequestLog(later, lambda error, head: rejected(error), Access(), Clock())
    cancel = leaving.handle(requested(), lambda response: None)
    assert cancel is not None
    cancel()
    assert later.cancelled == 1
    assert lines(caplog) == [
        f"POST '/v1/apps/x' 503 0.000 ms {len(full.body)} bytes - 'full'",
        "POST '/v1/apps/x' 499 0.000 ms 0 bytes -",
    ]


def test_what_could_not_be_read_to_its_end_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    requests = RequestLog(Later(), lambda error, head: rejected(error), Access(), Clock())
    assert requests.reject(TooLarge("large"), Head("", "", {})).status == 413
    assert lines(caplog) == ["- '' 413 0.000 ms 17 bytes - 'large'"]
    assert json.loads(JsonFormatter("front-end 0").format(caplog.records[-1]))["error"] == "large"


def test_the_time_of_a_body_that_did_not_come_is_that_since_its_head(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    clock.now_s = 170.0
    requests = RequestLog(Later(), lambda error, head: rejected(error), Access(), clock)
    requests.reject(TooLarge("large"), Head("POST", "/v1/apps/x", {}, began_ns=50_000_000_000))
    assert lines(caplog) == ["POST '/v1/apps/x' 413 120000.000 ms 17 bytes - 'large'"]


def test_a_path_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    requests = RequestLog(
        lambda request, answer: answer(Response(404)), lambda error, head: rejected(error), Access(), Clock()
    )
    requests.handle(requested("/x\nPOST '/v1/apps/x' 200\r\x1b[2J"), lambda response: None)
    (line,) = lines(caplog)
    assert line.isprintable()


def test_its_lines_are_written_without_verbose(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        RequestLog(Later(), lambda error, head: rejected(error), Access(), Clock())
        assert log.isEnabledFor(logging.INFO)
        assert not logging.getLogger("penstock.serve").isEnabledFor(logging.INFO)


def test_a_line_of_a_grpc_call_says_the_same(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"anna {KEY}\n")
    clock = Clock()
    call = CallRecord(INFER, {"authorization": f"Bearer {KEY}"})
    end = CallLog(Access(Keys.read(tmp_path / "keys")), clock).observe(call)
    call.model, call.nbytes = "digits", 57
    clock.now_s += 0.0123
    assert lines(caplog) == []
    end()
    assert lines(caplog) == [f"gRPC '{INFER}' 'digits' OK 12.300 ms 57 bytes anna"]
    line = json.loads(JsonFormatter("front-end 0").format(caplog.records[-1]))
    names = ("method", "path", "model", "grpc_status", "milliseconds", "bytes", "client", "error")
    assert {name: line[name] for name in names} == {
        "method": "gRPC",
        "path": INFER,
        "model": "digits",
        "grpc_status": "OK",
        "milliseconds": 12.3,
        "bytes": 57,
        "client": "anna",
        "error": None,
    }
    # Those of HTTP are numbers.
    assert "status" not in line


def test_a_grpc_call_that_is_rejected_and_a_name_that_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    call = CallRecord(INFER)
    end = CallLog(Access(), Clock()).observe(call)
    call.model, call.error, call.status = "x\n\x1b[2J", Overloaded("full"), "RESOURCE_EXHAUSTED"
    end()
    CallLog(Access(), Clock()).observe(CallRecord("/grpc.health.v1.Health/Check"))()
    forged, other = lines(caplog)
    assert forged == f"gRPC '{INFER}' 'x\\n\\x1b[2J' RESOURCE_EXHAUSTED 0.000 ms 0 bytes - 'full'"
    assert other == "gRPC '/grpc.health.v1.Health/Check' - OK 0.000 ms 0 bytes -"


def test_what_a_client_sends_makes_no_line_of_megabytes(caplog: pytest.LogCaptureFixture) -> None:
    error = InvalidInput("x" * 1_000_000)
    call = CallRecord(INFER)
    end = CallLog(Access(), Clock()).observe(call)
    call.name_model("y" * 1_000_000)
    call.error = error
    end()
    RequestLog(Later(), lambda error, head: rejected(error), Access(), Clock()).reject(error, Head("POST", "/", {}))
    assert [len(line) < 1_500 for line in lines(caplog)] == [True, True]
    assert all(line.endswith("x...'") for line in lines(caplog))
    assert f" {'y' * MAX_NAME!r} " in lines(caplog)[0]


def test_the_lines_of_grpc_calls_are_written_without_verbose(caplog: pytest.LogCaptureFixture) -> None:
    log.setLevel(logging.NOTSET)
    with caplog.at_level(logging.WARNING):
        CallLog(Access(), Clock())
        assert log.isEnabledFor(logging.INFO)

"""Which requests become spans, and what those say. What is sent is held against a receiver in tests/integration."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock.core.errors import ComputeFailed, InvalidInput, Overloaded, RequestError, TooLate
from penstock.serve.exchange.request import Head, Request
from penstock.serve.exchange.response import Answer, Handler, Response, rejected
from penstock.serve.observe.tracing import Traces, route_of
from penstock.serve.registry.chain_request import StepReport

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASK = Request(Head("POST", "/v1/apps/digits", {"user-agent": "curl/8"}), b"123")


def well(request: Request, answer: Answer) -> None:
    answer(Response(200, b"12345"))


class Recorded:
    """Traces whose spans stay here."""

    def __init__(self, handle: Handler = well, share: float = 1.0, random: Callable[[], float] = lambda: 0.5) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = Traces(handle, provider, (), share, "http", random)

    def ask(self, request: Request = ASK) -> list[Response]:
        answers: list[Response] = []
        self.traces.handle(request, answers.append)
        return answers

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def said(self) -> dict[str, Any]:
        (span,) = self.spans
        return dict(span.attributes or {})


def caller(flags: str, path: str = "/v1/apps/digits") -> Request:
    return Request(Head("POST", path, {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}), b"")


def test_a_span_says_what_was_asked_and_what_came_of_it() -> None:
    recorded = Recorded()
    assert [answer.body for answer in recorded.ask()] == [b"12345"]
    assert recorded.said == {
        "http.request.method": "POST",
        "http.request.body.size": 3,
        "http.route": "/v1/apps/{name}",
        "http.response.status_code": 200,
        "http.response.body.size": 5,
        "url.path": "/v1/apps/digits",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "user_agent.original": "curl/8",
        "penstock.model": "digits",
        "penstock.outcome": "answered",
    }
    (span,) = recorded.spans
    assert (span.name, span.kind, span.parent) == ("POST /v1/apps/{name}", SpanKind.SERVER, None)
    assert span.status.status_code == StatusCode.UNSET


def test_a_caller_that_records_becomes_the_parent() -> None:
    recorded = Recorded(share=0.001)
    recorded.ask(caller("01"))
    (span,) = recorded.spans
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.parent.trace_id:032x}" == TRACE


def test_a_caller_that_does_not_record_is_not_recorded_here() -> None:
    recorded = Recorded(share=1.0)
    assert len(recorded.ask(caller("00"))) == 1
    assert recorded.spans == ()


@pytest.mark.parametrize("parent", ["", "00", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"])
def test_a_traceparent_that_is_none_counts_for_nothing(parent: str) -> None:
    request = Request(Head("GET", "/", {"traceparent": parent}), b"")
    recorded, unlucky = Recorded(share=0.6), Recorded(share=0.4)
    recorded.ask(request)
    unlucky.ask(request)
    (span,) = recorded.spans
    assert span.parent is None
    assert unlucky.spans == ()


def test_of_all_others_a_share_is_recorded() -> None:
    draws = iter([0.0, 0.009, 0.01, 0.5, 0.999])
    recorded = Recorded(share=0.01, random=lambda: next(draws))
    for _ in range(5):
        assert len(recorded.ask()) == 1
    assert len(recorded.spans) == 2


@pytest.mark.parametrize(
    ("error", "outcome", "failed"),
    [
        (InvalidInput("bad"), "invalid", False),
        (Overloaded("full"), "refused", True),
        (TooLate("late"), "expired", True),
        (ComputeFailed("thirteen"), "failed", True),
    ],
)
def test_a_refusal_says_what_was_the_matter(error: RequestError, outcome: str, failed: bool) -> None:
    recorded = Recorded(lambda request, answer: answer(rejected(error)))
    recorded.ask()
    (span,) = recorded.spans
    assert recorded.said["penstock.outcome"] == outcome
    assert (span.status.status_code == StatusCode.ERROR) == failed
    assert recorded.said.get("error.type") == (type(error).__name__ if failed else None)


def test_a_client_that_leaves_ends_its_span() -> None:
    cancelled: list[bool] = []
    recorded = Recorded(lambda request, answer: lambda: cancelled.append(True))
    cancel = recorded.traces.handle(ASK, lambda response: None)
    assert recorded.spans == ()
    assert cancel is not None
    cancel()
    assert cancelled == [True]
    assert recorded.said["penstock.outcome"] == "cancelled"


@pytest.mark.parametrize(
    ("path", "route", "model"),
    [
        ("/", "/", ""),
        ("/page/page.js", "/page/{file}", ""),
        ("/metrics", "/metrics", ""),
        ("/v1/apps", "/v1/apps", ""),
        ("/v1/apps/digits", "/v1/apps/{name}", "digits"),
        ("/v2", "/v2", ""),
        ("/v2/health/ready", "/v2/health/ready", ""),
        ("/v2/models/digits", "/v2/models/{name}", "digits"),
        ("/v2/models/digits/infer", "/v2/models/{name}/infer", "digits"),
        ("/v2/models/digits/versions/3/infer", "/v2/models/{name}/versions/{version}/infer", "digits"),
        ("/v2/repository/models/digits/load", "/v2/repository/models/{name}/load", "digits"),
        ("/wp-admin/setup.php", "", ""),
        ("/v2/models/digits/wp-admin", "", ""),
        ("", "", ""),
    ],
)
def test_routes_are_few_whatever_is_asked(path: str, route: str, model: str) -> None:
    assert route_of(path) == (route, model)


def test_each_step_of_a_chain_is_a_child_of_its_request() -> None:
    lost = Overloaded("Part 'classify': the engine stopped.")

    def chain(request: Request, answer: Answer) -> None:
        assert request.observe_step is not None
        request.observe_step(StepReport(name="detect", duration_ns=7_000_000, rows=1, error=None))
        request.observe_step(StepReport(name="classify", duration_ns=1_000, rows=3, error=lost))
        answer(rejected(lost))

    recorded = Recorded(chain)
    recorded.ask(Request(Head("POST", "/v1/apps/look", {}), b"1"))
    detect, classify, whole = recorded.spans
    assert [detect.name, classify.name] == ["detect", "classify"]
    for child in (detect, classify):
        assert child.parent is not None
        assert whole.context is not None
        assert child.parent.span_id == whole.context.span_id
    assert detect.end_time is not None
    assert detect.start_time is not None
    assert detect.end_time - detect.start_time == 7_000_000
    assert dict(classify.attributes or {})["penstock.rows"] == 3
    assert (detect.status.status_code, classify.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    # A request that is not sampled is not observed.
    seen: list[Any] = []

    def plain(request: Request, answer: Answer) -> None:
        seen.append(request.observe_step)
        answer(Response(200))

    Recorded(plain, share=0.0).ask(Request(Head("POST", "/v1/apps/look", {}), b"1"))
    assert seen == [None]


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_clock_that_is_set_during_a_request_changes_no_duration(jump_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def chain(request: Request, answer: Answer) -> None:
        set_ns = time.time_ns() + jump_s * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: set_ns)
        assert request.observe_step is not None
        request.observe_step(StepReport(name="detect", duration_ns=1_000, rows=1, error=None))
        answer(rejected(Overloaded("full")))

    recorded = Recorded(chain)
    recorded.ask(Request(Head("POST", "/v1/apps/look", {}), b"1"))
    detect, whole = recorded.spans
    assert whole.start_time is not None
    assert whole.end_time is not None
    assert detect.end_time is not None
    assert 0 < whole.end_time - whole.start_time < 10 * 10**9
    assert whole.start_time <= detect.end_time <= whole.end_time

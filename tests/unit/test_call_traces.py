"""Which gRPC calls become spans, and what those say."""

import logging
from typing import Any, cast

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from penstock.core.errors import ComputeFailed, InvalidInput, Overloaded, RequestError, TooLate
from penstock.serve.grpc.conversion import status_of
from penstock.serve.grpc.observed_calls import note_error
from penstock.serve.observe.call_record import CallRecord
from penstock.serve.observe.call_traces import CallTraces
from penstock.serve.observe.tracing import Place
from penstock.serve.registry.chain_request import StepReport
from tests.unit.test_tracing import PARENT, TRACE, Recorded

PATH = "/inference.GRPCInferenceService/ModelInfer"


def ended(recorded: Recorded, call: CallRecord, error: RequestError | None = None) -> tuple[ReadableSpan, ...]:
    end = CallTraces(recorded.traces).observe(call)
    call.model = "digits"
    if error is not None:
        note_error(call, error)
    if end is not None:
        end()
    return recorded.spans


def test_a_span_says_what_was_called_and_what_came_of_it() -> None:
    recorded = Recorded()
    (span,) = ended(recorded, CallRecord(PATH, {"user-agent": "grpc-python/1"}))
    assert (span.name, span.kind, span.parent) == (PATH[1:], SpanKind.SERVER, None)
    assert span.status.status_code == StatusCode.UNSET
    assert recorded.said == {
        "rpc.system": "grpc",
        "rpc.service": "inference.GRPCInferenceService",
        "rpc.method": "ModelInfer",
        "rpc.grpc.status_code": 0,
        "network.protocol.version": "2",
        "user_agent.original": "grpc-python/1",
        "penstock.model": "digits",
        "penstock.outcome": "answered",
    }


def test_the_metadata_of_a_caller_decides_and_names_the_parent() -> None:
    recorded = Recorded(share=0.001)
    (span,) = ended(recorded, CallRecord(PATH, {"traceparent": f"00-{TRACE}-{PARENT}-01"}))
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert ended(Recorded(share=1.0), CallRecord(PATH, {"traceparent": f"00-{TRACE}-{PARENT}-00"})) == ()
    assert ended(Recorded(share=0.4), CallRecord(PATH)) == ()


@pytest.mark.parametrize(
    ("error", "outcome", "failed"),
    [
        (InvalidInput("bad"), "invalid", False),
        (Overloaded("full"), "refused", False),
        (TooLate("late"), "expired", True),
        (ComputeFailed("thirteen"), "failed", True),
    ],
)
def test_a_rejection_has_its_status_and_its_outcome(error: RequestError, outcome: str, failed: bool) -> None:
    recorded = Recorded()
    (span,) = ended(recorded, CallRecord(PATH), error)
    said = recorded.said
    assert (said["rpc.grpc.status_code"], said["penstock.outcome"]) == (status_of(error).value[0], outcome)
    # As the conventions have it, RESOURCE_EXHAUSTED is none.
    assert (span.status.status_code == StatusCode.ERROR) == failed
    assert said.get("error.type") == (type(error).__name__ if failed else None)


def test_a_client_that_leaves_and_a_call_of_no_model() -> None:
    recorded = Recorded()
    call = CallRecord(PATH)
    call.gone, call.code, call.status = True, 1, "CANCELLED"
    ended(recorded, call)
    assert recorded.said["penstock.outcome"] == "cancelled"
    other = Recorded()
    end = CallTraces(other.traces).observe(CallRecord("/inference.GRPCInferenceService/ServerLive"))
    assert end is not None
    end()
    assert not {"penstock.model", "penstock.outcome"} & other.said.keys()


def test_the_steps_of_a_chain_are_children_and_its_result_comes_through() -> None:
    recorded, call, results = Recorded(), CallRecord(PATH), list[Any]()
    end = CallTraces(recorded.traces).observe(call)
    assert end is not None
    assert call.observe_step is not None
    call.observe_step(StepReport(name="find", duration_ns=1_000_000, rows=2, error=None))

    def submit(done: Any) -> None:
        done("answer")

    assert call.submit("digits", submit, results.append) is None
    end()
    step, span = recorded.spans
    assert step.parent is not None
    assert span.context is not None
    assert (step.name, step.parent.span_id) == ("find", span.context.span_id)
    assert results == ["answer"]


def test_a_result_after_the_end_of_its_call_changes_no_span(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(cast(Any, None), 0, 0)
    monkeypatch.setattr(Place, "next", lambda models, name: [place])
    monkeypatch.setattr(Place, "taken", lambda place: True)
    monkeypatch.setattr(Place, "attributes", lambda place: {"penstock.queue_ms": 1.5})
    found: list[dict[str, Any]] = []
    for result_first in (True, False):
        recorded, call, given = Recorded(), CallRecord(PATH), list[Any]()
        end = CallTraces(recorded.traces).observe(call)
        assert end is not None
        call.submit("digits", given.append, lambda result: None)
        if result_first:
            given[0]("answer")
        end()
        if not result_first:
            given[0]("answer")
        found.append(recorded.said)
    # OpenTelemetry would warn of an attribute of an ended span, for each call that is cancelled late.
    assert caplog.messages == []
    assert [said.get("penstock.queue_ms") for said in found] == [1.5, None]


def test_bad_headers_of_a_caller_are_no_parent_and_write_nothing(caplog: pytest.LogCaptureFixture) -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    for name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    for bad in ("", "x", "y" * 5_000, f"ff-{TRACE}-{PARENT}-01", f"00-{'0' * 32}-{PARENT}-01"):
        (span,) = ended(Recorded(), CallRecord(PATH, {"traceparent": bad}))
        assert span.parent is None
    (span,) = ended(Recorded(), CallRecord(PATH, {"traceparent": parent, "tracestate": "=,x,\x1b[2J=1"}))
    assert span.parent is not None
    # A client could fill the log with them.
    assert caplog.messages == []


def test_a_stream_that_ends_with_the_server_was_not_answered() -> None:
    recorded = Recorded()
    call = CallRecord("/inference.GRPCInferenceService/ModelStreamInfer")
    call.code, call.status = 14, "UNAVAILABLE"
    (span,) = ended(recorded, call)
    assert recorded.said["penstock.outcome"] == "failed"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "UNAVAILABLE")

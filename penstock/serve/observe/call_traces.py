"""Spans of gRPC calls, beside those of HTTP requests: one for each call, also for a stream of requests.

Names and values follow OpenTelemetry's semantic conventions for gRPC servers; what is Penstock's own begins with
`penstock.`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from penstock.core.errors import RequestError
from penstock.serve.exchange.response import Cancel
from penstock.serve.observe.call_record import CallRecord, Done, Submit
from penstock.serve.observe.tracing import Place, SpanClock, Traces, outcome_of

# Those that the conventions count as errors of a server: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL,
# UNAVAILABLE, DATA_LOSS.
ERRORS = (2, 4, 12, 13, 14, 15)


@final
@dataclass(frozen=True, eq=False)
class CallTraces:
    """Records spans of sampled calls, by the metadata `traceparent` and the share of `Traces`.

    Args:
        traces: Those of HTTP.
    """

    traces: Traces

    def observe(self, call: CallRecord) -> Callable[[], None] | None:
        """Begin the span of a call; returns what ends it. None if it is not sampled."""
        is_sampled, context = self.traces.sample(call.metadata)
        if not is_sampled:
            return None
        service, _, method = call.path[1:].partition("/")
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            "network.protocol.version": "2",
        }
        if agent := call.metadata.get("user-agent"):
            attributes["user_agent.original"] = agent
        clock = SpanClock()
        span = self.traces.tracer.start_span(
            call.path[1:], context, SpanKind.SERVER, attributes, start_time=clock.now_ns()
        )
        call.observe_step = partial(self.traces.add_step, span, clock)
        batch: dict[str, float] = {}
        call.around_submit = partial(self._submit, batch)
        return partial(_end, span, clock, call, batch)

    def _submit(self, batch: dict[str, float], name: str, submit: Submit, done: Done) -> Cancel | None:
        """Submit a request, and note its batch with its result: the span may have ended, in the thread of gRPC."""
        place: Place | None = None

        def described(result: Any) -> None:
            if place is not None and not isinstance(result, RequestError):
                batch.update(place.attributes())
            done(result)

        coming = Place.next(self.traces.models, name)
        cancel = submit(described)
        place = next(filter(Place.taken, coming), None)
        return cancel


def _end(span: Span, clock: SpanClock, call: CallRecord, batch: dict[str, float]) -> None:
    span.set_attributes({"rpc.grpc.status_code": call.code, **batch})
    if call.model:
        span.set_attribute("penstock.model", call.model)
        span.set_attribute("penstock.outcome", _outcome(call))
    if call.code in ERRORS:
        error = call.error
        span.set_attribute("error.type", call.status if error is None else type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, call.status if error is None else str(error)))
    span.end(clock.now_ns())


def _outcome(call: CallRecord) -> str:
    if call.gone:
        return "cancelled"
    # A stream that the end of the server ended, or an exception.
    return "failed" if call.code and call.error is None else outcome_of(call.error)

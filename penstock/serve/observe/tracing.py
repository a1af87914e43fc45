"""`--otlp-endpoint`: a span a request, sent by OpenTelemetry's own batch processor in a thread beside the request path.

Only `serve.control.front_end` imports this, and only with that option: without it the request path has none of it.
Names and values follow OpenTelemetry's semantic conventions for HTTP servers; what is Penstock's own begins with
`penstock.`.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Span,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.core.errors import RequestError
from penstock.core.machine.version import __version__
from penstock.serve.exchange.request import Request
from penstock.serve.exchange.response import Answer, Handler, Response
from penstock.serve.observe.histograms import OUTCOMES
from penstock.serve.registry.chain_request import StepReport
from penstock.serve.registry.served_chain import Served
from penstock.serve.registry.served_model import ServedModel, column_of
from penstock.serve.table.slots import SlotTable

PATH = "/v1/traces"
# Maximum time to send the last spans at shutdown.
FLUSH_S = 1.0

_OUTCOMES = {column: outcome for outcome, column in OUTCOMES.items()}
_PREDICT = ":predict"
_OF_A_MODEL = ([], ["infer"], ["ready"], ["config"], ["stats"])
_PARENTS = TraceContextTextMapPropagator()
# They warn of the headers of each request that has bad ones, with the client's text.
_HEADER_LOGGERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")


@final
@dataclass(eq=False)
class Traces:
    """Records spans of sampled requests.

    A `traceparent` header decides whether its request is sampled; of the others, a share is.

    Args:
        handler: Answers requests.
        provider: Makes the spans and sends them.
        models: The served models.
        share: Share of requests that are sampled, from 0 to 1.
        scheme: `"http"` or `"https"`.
        random: Returns numbers in [0, 1).

    Attributes:
        tracer: Starts spans.
    """

    handler: Handler
    provider: TracerProvider
    models: Iterable[Served]
    share: float
    scheme: str
    random: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        self.tracer = self.provider.get_tracer("penstock", __version__)
        for name in _HEADER_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)

    def handle(self, request: Request, answer: Answer) -> Callable[[], None] | None:
        """Answer a request, with or without a span."""
        is_sampled, context = self.sample(request.head.headers)
        return self._traced(request, answer, context) if is_sampled else self.handler(request, answer)

    def sample(self, headers: Mapping[str, str]) -> tuple[bool, Context | None]:
        """Decide whether a request with these headers is recorded; also return its caller's context, if it has one."""
        context = _PARENTS.extract(headers) if "traceparent" in headers else None
        caller = INVALID_SPAN_CONTEXT if context is None else get_current_span(context).get_span_context()
        return (caller.trace_flags.sampled if caller.is_valid else self.random() < self.share), context

    def shut_down(self) -> None:
        """Send the remaining spans, for at most `FLUSH_S`."""
        ending = threading.Thread(target=self.provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_S)

    def _traced(self, request: Request, answer: Answer, context: Context | None) -> Callable[[], None]:
        head = request.head
        route, model = route_of(head.path)
        attributes = {
            "http.request.method": head.method,
            "http.request.body.size": len(request.body),
            "http.route": route,
            "url.path": head.path,
            "url.scheme": self.scheme,
            "network.protocol.version": "1.1",
            "user_agent.original": head.headers.get("user-agent", ""),
            "penstock.model": model,
        }
        attributes = {name: value for name, value in attributes.items() if value != ""}
        clock = SpanClock()
        span = self.tracer.start_span(
            f"{head.method} {route}".rstrip(), context, SpanKind.SERVER, attributes, start_time=clock.now_ns()
        )

        place: Place | None = None

        def answered(response: Response) -> None:
            if place is not None and response.status == 200:
                span.set_attributes(place.attributes())
            _end(span, response, bool(model), clock.now_ns())
            answer(response)

        request.observe_step = partial(self.add_step, span, clock)
        coming = Place.next(self.models, model) if route.endswith(("/infer", "/apps/{name}", _PREDICT)) else []
        cancel = self.handler(request, answered)
        place = next(filter(Place.taken, coming), None)

        def left() -> None:
            span.set_attribute("penstock.outcome", "cancelled")
            span.end(clock.now_ns())
            if cancel is not None:
                cancel()

        return left

    def add_step(self, span: Span, clock: "SpanClock", step: StepReport) -> None:
        """Record a step of a chain as a child of the request's span; it has just ended."""
        end_ns = clock.now_ns()
        attributes = {"penstock.step": step.name, "penstock.rows": step.rows}
        child = self.tracer.start_span(
            step.name, set_span_in_context(span), attributes=attributes, start_time=end_ns - step.duration_ns
        )
        if step.error is not None:
            child.set_attribute("error.type", type(step.error).__name__)
            child.set_status(Status(StatusCode.ERROR, str(step.error)))
        child.end(end_ns)


@dataclass(frozen=True, slots=True)
class Place:
    """Slot of a request; the first of several rows.

    Args:
        table: The table of the model.
        slot: The slot.
        generation: Generation of the slot while the request holds it.
    """

    table: SlotTable
    slot: int
    generation: int

    @classmethod
    def next(cls, models: Iterable[Served], name: str) -> "list[Place]":
        """Return the slots that the model's next request can get."""
        tables = [
            (replica.table, replica.writer.next_slot)
            for served in models
            if served.name == name and isinstance(served, ServedModel)
            for replica in served.replicas
        ]
        return [cls(table, slot, int(table.generation[slot]) + 1) for table, slot in tables if slot is not None]

    def taken(self) -> bool:
        """True if the request holds the slot now."""
        return bool(self.table.generation[self.slot] == self.generation)

    def attributes(self) -> dict[str, float]:
        """Return queue time and batch size; nothing if another request holds the slot by now."""
        table, slot = self.table, self.slot
        entry = (int(table.produced[slot]) - 1) % table.results
        # A row that was submitted to another engine was never taken in by the one that died.
        answered = table.submitted[slot] == table.consumed[slot]
        if not (answered and self.taken() and table.batch_rows[slot, entry]):
            return {}
        return {
            "penstock.queue_ms": int(table.queue_ns[slot, entry]) / 1e6,
            "penstock.batch_rows": int(table.batch_rows[slot, entry]),
        }


def exporting(endpoint: str) -> TracerProvider:
    """Make a provider that sends spans in batches to a collector, from its own thread.

    Args:
        endpoint: URL of the collector, `http://127.0.0.1:4318`; with or without the path of traces.
    """
    url = endpoint.rstrip("/")
    exporter = OTLPSpanExporter(endpoint=url if url.endswith(PATH) else url + PATH)
    resource = Resource.create({"service.name": "penstock", "service.version": __version__})
    # Requests that are not sampled never become spans, so the sampler takes all.
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def route_of(path: str) -> tuple[str, str]:
    """Return the route of a path, with names replaced by `{name}`, and the name of the model, or empty strings."""
    match path.split("/")[1:]:
        case ["v1", "apps", name]:
            return "/v1/apps/{name}", name
        case ["v1", "models", name] if name.endswith(_PREDICT):
            return "/v1/models/{name}:predict", name.removesuffix(_PREDICT)
        case ["v1", "models", name]:
            return "/v1/models/{name}", name
        case ["v2", "models", name, "versions", _, *rest] if rest in _OF_A_MODEL:
            return "/".join(("/v2/models/{name}/versions/{version}", *rest)), name
        case ["v2", "models", name, *rest] if rest in _OF_A_MODEL:
            return "/".join(("/v2/models/{name}", *rest)), name
        case ["v2", "repository", "models", name, "load" | "unload" as what]:
            return "/v2/repository/models/{name}/" + what, name
        case ["page", _]:
            return "/page/{file}", ""
        case (
            [""]
            | ["metrics"]
            | ["v1", "apps" | "models" | "stats"]
            | ["v1", "audio", "transcriptions"]
            | ["v1", "listen" | "realtime"]
            | ["openapi.json"]
            | ["v2"]
            | ["v2", "health", "live" | "ready"]
        ):
            return path, ""
        case _:
            # Unknown paths get no route: the number of span names stays bounded.
            return "", ""


def outcome_of(error: RequestError | None) -> str:
    """Return the outcome of a request to a model, by the error that it ended with."""
    return "answered" if error is None else _OUTCOMES[column_of(error)]


def _end(span: Span, response: Response, asked_model: bool, now_ns: int) -> None:
    status = response.status
    span.set_attribute("http.response.status_code", status)
    span.set_attribute("http.response.body.size", len(response.body))
    error = response.error
    if asked_model:
        span.set_attribute("penstock.outcome", outcome_of(error))
    if error is not None and status >= 500:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end(now_ns)


@final
class SpanClock:
    """Times of one request since 1970, the wall clock read once: a clock that is set meanwhile changes no duration."""

    __slots__ = ("_offset_ns",)

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def now_ns(self) -> int:
        """The time since 1970."""
        return time.monotonic_ns() + self._offset_ns

"""Paths and what answers them. Handlers raise a `RequestError` to reject; any other exception is the server's fault."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import orjson

from penstock.core.application import describe
from penstock.core.errors import Forbidden, Overloaded, RequestError, TooLarge, Unauthorized, UnknownRoute, WrongMethod
from penstock.core.machine.version import __version__
from penstock.serve.background import BackgroundTasks
from penstock.serve.exchange.access import Access
from penstock.serve.exchange.local_client import Connected
from penstock.serve.exchange.request import MAX_HEAD_BYTES, Head, Request
from penstock.serve.exchange.response import (
    Answer,
    Cancel,
    Handler,
    Response,
    ShortWay,
    Switched,
    internal_error,
    rejected,
    with_headers,
)
from penstock.serve.http import chain_call, oip_http, openapi, plain, plain_batch, recording, transcription
from penstock.serve.http.encoding import serialize_refusal
from penstock.serve.http.example_calls import ExampleCalls
from penstock.serve.http.lane import lane_of
from penstock.serve.http.large_bodies import LARGE_BYTES, LargeBodies, is_json, json_limit
from penstock.serve.http.oip_lane import oip_lane_of
from penstock.serve.http.response_date import ResponseDate
from penstock.serve.observe import metrics
from penstock.serve.observe.load_report import LoadMeter, form_of
from penstock.serve.observe.reporting_lane import ReportingLane, with_report
from penstock.serve.oip.metadata import model_config, model_metadata
from penstock.serve.oip.shared_memory import Regions, extensions
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.transcription.vendor_errors import LISTEN, TRANSCRIPTIONS, Shape, rejected_as, shape_of, shaping

log = logging.getLogger(__name__)

_Call = plain.PlainCall | recording.RecordingCall | chain_call.ChainCall | plain_batch.PredictCall | oip_http.OipCall

PAGE = Path(__file__).parents[1] / "page"
STREAM, STREAMS = "/stream", "/v1/streams"
EXAMPLES = "/examples"
MODELS = "/v1/models"
CUT_SOUND = "Cut the recording, or send it as a live stream."
# Age at which what describes the server is made anew in any case.
MADE_S = 1.0
# Paths of a model that do not load it.
_ABOUT = (["ready"], ["stats"])
_PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Route:
    """Cached answer path of the requests with one head.

    Args:
        handle: Answers them.
        served: The model that counts their rejections.
        rejects_early: Whether a cached rejection answers them: they have the default budget.
        decodes: Whether each body is a file that the application decodes.
        headers: Added to every response.
        max_body_bytes: Maximum size of a body; None for the largest that any application takes.
        epoch: The registry's epoch when the route was made.
        call: The call of requests that may have a lane; None for others.
        report: Form of the load report that their answers carry; None for none.
        shape: Form of rejections, that of another service; None for the server's own.
        if_too_large: What else a client can do whose body is longer, as a sentence.
        refused: Why every request with this head is rejected. If it is `Overloaded`, the model cannot be reached now:
            the route is made anew for each request, which may load the model, and its words change.
    """

    handle: Handler
    served: Served | None = None
    rejects_early: bool = False
    decodes: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    max_body_bytes: int | None = None
    epoch: int = -1
    call: plain.PlainCall | oip_http.OipCall | None = None
    report: str | None = None
    shape: Shape | None = None
    if_too_large: str = ""
    refused: RequestError | None = None

    @property
    def unready(self) -> bool:
        """True if the model cannot be reached now."""
        return isinstance(self.refused, Overloaded)


@final
@dataclass(eq=False)
class Routes:
    """Answers every HTTP request of a front-end.

    Args:
        models: The models, by name.
        access: API keys and CORS.
        uptime_s: Seconds since the start.
        open_stream: Answers a request to open a live stream.
        share_streams: Answers a request to open a connection of many live streams.
        service_streams: Answer requests to open streams by the protocols of other speech services, by path.
        reject_stream: Makes the response to a rejected WebSocket of a page; None for other requests.
        regions: The regions of shared memory.
        offers_examples: Whether clients get golden examples.
        load: Makes load reports.
        load_report: Form of the load report of each answer; None for those that ask for one.
        date: The date of responses.
    """

    models: ModelRegistry
    access: Access
    _: KW_ONLY
    uptime_s: Callable[[], float]
    open_stream: Callable[[Served, Request, Answer], None]
    share_streams: Callable[[Request, Answer], None]
    service_streams: Mapping[str, Callable[[Request, Answer], None]]
    reject_stream: Callable[[RequestError, Request], Switched | None]
    regions: Regions
    offers_examples: bool = True
    load: LoadMeter | None = None
    load_report: str | None = None
    date: ResponseDate = field(default_factory=ResponseDate)
    _changes: BackgroundTasks = field(default_factory=BackgroundTasks, init=False)
    _large: LargeBodies = field(default_factory=LargeBodies, init=False)

    def __post_init__(self) -> None:
        self._examples = ExampleCalls(self.models, offered=self.offers_examples)
        self._page = {f"/page/{file.name}": _static(file) for file in PAGE.iterdir() if file.suffix in _PAGE_TYPES}
        if "/page/index.html" in self._page:
            self._page["/"] = self._page["/page/index.html"]

    def handle(self, request: Request, answer: Answer) -> Cancel | None:
        """Answer a request, now or later, exactly once; returns a function that cancels it."""
        route: _Route | None = request.head.route
        try:
            if route is None or route.epoch != self.models.epoch:
                route = request.head.route = self._route(request.head)
                # A lane ends with its epoch too; with the new route another one may be made.
                request.head.lane = None
            if route.headers:
                answer = with_headers(route.headers, answer)
            if route.shape is not None:
                answer = shaping(route.shape, answer)
            return route.handle(request, answer)
        except RequestError as error:
            if route is not None and route.served is not None:
                route.served.count_rejection(error)
            answer(self.reject_stream(error, request) or rejected(error))
        except Exception:
            log.exception("%s %r failed", request.head.method, request.head.path)
            answer(rejected(internal_error()))
        return None

    def reject_early(self, head: Head, arrival_ns: int) -> bytes | None:
        """Return the bytes of a rejection if a request with this head is certain to be rejected; None otherwise."""
        route: _Route | None = head.route
        if route is None or not route.rejects_early or route.epoch != self.models.epoch:
            return None
        served = route.served
        assert isinstance(served, ServedModel), route
        error = served.cached_rejection(arrival_ns) if served.writer.refusing else None
        if error is None and route.decodes and (error := served.late_rejection(arrival_ns)) is not None:
            served.count_rejection(error)
        return None if error is None else serialize_refusal(error, self.date.line)

    def lane(self, head: Head) -> ShortWay | None:
        """Return the short way of requests with this head; None if there is none."""
        route: _Route | None = head.route
        if route is None or route.call is None or route.epoch != self.models.epoch:
            return None
        lane: ShortWay | None
        if isinstance(route.call, oip_http.OipCall):
            lane = oip_lane_of(route.call, head, self.models, route.headers, self.date)
        else:
            lane = None if route.headers else lane_of(route.call, head, self.models, self.date)
        if lane is None or route.report is None or self.load is None:
            return lane
        return ReportingLane(lane, self.load, route.report)

    def max_body_bytes(self, head: Head) -> int:
        """Return the maximum size of the body that follows a head: what the application it names takes.

        Raises:
            ComputeFailed: The server failed on this head.
            Unauthorized, Forbidden: A body follows that would be read for nothing.
            RequestError: Likewise, and the body is long or of unknown length.
            Overloaded: The model is not loaded, so that its limit is not known, and the body is long.
        """
        try:
            route = head.route = self._route(head)
            limit = self._limit_of(route)
        except Exception:
            log.exception("%s %r failed", head.method, head.path)
            raise internal_error() from None
        refused = route.refused
        if refused is not None and _is_read_for_nothing(head, refused, limit):
            raise refused.with_traceback(None)
        return limit

    def reject(self, error: RequestError, head: Head) -> Response:
        """Make the response to a request that could not be read to its end."""
        route: _Route | None = head.route
        if route is not None and route.served is not None:
            route.served.count_rejection(error)
        if route is not None and route.if_too_large and isinstance(error, TooLarge):
            error = TooLarge(f"{error} {route.if_too_large}")
        return _add_to(self.access.cors(head), rejected_as(shape_of(head.path), error))

    def _route(self, head: Head) -> _Route:
        epoch = self.models.epoch
        preflight = self.access.preflight(head)
        if preflight is not None:
            return _Route(handle=_reply(Response(204, b"", headers=preflight)), epoch=epoch)
        try:
            owner = self.access.check(head)
            route = self._find(head, owner)
        except RequestError as error:
            route = _Route(handle=_rejecting(error), refused=error)
        shape = shape_of(head.path)
        if shape is not None:
            route = replace(route, shape=shape)
        if "content-encoding" in head.headers:
            route = replace(route, handle=partial(self._decompress, route), rejects_early=False, call=None)
        cors = self.access.cors(head)
        if cors:
            route = replace(route, headers=(*route.headers, *cors), rejects_early=False)
        return replace(route, epoch=-1 if route.unready else epoch)

    def _limit_of(self, route: _Route) -> int:
        if route.max_body_bytes is not None:
            return route.max_body_bytes
        return MAX_HEAD_BYTES + self.models.max_body_bytes

    def _decompress(self, route: _Route, request: Request, answer: Answer) -> Cancel | None:
        # The same limit as for the compressed body.
        return self._large.unpack(route.handle, self._limit_of(route), route.served, request, answer)

    def _find(self, head: Head, owner: str) -> _Route:
        path = head.path
        if path.startswith(plain.PATH) and path.endswith(STREAM):
            served = self.models.named(path.removeprefix(plain.PATH).removesuffix(STREAM))
            _need(head, "GET")
            return _Route(handle=partial(self.open_stream, served), served=served)
        if path.startswith(plain.PATH) and path.endswith(EXAMPLES):
            _need(head, "GET, HEAD")
            served = self.models.named(path.removeprefix(plain.PATH).removesuffix(EXAMPLES))
            return _Route(handle=partial(self._examples.handle, served))
        if path.startswith(plain.PATH):
            served = self.models.named(path.removeprefix(plain.PATH))
            _need(head, "POST")
            return self._inference(served, head, served.application.max_body_bytes, _call_of(served, head))
        if path == "/v2" or path.startswith("/v2/"):
            return self._version_two(head, owner)
        if path == MODELS or path.startswith(f"{MODELS}/"):
            return self._version_one(head)
        if path == STREAMS:
            _need(head, "GET")
            return _Route(handle=self.share_streams)
        if path in self.service_streams:
            if path == LISTEN and head.method == "POST":
                raise WrongMethod(f"Recordings are not taken; send them to {TRANSCRIPTIONS}, or as a stream.", "GET")
            _need(head, "GET")
            return _Route(handle=self.service_streams[path])
        if path == TRANSCRIPTIONS:
            _need(head, "POST")
            call = transcription.TranscriptionCall(self.models, self._large, head)
            return _Route(handle=call.handle, max_body_bytes=call.max_body_bytes, if_too_large=CUT_SOUND)
        if path == "/v1/stats":
            return _json(head, self._stats)
        if path == "/v1/apps":
            return _json(head, lambda: {"apps": [described(served) for served in self.models.newest]})
        if path == openapi.PATH:
            return _json(head, lambda: openapi.document(self.models.newest, takes_keys=self.access.keys is not None))
        if path == "/metrics":
            _need(head, "GET, HEAD")
            return _Route(handle=_made(self._metrics))
        if path in self._page:
            _need(head, "GET, HEAD")
            return _Route(handle=_reply(self._page[path]))
        if path == "*" and head.method == "OPTIONS":
            # Of the server as a whole (RFC 9110, section 9.3.7).
            return _Route(handle=_reply(Response(200, b"", headers=(("Allow", "GET, HEAD, POST, OPTIONS"),))))
        raise UnknownRoute(
            f"There is no {path!r} here; there are /, /v1/apps, /v1/apps/NAME, its /stream and /examples, /v1/streams, "
            f"/v1/models, /v1/stats, {TRANSCRIPTIONS}, {', '.join(self.service_streams)}, /v2, /metrics and "
            f"{openapi.PATH}."
        )

    def _metrics(self) -> Response:
        load = None if self.load is None else self.load.report()
        return Response(200, metrics.exposition(self.models, load), metrics.CONTENT_TYPE)

    def _version_one(self, head: Head) -> _Route:
        """Version 1 of KServe's protocol, with what OpenAI's clients look for beside it."""
        name, colon, verb = head.path.removeprefix(MODELS).removeprefix("/").partition(":")
        if not name and not colon:
            return _json(head, self._models)
        # Whether it is ready can be asked without loading it.
        served = self.models.named(name, first_use=bool(colon))
        if not colon:
            return _json(
                head,
                lambda: {"name": name, "ready": not (self.models.ends or served.engine_lost)} | _openai_model(name),
            )
        if verb != "predict":
            raise UnknownRoute(f"A model has :predict; {head.path!r} is not served.")
        _need(head, "POST")
        limit = served.application.max_body_bytes
        return self._inference(served, head, limit, partial(plain_batch.PredictCall, served, head))

    def _version_two(self, head: Head, owner: str) -> _Route:
        match head.path.rstrip("/").split("/")[2:]:
            case []:
                about = {
                    "name": "penstock",
                    "version": __version__,
                    "extensions": extensions(oip_http.EXTENSIONS, self.regions),
                }
                return _json(head, lambda: about)
            case ["health", "live"]:
                return _json(head, lambda: {"live": True})
            case ["health", "ready"]:
                return _json(head, self._readiness)
            case ["repository", "index"]:
                return _json(head, self.models.index, "POST")
            case ["repository", "models", name, "load" | "unload" as change]:
                _need(head, "POST")
                return self._changing(head, name, change)
            case ["models", name, "versions", number, *rest]:
                return self._model(self.models.named(name, number, first_use=rest not in _ABOUT), rest, head, owner)
            case ["models", name, *rest]:
                return self._model(self.models.named(name, first_use=rest not in _ABOUT), rest, head, owner)
            case ["systemsharedmemory", *rest]:
                return self._shared_memory(head, rest, owner)
            case _:
                raise UnknownRoute(f"There is no {head.path!r} in the Open Inference Protocol's paths that are served.")

    def _model(self, served: Served, rest: list[str], head: Head, owner: str) -> _Route:
        if rest == ["infer"]:
            _need(head, "POST")
            # A body of the protocol has a head of its own.
            limit = served.application.max_body_bytes + MAX_HEAD_BYTES
            return self._inference(served, head, limit, partial(oip_http.OipCall, served, head, owner, self.regions))
        _need(head, "GET, HEAD")
        match rest:
            case []:
                return _json(head, lambda: model_metadata(served, self.models.versions(served.name)))
            case ["ready"]:
                return _json(head, self._readiness)
            case ["config"]:
                return _json(head, lambda: model_config(served))
            case ["stats"]:
                return _json(head, lambda: {"model_stats": [metrics.statistics_of(served)]})
            case _:
                raise UnknownRoute(f"A model has /ready, /infer, /config and /stats; {head.path!r} is none of them.")

    def _changing(self, head: Head, name: str, verb: str) -> _Route:
        self.access.check(head, admin=True)

        async def apply(answer: Answer) -> None:
            try:
                response = Response(200)
                try:
                    await self.models.change(name, unload=verb == "unload")
                except RequestError as error:
                    response = rejected(error)
            except Exception:
                # Its client waits for an answer, whatever is wrong here, also where it is the refusal.
                log.exception("%r could not be changed", name)
                response = rejected(internal_error())
            answer(response)

        def handle(request: Request, answer: Answer) -> None:
            self.models.reject_change()
            oip_http.reject_overrides(request.body)
            self._changes.start(apply(answer))

        return _Route(handle=handle, max_body_bytes=MAX_HEAD_BYTES)

    def _shared_memory(self, head: Head, rest: list[str], owner: str) -> _Route:
        """Triton's extension of system shared memory."""
        name, verb = (rest[1], rest[2]) if len(rest) == 3 and rest[0] == "region" else ("", "/".join(rest))
        regions = self.regions
        if verb not in ("status", "unregister", "register") or (verb == "register" and not name):
            raise UnknownRoute(
                f"Shared memory has /status, /unregister, and /region/NAME with /register, /status and /unregister; "
                f"{head.path!r} is none of them."
            )
        _need(head, "GET, HEAD" if verb == "status" else "POST")

        def handle(request: Request, answer: Answer) -> None:
            client = Connected.over_http(request.transport, request.head.headers)
            body = b""
            if verb == "status":
                body = orjson.dumps(regions.status(name, client, owner))
            elif verb == "unregister":
                regions.unregister(name, client, owner)
            else:
                regions.register(name, *oip_http.region_of(request.body), client, owner)
            answer(Response(200, body))

        return _Route(handle=handle, max_body_bytes=MAX_HEAD_BYTES)

    def _inference(self, served: Served, head: Head, max_body_bytes: int, call_of: Callable[[], _Call]) -> _Route:
        max_body_bytes = min(max_body_bytes, json_limit(served, head))
        try:
            report = None if self.load is None else form_of(head, self.load_report)
            call = call_of()
        except RequestError as error:
            return _Route(handle=_rejecting(error), served=served, max_body_bytes=max_body_bytes)
        rejects_early = isinstance(call, plain.PlainCall) and call.rejects_early
        handle = call.handle
        if not isinstance(call, recording.RecordingCall) and max_body_bytes > LARGE_BYTES and is_json(head):
            handle = partial(self._large.call, served, call)
        # A plain call adds them to its results itself, at no cost.
        is_plain = isinstance(call, plain.PlainCall)
        headers = () if is_plain or isinstance(served, ServedChain) else served.version_headers
        if report is not None:
            handle = partial(self._report, handle, served, report)
        return _Route(
            handle=handle,
            served=served,
            rejects_early=rejects_early and report is None,
            decodes=isinstance(call, plain.PlainCall) and call.decodes,
            report=report,
            headers=headers,
            call=call if isinstance(call, plain.PlainCall | oip_http.OipCall) else None,
            max_body_bytes=max_body_bytes,
        )

    def _report(self, handle: Handler, served: Served, form: str, request: Request, answer: Answer) -> Cancel | None:
        """Answer with a load report."""
        assert self.load is not None, form
        load = self.load

        def reported(response: Response) -> None:
            answer(with_report(response, load, form))

        try:
            return handle(request, reported)
        except RequestError as error:
            served.count_rejection(error)
            reported(rejected(error))
        return None

    def _models(self) -> dict[str, Any]:
        names = [served.name for served in self.models.newest]
        return {"models": names, "object": "list", "data": [_openai_model(name) for name in names]}

    def _readiness(self) -> dict[str, Any]:
        self.models.reject_unready()
        return {"ready": True}

    def _stats(self) -> dict[str, Any]:
        models = {served.label: metrics.stats_of(served, self.uptime_s()) for served in self.models}
        return metrics.server_stats(models) | {"models": models}


def described(served: Served) -> dict[str, Any]:
    """The public description of a model, as JSON values."""
    return (
        describe(served.application)
        | {
            "name": served.name,
            "version": served.version,
            "latency_ms": served.budget_ns / 1e6,
            "bundle": served.content_hash,
            "metrics": served.metrics,
        }
        | (_of_chain(served) if isinstance(served, ServedChain) else {})
    )


def _openai_model(name: str) -> dict[str, Any]:
    """A model as OpenAI's clients read it; when it was made is not known here."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "penstock"}


def _of_chain(chain: ServedChain) -> dict[str, Any]:
    about: dict[str, Any] = {
        "parts": list(chain.parts),
        "stepped": chain.can_stream,
        "shows": None if chain.shows is None else chain.shows.to_json(),
    }
    if chain.segments is None:
        return about
    # It takes streams alone.
    return about | {"accepts": [], "segments": {"max_under_way": chain.segments.max_under_way}}


def _call_of(served: Served, head: Head) -> Callable[[], _Call]:
    if isinstance(served, ServedChain):
        return partial(chain_call.ChainCall, served, head)
    return partial(plain.PlainCall if served.streams is None else recording.RecordingCall, served, head)


def _is_read_for_nothing(head: Head, refused: RequestError, limit: int) -> bool:
    """True if the body of a request that is rejected should not be awaited: the connection ends instead."""
    length = head.headers.get("content-length", "")
    size = int(length) if length.isdigit() else 0
    if isinstance(refused, Overloaded):
        return size > limit
    unknown = "transfer-encoding" in head.headers or "expect" in head.headers
    if isinstance(refused, Unauthorized | Forbidden):
        return unknown or size > 0
    return unknown or size > MAX_HEAD_BYTES


def _rejecting(error: RequestError) -> Handler:
    def handle(request: Request, answer: Answer) -> None:
        # One error object for all requests: without this, its traceback would grow with each.
        raise error.with_traceback(None)

    return handle


def _reply(response: Response) -> Handler:
    return lambda request, answer: answer(response)


def _json(head: Head, value: Callable[[], Any], methods: str = "GET, HEAD") -> _Route:
    _need(head, methods)
    return _Route(handle=_made(lambda: Response(200, orjson.dumps(value()))))


def _made(make: Callable[[], Response]) -> Handler:
    """Answer with what is made for each request, or for a client that takes more than its share, each second."""
    last: tuple[float, Response] | None = None

    def handle(request: Request, answer: Answer) -> None:
        nonlocal last
        now_s = time.monotonic()
        if last is None or now_s - last[0] > MADE_S or request.usage is None or not request.usage.waits:
            last = now_s, make()
        answer(last[1])

    return handle


def _add_to(headers: tuple[tuple[str, str], ...], response: Response) -> Response:
    return replace(response, headers=response.headers + headers) if headers else response


def _need(head: Head, allowed: str) -> None:
    if head.method not in allowed.split(", "):
        raise WrongMethod(f"{head.path} takes {allowed}, not {head.method}.", allowed)


def _static(file: Path) -> Response:
    return Response(200, file.read_bytes(), _PAGE_TYPES[file.suffix], _PAGE_HEADERS)

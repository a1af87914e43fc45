"""Which path does what. Handlers raise a `RequestError` to refuse; whatever else they raise is the server's fault."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import orjson

from penstock.core.application import describe
from penstock.core.errors import ComputeFailed, RequestError, UnknownRoute, WrongMethod
from penstock.serve import statistics
from penstock.serve.access import Access
from penstock.serve.connection import Answer, refused
from penstock.serve.heard import Heard
from penstock.serve.models import Models
from penstock.serve.protocols import inference_v2, plain, recording
from penstock.serve.protocols.described import model_config, model_metadata
from penstock.serve.served import Served
from penstock.serve.upgrade import no_stream_of, stream_of
from penstock.serve.wire import MAX_HEAD_BYTES, Head, Request, Response, decompressed

log = logging.getLogger(__name__)

Cancel = Callable[[], None] | None
Act = Callable[[Request, Answer], Cancel]
PAGE = Path(__file__).parent / "page"
STREAM = "/stream"
_PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_PAGE_HEADERS = (
    ("Content-Security-Policy", "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)


@dataclass(frozen=True, slots=True)
class _Plan:
    epoch: int
    act: Act
    served: Served | None = None
    headers: tuple[tuple[str, str], ...] = ()
    # Where the head alone says that this is a request which allows the usual time.
    shed: Served | None = None


@final
class Routes:
    """Answers every request of a front-end.

    Args:
        models: By name.
        access: Who may ask.
        uptime_s: Seconds since the start.
    """

    def __init__(self, models: Models, access: Access, *, uptime_s: Callable[[], float]) -> None:
        self._models = models
        self._access = access
        self._uptime_s = uptime_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._page = {f"/page/{file.name}": _static(file) for file in PAGE.iterdir() if file.suffix in _PAGE_TYPES}
        if "/page/index.html" in self._page:
            self._page["/"] = self._page["/page/index.html"]

    def handle(self, request: Request, answer: Answer) -> Cancel:
        """Answer a request, now or later, exactly once; gives what cancels it."""
        plan: _Plan | None = request.head.plan
        try:
            if plan is None or plan.epoch != self._models.epoch:
                # A head says the same each time it comes, so what follows from it is worked out once.
                plan = request.head.plan = self._planned(request.head)
            return plan.act(request, answer)
        except RequestError as error:
            if plan is not None and plan.served is not None:
                plan.served.count_refusal(error)
            refusal = no_stream_of(error, self._access, request) or refused(error)
        except Exception:
            log.exception("%s %r failed", request.method, request.path)
            refusal = refused(ComputeFailed("The server failed on this request; its log says how."))
        answer(refusal if plan is None else _with(plan.headers, refusal))
        return None

    def shed(self, head: Head, heard: Heard | None) -> bytes | None:
        """The whole answer to a request that is certain to be refused now, whatever its body; None for all others."""
        plan: _Plan | None = head.plan
        if plan is None or plan.shed is None or not plan.shed.frontend.refusing or plan.epoch != self._models.epoch:
            return None
        try:
            return plan.shed.refusal(heard)
        except Exception:
            # Of a batch that was run meanwhile, which is no fault of this request.
            log.exception("a turn failed in the middle of a poll")
            return None

    def refuse(self, error: RequestError, head: Head) -> Response:
        """The answer to a request that could not be read to its end."""
        return _with(self._access.cors(head), refused(error))

    def _planned(self, head: Head) -> _Plan:
        epoch = self._models.epoch
        cors = self._access.cors(head)
        preflight = self._access.preflight(head)
        if preflight is not None:
            return _Plan(epoch, lambda request, answer: answer(Response(204, b"", headers=preflight)))
        try:
            owner = self._access.check(head)
            act, served = self._routed(head, owner)
            if "content-encoding" in head.headers:
                act = partial(self._unpacked, act)
        except RequestError as error:
            act, served = _refusing(error), None
        if cors:
            return _Plan(epoch, partial(_with_headers, act, cors), served, cors)
        return _Plan(epoch, act, served, cors, _shed_of(act))

    def _unpacked(self, act: Act, request: Request, answer: Answer) -> Cancel:
        # The same limit as before it is unpacked: a body of the protocol has a head of its own.
        most = MAX_HEAD_BYTES + max((served.application.max_body_bytes for served in self._models), default=0)
        request.body = decompressed(request.body, request.headers["content-encoding"], most)
        return act(request, answer)

    def _routed(self, head: Head, owner: str) -> tuple[Act, Served | None]:
        path = head.path
        if path.startswith(plain.PATH) and path.endswith(STREAM):
            served = self._models.named(path.removeprefix(plain.PATH).removesuffix(STREAM))
            _need(head, "GET")
            return partial(stream_of, served, self._models, self._access), served
        if path.startswith(plain.PATH):
            served = self._models.named(path.removeprefix(plain.PATH))
            _need(head, "POST")
            plan = plain.Plan if served.streams is None else recording.Plan
            return _planned_or_refusing(lambda: plan.of(served, head)), served
        if path == "/v2" or path.startswith("/v2/"):
            return self._version_two(head, owner)
        _need(head, "GET, HEAD")
        if path == "/v1/stats":
            return _now(self._stats), None
        if path == "/v1/apps":
            return _now(lambda: {"apps": [described(served) for served in self._models]}), None
        if path == "/metrics":
            return self._metrics, None
        if path in self._page:
            page = self._page[path]
            return lambda request, answer: answer(page), None
        raise UnknownRoute(
            f"There is no {path!r} here; there are /, /v1/apps, /v1/apps/NAME, its /stream, /v1/stats, /v2 and "
            f"/metrics."
        )

    def _version_two(self, head: Head, owner: str) -> tuple[Act, Served | None]:
        match head.path.rstrip("/").split("/")[2:]:
            case []:
                _need(head, "GET, HEAD")
                extensions = inference_v2.EXTENSIONS
                return _now(lambda: {"name": "penstock", "version": _version(), "extensions": extensions}), None
            case ["health", "live"]:
                _need(head, "GET, HEAD")
                return _now(lambda: {"live": True}), None
            case ["health", "ready"]:
                _need(head, "GET, HEAD")
                return _now(self._readiness), None
            case ["repository", "index"]:
                _need(head, "POST")
                return _now(self._index), None
            case ["repository", "models", name, "load" | "unload" as what]:
                _need(head, "POST")
                return self._changing(head, name, what), None
            case ["models", name, "versions", number, *rest]:
                return self._model(self._models.named(name, number), rest, head, owner)
            case ["models", name, *rest]:
                return self._model(self._models.named(name), rest, head, owner)
            case _:
                raise UnknownRoute(f"There is no {head.path!r} in the Open Inference Protocol's paths that are served.")

    def _model(self, served: Served, rest: list[str], head: Head, owner: str) -> tuple[Act, Served | None]:
        if rest == ["infer"]:
            _need(head, "POST")
            return _planned_or_refusing(lambda: inference_v2.Plan.of(served, head, owner)), served
        _need(head, "GET, HEAD")
        if rest == []:
            return _now(lambda: model_metadata(served)), None
        if rest == ["ready"]:
            return _now(self._readiness), None
        if rest == ["config"]:
            return _now(lambda: model_config(served)), None
        if rest == ["stats"]:
            return _now(lambda: {"model_stats": [statistics.model_statistics(served)]}), None
        raise UnknownRoute(f"A model has /ready, /infer, /config and /stats; {head.path!r} is none of them.")

    def _changing(self, head: Head, name: str, what: str) -> Act:
        self._access.check(head, admin=True)
        change = self._models.load if what == "load" else self._models.unload

        async def changed(answer: Answer) -> None:
            try:
                await change(name)
                answer(Response(200))
            except RequestError as error:
                answer(refused(error))
            except Exception:
                log.exception("%r could not be changed", name)
                answer(refused(ComputeFailed("The server failed on this request; its log says how.")))

        def act(request: Request, answer: Answer) -> None:
            self._models.refuse_change()
            inference_v2.refuse_overrides(request.body)
            task = asyncio.get_running_loop().create_task(changed(answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return act

    def _readiness(self) -> dict[str, Any]:
        self._models.refuse_unready()
        return {"ready": True}

    def _index(self) -> list[dict[str, str]]:
        return [
            {"name": name, "version": number, "state": state, "reason": reason}
            for name, number, state, reason in self._models.index()
        ]

    def _stats(self) -> dict[str, Any]:
        models = {served.name: statistics.stats(served, self._uptime_s()) for served in self._models}
        # The page draws the first; whoever serves several finds each under its name.
        return (next(iter(models.values())) if models else {}) | {"models": models}

    def _metrics(self, request: Request, answer: Answer) -> None:
        answer(Response(200, statistics.exposition(list(self._models)), statistics.CONTENT_TYPE))


def described(served: Served) -> dict[str, Any]:
    """What a client may know of a model, as JSON values."""
    return describe(served.application) | {
        "name": served.name,
        "version": served.version,
        "latency_ms": served.budget_ns / 1e6,
        "bundle": served.manifest.content_hash,
        "metrics": served.manifest.metrics,
    }


def _planned_or_refusing(plan: Callable[[], plain.Plan | recording.Plan | inference_v2.Plan]) -> Act:
    try:
        return plan().infer
    except RequestError as error:
        return _refusing(error)


def _shed_of(act: Act) -> Served | None:
    plan = getattr(act, "__self__", None)
    return plan.served if isinstance(plan, plain.Plan) and plan.budget_ns is None else None


def _refusing(error: RequestError) -> Act:
    def act(request: Request, answer: Answer) -> Cancel:
        # The same error each time; without this, each time would be added to its traceback.
        raise error.with_traceback(None)

    return act


def _now(value: Callable[[], Any]) -> Act:
    return lambda request, answer: answer(Response(200, orjson.dumps(value())))


def _with_headers(act: Act, headers: tuple[tuple[str, str], ...], request: Request, answer: Answer) -> Cancel:
    return act(request, lambda response: answer(_with(headers, response)))


def _with(headers: tuple[tuple[str, str], ...], response: Response) -> Response:
    return replace(response, headers=response.headers + headers) if headers else response


def _need(head: Head, allowed: str) -> None:
    if head.method not in allowed.split(", "):
        raise WrongMethod(f"{head.path} takes {allowed}, not {head.method}.", allowed)


def _static(file: Path) -> Response:
    return Response(200, file.read_bytes(), _PAGE_TYPES[file.suffix], _PAGE_HEADERS)


def _version() -> str:
    return version("penstock")

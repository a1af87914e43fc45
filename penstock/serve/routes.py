"""Which path does what. Handlers raise a `RequestError` to refuse; whatever else they raise is the server's fault."""

import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

import orjson

from penstock.core.application import describe
from penstock.core.errors import ComputeFailed, Overloaded, RequestError, UnknownRoute, WrongMethod
from penstock.core.spec import Array
from penstock.serve import statistics
from penstock.serve.connection import Answer, refused
from penstock.serve.protocols import inference_v2, plain
from penstock.serve.served import Served
from penstock.serve.wire import MAX_HEAD_BYTES, Request, Response, decompressed

log = logging.getLogger(__name__)

Cancel = Callable[[], None] | None

PAGE = Path(__file__).parent / "page"
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


@final
class Routes:
    """Answers every request of the server.

    Args:
        applications: By name.
        max_batch_rows: The most rows of one request of the Open Inference Protocol.
        uptime_s: Seconds since the start.
    """

    def __init__(self, applications: dict[str, Served], *, max_batch_rows: int, uptime_s: Callable[[], float]) -> None:
        self._applications = applications
        self._max_batch_rows = max_batch_rows
        # The same limit as before it is unpacked: a body of the protocol has a head of its own.
        self._max_unpacked_bytes = MAX_HEAD_BYTES + max(
            served.application.max_body_bytes for served in applications.values()
        )
        self._uptime_s = uptime_s
        self._page = {f"/page/{file.name}": _static(file) for file in PAGE.iterdir() if file.suffix in _PAGE_TYPES}
        if "/page/index.html" in self._page:
            self._page["/"] = self._page["/page/index.html"]
        self.draining = False

    def handle(self, request: Request, answer: Answer) -> Cancel:
        """Answer a request, now or later, exactly once; gives what cancels it."""
        try:
            encoding = request.headers.get("content-encoding")
            if encoding:
                request.body = decompressed(request.body, encoding, self._max_unpacked_bytes)
            return self._routed(request, answer)
        except RequestError as error:
            answer(refused(error))
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            answer(refused(ComputeFailed("The server failed on this request; its log says how.")))
        return None

    def _routed(self, request: Request, answer: Answer) -> Cancel:
        path = request.path
        # The hot path first.
        if path.startswith("/v1/apps/"):
            served = self._named(path[9:])
            _need(request, "POST")
            return self._counted(served, plain.infer, request, answer)
        if path == "/v2" or path.startswith("/v2/"):
            return self._version_two(request, answer)
        _need(request, "GET, HEAD")
        if path == "/v1/stats":
            answer(_json(statistics.stats(next(iter(self._applications.values())), self._uptime_s())))
        elif path == "/v1/apps":
            answer(_json({"apps": [self._described(served) for served in self._applications.values()]}))
        elif path == "/metrics":
            answer(Response(200, statistics.exposition(self._applications.values()), statistics.CONTENT_TYPE))
        elif path in self._page:
            answer(self._page[path])
        else:
            raise UnknownRoute(
                f"There is no {path!r} here; there are /, /v1/apps, /v1/apps/NAME, /v1/stats, /v2 and /metrics."
            )
        return None

    def _version_two(self, request: Request, answer: Answer) -> Cancel:
        match request.path.rstrip("/").split("/")[2:]:
            case []:
                _need(request, "GET, HEAD")
                answer(_json({"name": "penstock", "version": _version(), "extensions": inference_v2.EXTENSIONS}))
            case ["health", "live"]:
                _need(request, "GET, HEAD")
                answer(_json({"live": True}))
            case ["health", "ready"]:
                _need(request, "GET, HEAD")
                answer(self._readiness())
            case ["repository", "index"]:
                _need(request, "POST")
                answer(_json([{"name": name, "version": "1", "state": "READY"} for name in self._applications]))
            case ["models", name, *rest]:
                served = self._named(name)
                if rest[:1] == ["versions"]:
                    if rest[1:2] != ["1"]:
                        raise UnknownRoute(f"Model {name!r} has version 1 alone.")
                    rest = rest[2:]
                return self._model(served, rest, request, answer)
            case _:
                raise UnknownRoute(
                    f"There is no {request.path!r} in the Open Inference Protocol's paths that are served."
                )
        return None

    def _model(self, served: Served, rest: list[str], request: Request, answer: Answer) -> Cancel:
        application = served.application
        specs = application.input, application.output
        if rest == ["infer"]:
            _need(request, "POST")
            return self._counted(served, self._infer, request, answer)
        _need(request, "GET, HEAD")
        if rest == []:
            answer(_json(inference_v2.model_metadata(application.name, *specs)))
        elif rest == ["ready"]:
            answer(self._readiness())
        elif rest == ["config"]:
            answer(_json(inference_v2.model_config(application.name, *specs, self._max_batch_rows)))
        elif rest == ["stats"]:
            answer(_json(self._statistics(served)))
        else:
            raise UnknownRoute(f"A model has /ready, /infer, /config and /stats; {request.path!r} is none of them.")
        return None

    def _infer(self, served: Served, request: Request, answer: Answer) -> Cancel:
        application = served.application
        infer = inference_v2.parse_infer(request, application.input, application.output, self._max_batch_rows)

        def finished(result: Array | RequestError) -> None:
            if isinstance(result, RequestError):
                plain.count_refusal(served, result)
                answer(refused(result))
                return
            served.counts.answered += 1
            answer(inference_v2.infer_response(infer, result, application.name, application.output))

        budget_ns = infer.budget_ns or plain.budget_ns_of(request)
        tickets = served.ask_all(infer.chunks, finished, budget_ns)
        return lambda: served.cancel(tickets)

    def _counted(
        self, served: Served, ask: Callable[[Served, Request, Answer], Cancel], request: Request, answer: Answer
    ) -> Cancel:
        try:
            return ask(served, request, answer)
        except RequestError as error:
            plain.count_refusal(served, error)
            raise

    def _named(self, name: str) -> Served:
        served = self._applications.get(name)
        if served is None:
            raise UnknownRoute(f"There is no model {name!r} here; there is {', '.join(map(repr, self._applications))}.")
        return served

    def _readiness(self) -> Response:
        if self.draining:
            raise Overloaded("The server is going down; ask another one.", 5.0)
        return _json({"ready": True})

    def _described(self, served: Served) -> dict[str, Any]:
        return describe(served.application) | {
            "latency_ms": served.budget_ns / 1e6,
            "bundle": served.manifest.content_hash,
            "metrics": served.manifest.metrics,
        }

    def _statistics(self, served: Served) -> dict[str, Any]:
        rows, queue_ns, compute_ns, latency_ns = served.table.sums.tolist()

        def entry(ns: int) -> dict[str, int]:
            return {"count": rows, "ns": ns}

        nothing = {"count": 0, "ns": 0}
        return {
            "model_stats": [
                {
                    "name": served.application.name,
                    "version": "1",
                    "inference_count": rows,
                    "execution_count": int(served.table.batch_counts.sum()),
                    "inference_stats": {
                        "success": entry(latency_ns),
                        "fail": {"count": served.counts.failed, "ns": 0},
                        "queue": entry(queue_ns),
                        "compute_input": nothing,
                        "compute_infer": entry(compute_ns),
                        "compute_output": nothing,
                    },
                }
            ]
        }


def _need(request: Request, allowed: str) -> None:
    if request.method not in allowed.split(", "):
        raise WrongMethod(f"{request.path} takes {allowed}, not {request.method}.", allowed)


def _json(value: Any) -> Response:
    return Response(200, orjson.dumps(value))


def _static(file: Path) -> Response:
    return Response(200, file.read_bytes(), _PAGE_TYPES[file.suffix], _PAGE_HEADERS)


def _version() -> str:
    return version("penstock")

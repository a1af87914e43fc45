"""One request: its head and its body."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.serve.fair_turns import Usage

MAX_HEAD_BYTES = 16_384


@dataclass(slots=True)
class Head:
    """The head of a request.

    Args:
        method: For example `"POST"`.
        path: The path, percent-decoded, without the query.
        headers: Values by lower-case name; the last value of a repeated header.
        keep_alive: Whether the connection stays open after the answer.
        version: The version of HTTP, `"1.1"` or `"1.0"`.
        query: The query, as it came, without `?`.
        route: Cache of the routes: how to answer requests with this head.
        nbytes: Size of a known head, with the empty line.
        lane: The short way of requests with this head; False if there is none, None if that is not known yet.
        began_ns: When its body began to come, or what came of the head; 0 for a request that is read whole.
    """

    method: str
    path: str
    headers: dict[str, str]
    keep_alive: bool = True
    version: str = field(default="1.1", kw_only=True)
    query: str = field(default="", kw_only=True)
    route: Any = None
    nbytes: int = field(default=0, compare=False)
    lane: Any = field(default=None, compare=False, repr=False)
    began_ns: int = field(default=0, kw_only=True, compare=False)


@dataclass(slots=True)
class Request:
    """One whole request.

    Args:
        head: The head. Requests with equal heads may share it; after parsing only `route`, `nbytes` and `lane` are
            written.
        body: The body, decompressed.
        arrival_ns: Earliest time at which it can have arrived, on the clock of deadlines.
        transport: The client's connection; None where it is not known.
        usage: What its connection took lately; None where that is not known.
        observe_step: Called with a `StepReport` after each step of a chain; None if the request is not traced.
    """

    head: Head
    body: bytes
    arrival_ns: int = field(default=0, compare=False)
    transport: Any = field(default=None, compare=False, repr=False)
    usage: Usage | None = field(default=None, compare=False, repr=False)
    observe_step: Callable[[Any], None] | None = field(default=None, compare=False)

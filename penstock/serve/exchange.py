"""One call of a server without sockets: what is sent, what an answer means, how long to wait before the next attempt.

A call is a generator: it yields each `Attempt`, is sent what became of it, and at the end returns the answer or raises.
Whoever drives it owns the socket, the clock and the sleep, so one logic serves threads, event loops and tests.
"""

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from urllib.parse import urlsplit

import orjson

from penstock.core.errors import (
    ClientError,
    ComputeFailed,
    DeadlineImpossible,
    Forbidden,
    InvalidInput,
    NotUnderstood,
    Overloaded,
    PenstockError,
    RequestError,
    TimedOut,
    TooLarge,
    TooSlow,
    Unauthorized,
    UnknownRoute,
    Unreachable,
    UnsupportedContent,
    WrongMethod,
)

Priority = Literal["interactive", "background"]

# The back-off after attempt n, from 0 on, is random, from 0 to FIRST_PAUSE_S * 2**n, and never above LONGEST_PAUSE_S.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
# Clients that were refused together must not come back together: Retry-After is stretched by up to this share.
SPREAD = 0.25

_BY_STATUS: dict[int, type[RequestError]] = {
    kind.status: kind
    for kind in (
        InvalidInput,
        Unauthorized,
        Forbidden,
        UnknownRoute,
        TooSlow,
        TooLarge,
        UnsupportedContent,
        ComputeFailed,
        DeadlineImpossible,
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What holds for the calls of one client.

    Args:
        url: The server's, such as `"http://localhost:8000"`.
        api_key: Goes with every request as `Authorization: Bearer KEY`.
        latency_ms: The budget of an inference in milliseconds, per attempt; None leaves it to the server.
        priority: Of an inference; None leaves it to the server, which takes it as interactive.
        retries: How often a request may be sent again.
        timeout_s: How long a call may take with all its attempts and the waits between them, in seconds.

    Raises:
        ClientError: One of them is out of range.
    """

    url: str
    api_key: str | None = None
    latency_ms: float | None = None
    priority: Priority | None = None
    retries: int = 3
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise ClientError(f"The server's URL is {self.url!r}; write it like 'http://localhost:8000'.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ClientError("The API key must be printable ASCII and not empty; it goes into a header.")
        if self.latency_ms is not None and not 0 < self.latency_ms < math.inf:
            raise ClientError(f"latency_ms is {self.latency_ms!r}; it must be a number of milliseconds above 0.")
        if self.priority is not None and self.priority not in get_args(Priority):
            raise ClientError(f"priority is {self.priority!r}; it must be one of {', '.join(get_args(Priority))}.")
        if self.retries < 0:
            raise ClientError(f"retries is {self.retries!r}; it must be 0 or more.")
        if not 0 < self.timeout_s < math.inf:
            raise ClientError(f"timeout_s is {self.timeout_s!r}; it must be a number of seconds above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What is sent: a path below the server's URL, headers by name, a body."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Wait `wait_s` seconds, then send the call and wait for its answer for `timeout_s` seconds."""

    call: Call
    wait_s: float
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back; headers by lower-case name."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """No whole answer came: `why` in the network's words, and whether it was time that ran out."""

    why: str
    timed_out: bool = False


Outcome: TypeAlias = Answer | Lost
T = TypeVar("T")
# The first `send` is None, as a generator wants it.
Steps: TypeAlias = Generator[Attempt, Outcome, T]


def exchange(
    call: Call, terms: Terms, *, deadline_s: float, clock_s: Callable[[], float], random: Callable[[], float]
) -> Steps[Answer]:
    """Send a call until it is answered well, must not be sent again, or the time is over.

    Args:
        call: What to send. It may be sent several times: inference has no side effect.
        terms: How often.
        deadline_s: When the caller gives up, on the clock; no wait goes beyond it.
        clock_s: A monotonic clock in seconds.
        random: Gives numbers from 0 to below 1.

    Raises:
        RequestError: The server refused.
        ClientError: No answer came.
    """
    error: PenstockError = TimedOut(f"{terms.url} was not asked: the {terms.timeout_s:g} s of this call are over.")
    wait_s = 0.0
    compute_failed = False
    for number in range(terms.retries + 1):
        left_s = deadline_s - clock_s() - wait_s
        if left_s <= 0:
            break
        outcome = yield Attempt(call, wait_s, left_s)
        if isinstance(outcome, Answer) and 200 <= outcome.status < 300:
            return outcome
        error = error_of(outcome, terms)
        pause = pause_s(outcome, number, compute_failed, random)
        if pause is None:
            break
        wait_s = pause
        compute_failed = isinstance(outcome, Answer) and outcome.status == 500
    raise error


def pause_s(outcome: Outcome, number: int, compute_failed: bool, random: Callable[[], float]) -> float | None:
    """Seconds to wait before a request is sent again, or None if it must not be.

    Args:
        outcome: What became of the last attempt.
        number: How many attempts were made before that one.
        compute_failed: Whether the attempt before was answered with status 500: a second one says the same.
        random: Gives numbers from 0 to below 1.
    """
    backoff_s = random() * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**number)
    if isinstance(outcome, Lost):
        return None if outcome.timed_out else backoff_s
    if outcome.status == 503:
        asked_s = retry_after_s(outcome)
        share = random()
        return backoff_s if asked_s is None else asked_s * (1 + SPREAD * share) + FIRST_PAUSE_S * share
    if outcome.status == 502 or (outcome.status == 500 and not compute_failed):
        return backoff_s
    return None


def retry_after_s(answer: Answer) -> float | None:
    """The seconds in `Retry-After`; None where there are none (a date is for browsers)."""
    text = answer.headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() else None


def error_of(outcome: Outcome, terms: Terms) -> PenstockError:
    """The exception for an outcome that is no result."""
    if isinstance(outcome, Lost):
        if outcome.timed_out:
            return TimedOut(f"{terms.url} gave no answer within {terms.timeout_s:g} s; allow more with timeout_s.")
        return Unreachable(f"{terms.url} cannot be reached or hung up ({outcome.why}); is a server running there?")
    message = _said(outcome) or f"{terms.url} answered {outcome.status} {_phrase(outcome.status)} and did not say why."
    if outcome.status == 503:
        asked_s = retry_after_s(outcome)
        return Overloaded(message) if asked_s is None else Overloaded(message, asked_s)
    if outcome.status == WrongMethod.status:
        return WrongMethod(message, outcome.headers.get("allow", ""))
    error = _BY_STATUS.get(outcome.status, RequestError)(message)
    error.status = outcome.status
    return error


def json_of(answer: Answer, terms: Terms) -> Any:
    """The JSON of an answer.

    Raises:
        NotUnderstood: It is none.
    """
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        raise NotUnderstood(
            f"{terms.url} answered {answer.body[:40]!r}, which is not JSON; is it a Penstock server?"
        ) from None


def _said(answer: Answer) -> str | None:
    try:
        body = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return body["error"] if isinstance(body, dict) and isinstance(body.get("error"), str) else None


def _phrase(status: int) -> str:
    return next((known.phrase for known in HTTPStatus if known.value == status), "")

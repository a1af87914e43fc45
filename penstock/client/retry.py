"""One call of a server without sockets (sans-IO): its attempts, the meaning of each answer, the waits between them.

A call is a generator: it yields each `Attempt`, receives the outcome, and at the end returns the answer or raises. Its
driver owns the socket, the clock and the sleep, so one implementation serves threads, event loops and tests.
"""

import math
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from urllib.parse import urlsplit

import orjson

from penstock.core.errors import (
    ClientError,
    InvalidResponse,
    Overloaded,
    PenstockError,
    RequestError,
    TimedOut,
    Unreachable,
    WrongMethod,
    WrongVersion,
)

Priority = Literal["interactive", "background"]

# The back-off after attempt n, counted from 0, is random between 0 and FIRST_BACKOFF_S * 2**n, at most MAX_BACKOFF_S.
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0
# Clients that were refused together must not return together: Retry-After is lengthened by up to this share.
JITTER = 0.25

# From a proxy that found no server.
GATEWAY = (502, 504)

# The others take more than a message.
_BY_STATUS = {
    kind.status: kind
    for kind in RequestError.__subclasses__()
    if kind.__module__ == RequestError.__module__ and kind not in (WrongMethod, WrongVersion, Overloaded)
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """Configuration of one client.

    Args:
        url: URL of the server, such as `"http://localhost:8000"`.
        api_key: Sent with every request as `Authorization: Bearer KEY`.
        latency_ms: Latency budget of an inference in milliseconds, per attempt; None for the server's.
        priority: Priority of an inference; None for the server's default, interactive.
        retries: Maximum number of times that a request is sent again.
        timeout_s: Time limit of a call with all its attempts and waits, in seconds.

    Raises:
        ClientError: A field is out of range.
    """

    url: str
    api_key: str | None = None
    latency_ms: float | None = None
    priority: Priority | None = None
    retries: int = 3
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not _is_url(self.url):
            raise ClientError(f"The server's URL is {self.url!r}; write it like 'http://localhost:8000'.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ClientError("The API key must be printable ASCII and not empty; it goes into a header.")
        if self.latency_ms is not None and not (_is_number(self.latency_ms) and 0 < self.latency_ms < math.inf):
            raise ClientError(f"latency_ms is {self.latency_ms!r}; it must be a number of milliseconds above 0.")
        if self.priority is not None and self.priority not in get_args(Priority):
            raise ClientError(f"priority is {self.priority!r}; it must be one of {', '.join(get_args(Priority))}.")
        if not (_is_number(self.retries) and isinstance(self.retries, Integral) and self.retries >= 0):
            raise ClientError(f"retries is {self.retries!r}; it must be a whole number, 0 or more.")
        if not (_is_number(self.timeout_s) and 0 < self.timeout_s < math.inf):
            raise ClientError(f"timeout_s is {self.timeout_s!r}; it must be a number of seconds above 0.")


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Raises for a port that is none.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A request: a path below the server's URL, headers by name, a body."""

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
    """A response; headers by lower-case name."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The failure of an attempt without a whole response: the network's reason, and whether it timed out."""

    why: str
    timed_out: bool = False


Outcome: TypeAlias = Answer | NoAnswer
T = TypeVar("T")
Steps: TypeAlias = Generator[Attempt, Outcome, T]


def exchange(
    call: Call, config: ClientConfig, *, deadline_s: float, clock_s: Callable[[], float], random: Callable[[], float]
) -> Steps[Answer]:
    """Send a call until it succeeds, must not be sent again, or times out.

    Args:
        call: The request. It may be sent several times: inference has no side effect.
        config: Configuration of the client.
        deadline_s: When the call times out, on the clock; no wait goes beyond it.
        clock_s: A monotonic clock in seconds.
        random: Gives numbers from 0 to below 1.

    Raises:
        RequestError: The server refused.
        ClientError: No answer came.
    """
    error: PenstockError = TimedOut(f"{config.url} got no request: the {config.timeout_s:g} s of this call are over.")
    wait_s = 0.0
    compute_failed = False
    for number in range(config.retries + 1):
        left_s = deadline_s - clock_s() - wait_s
        if left_s <= 0:
            break
        outcome = yield Attempt(call, wait_s, left_s)
        if isinstance(outcome, Answer) and 200 <= outcome.status < 300:
            return outcome
        error = error_of(outcome, config)
        pause = pause_s(outcome, number, compute_failed, random)
        if pause is None:
            break
        wait_s = pause
        compute_failed = isinstance(outcome, Answer) and outcome.status == 500
    raise error


def pause_s(outcome: Outcome, number: int, compute_failed: bool, random: Callable[[], float]) -> float | None:
    """Seconds to wait before a request is sent again, or None if it must not be.

    Args:
        outcome: Outcome of the last attempt.
        number: Number of attempts before that one.
        compute_failed: Whether the attempt before had status 500 too; a third one would not help.
        random: Gives numbers from 0 to below 1.
    """
    backoff_s = random() * min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**number)
    if isinstance(outcome, NoAnswer):
        return None if outcome.timed_out else backoff_s
    if outcome.status == 503:
        wait_s = retry_after_s(outcome)
        share = random()
        return backoff_s if wait_s is None else wait_s * (1 + JITTER * share) + FIRST_BACKOFF_S * share
    if outcome.status == 502 or (outcome.status == 500 and not compute_failed):
        return backoff_s
    return None


def retry_after_s(answer: Answer) -> float | None:
    """The seconds in `Retry-After`; None without that header, or for a date."""
    text = answer.headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() else None


def error_of(outcome: Outcome, config: ClientConfig) -> PenstockError:
    """The exception of an outcome without a result."""
    if isinstance(outcome, NoAnswer):
        if outcome.timed_out:
            return TimedOut(f"{config.url} gave no answer within {config.timeout_s:g} s; allow more with timeout_s.")
        return Unreachable(f"{config.url} cannot be reached or hung up ({outcome.why}); is a server running there?")
    message = (
        _message_of(outcome) or f"{config.url} answered {outcome.status} {_phrase(outcome.status)} and did not say why."
    )
    if outcome.status == 503:
        wait_s = retry_after_s(outcome)
        return Overloaded(message) if wait_s is None else Overloaded(message, wait_s)
    if outcome.status == WrongMethod.status:
        return WrongMethod(message, outcome.headers.get("allow", ""))
    error = _BY_STATUS.get(outcome.status, RequestError)(message)
    error.status = outcome.status
    return error


def error_of_event(fields: dict[str, Any], config: ClientConfig) -> PenstockError:
    """The exception of an error that came as a message, with what a response's head would have said of it."""
    status, wait_s = fields.get("status"), fields.get("retry_after_s")
    headers = {} if wait_s is None else {"retry-after": str(wait_s)}
    return error_of(Answer(status if isinstance(status, int) else 500, headers, orjson.dumps(fields)), config)


def json_of(answer: Answer, config: ClientConfig) -> Any:
    """The JSON of an answer.

    Raises:
        InvalidResponse: The body is not JSON.
    """
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        raise InvalidResponse(
            f"{config.url} answered {answer.body[:40]!r}, which is not JSON; is it a Penstock server?"
        ) from None


def _message_of(answer: Answer) -> str | None:
    try:
        body = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return None
    return body["error"] if isinstance(body, dict) and isinstance(body.get("error"), str) else None


def _phrase(status: int) -> str:
    return next((known.phrase for known in HTTPStatus if known.value == status), "")


def run(steps: Steps[T], send: Callable[[Attempt], Outcome], sleep: Callable[[float], None]) -> T:
    """Drive a call: wait, send each of its attempts, and return its result."""
    try:
        attempt = next(steps)
        while True:
            if attempt.wait_s > 0:
                sleep(attempt.wait_s)
            attempt = steps.send(send(attempt))
    except StopIteration as done:
        return done.value


async def run_async(
    steps: Steps[T], send: Callable[[Attempt], Awaitable[Outcome]], sleep: Callable[[float], Awaitable[None]]
) -> T:
    """Drive a call in asyncio, as `run` does."""
    try:
        attempt = next(steps)
        while True:
            if attempt.wait_s > 0:
                await sleep(attempt.wait_s)
            attempt = steps.send(await send(attempt))
    except StopIteration as done:
        return done.value

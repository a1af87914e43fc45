"""One call without a network: when it is sent again, after how long, and which error an answer becomes."""

import inspect
from typing import Any

import pytest

from penstock.client.retry import (
    MAX_BACKOFF_S,
    Answer,
    Call,
    ClientConfig,
    NoAnswer,
    Outcome,
    error_of,
    exchange,
    pause_s,
)
from penstock.core import errors
from penstock.core.errors import (
    ClientError,
    ComputeFailed,
    Overloaded,
    RequestError,
    TimedOut,
    Unreachable,
    WrongMethod,
)
from tests.support.clock import Clock

URL = "http://server:8000"
CONFIG = ClientConfig(url=URL)
OK = Answer(200, {}, b"{}")
FULL = Answer(503, {"retry-after": "2"}, b'{"error": "full"}')
REFUSED = NoAnswer("Connection refused")


def driven(
    outcomes: list[Outcome], config: ClientConfig = CONFIG, *, share: float = 0.5, attempt_s: float = 0.0
) -> tuple[Answer, list[float], list[float]]:
    """The answer of a call whose attempts end so, each after `attempt_s`; the waits and timeouts of its attempts."""
    clock, remaining, timeouts = Clock(), iter(outcomes), list[float]()
    deadline_s = clock() + config.timeout_s
    steps = exchange(Call(method="GET", path="/"), config, deadline_s=deadline_s, clock_s=clock, random=lambda: share)
    outcome: Any = None
    try:
        while True:
            attempt = steps.send(outcome)
            clock.sleep(attempt.wait_s)
            timeouts.append(attempt.timeout_s)
            assert clock() + attempt.timeout_s == pytest.approx(deadline_s)
            clock.now_s += attempt_s
            outcome = next(remaining)
    except StopIteration as done:
        assert not list(remaining), "attempts that were not made"
        return done.value, clock.waits, timeouts


def test_an_answer_needs_one_attempt() -> None:
    assert driven([OK]) == (OK, [0.0], [30.0])


def test_retry_after_is_honoured_and_spread() -> None:
    assert driven([FULL, OK], share=0.0)[1] == [0.0, 2.0]
    assert driven([FULL, OK], share=1.0)[1] == [0.0, pytest.approx(2.6)]
    assert driven([Answer(503, {"retry-after": "0"}, b""), OK], share=1.0)[1] == [0.0, pytest.approx(0.1)]


@pytest.mark.parametrize("text", ["", "soon", "-1", "Wed, 21 Oct 2026 07:28:00 GMT", "²"])
def test_a_retry_after_without_seconds_means_a_back_off(text: str) -> None:
    assert driven([Answer(503, {"retry-after": text}, b""), OK])[1] == [0.0, pytest.approx(0.05)]


def test_the_back_off_doubles_up_to_its_limit_with_full_jitter() -> None:
    outcomes: list[Outcome] = [REFUSED] * 9
    config = ClientConfig(url=URL, retries=9, timeout_s=1000)
    assert driven([*outcomes, OK], config, share=1.0)[1][1:] == pytest.approx(
        [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, MAX_BACKOFF_S, MAX_BACKOFF_S]
    )
    assert driven([*outcomes, OK], config, share=0.0)[1] == [0.0] * 10


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("retry_after", ["30", "31", "9" * 400])
def test_it_never_sleeps_past_the_timeout(retry_after: str, share: float) -> None:
    full = Answer(503, {"retry-after": retry_after}, b'{"error": "full"}')
    with pytest.raises(Overloaded) as refusal:
        driven([full], share=share)
    assert refusal.value.retry_after_s == float(retry_after)


def test_the_timeout_counts_attempts_and_waits() -> None:
    config = ClientConfig(url=URL, timeout_s=10)
    assert driven([FULL, FULL, OK], config, share=0.0, attempt_s=1.0)[2] == [10.0, 7.0, 4.0]
    with pytest.raises(Overloaded, match="full"):
        driven([FULL, FULL], config, share=0.0, attempt_s=3.0)


def test_retries_are_counted() -> None:
    with pytest.raises(Unreachable, match=r"http://server:8000 .*Connection refused"):
        driven([REFUSED] * 4)
    with pytest.raises(Unreachable):
        driven([REFUSED], ClientConfig(url=URL, retries=0))


def test_time_that_ran_out_is_not_tried_again() -> None:
    with pytest.raises(TimedOut, match="within 30 s"):
        driven([NoAnswer("read timed out", timed_out=True)])


def test_a_failed_computation_is_tried_twice_never_three_times() -> None:
    failed = Answer(500, {}, b'{"error": "thirteen"}')
    assert driven([failed, OK])[0] == OK
    with pytest.raises(ComputeFailed, match="thirteen"):
        driven([failed, failed])


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 501, 504, 301])
def test_what_would_be_refused_again_is_not_sent_again(status: int) -> None:
    assert pause_s(Answer(status, {"retry-after": "1"}, b""), 0, False, lambda: 0.5) is None
    with pytest.raises(RequestError) as refusal:
        driven([Answer(status, {}, b"")])
    assert refusal.value.status == status
    assert str(status) in str(refusal.value)


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if inspect.isclass(kind)])
def test_every_refusal_of_the_server_is_the_same_error_at_the_client(kind: type[Exception]) -> None:
    if issubclass(kind, RequestError) and kind is not RequestError:
        error = error_of(Answer(kind.status, {"allow": "POST"}, b'{"error": "a sentence"}'), CONFIG)
        assert issubclass(kind, type(error))
        assert (str(error), getattr(error, "status", None)) == ("a sentence", kind.status)
        if isinstance(error, WrongMethod):
            assert error.allowed == "POST"


def test_a_proxy_that_says_nothing_is_quoted() -> None:
    said = str(error_of(Answer(502, {}, b"<html>"), CONFIG))
    assert said == "http://server:8000 answered 502 Bad Gateway and did not say why."
    assert "did not say why" in str(error_of(Answer(599, {}, b'["error"]'), CONFIG))
    assert error_of(Answer(400, {}, b'{"error": 3}'), CONFIG).args[0].startswith(URL)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"url": "localhost:8000"}, "'localhost:8000'; write it like"),
        ({"url": "http://"}, "write it like"),
        ({"url": "http://server:port"}, "'http://server:port'; write it like"),
        ({"url": "http://server:80000"}, "write it like"),
        ({"url": "http://[::1"}, "write it like"),
        ({"api_key": "two\nlines"}, "printable ASCII"),
        ({"api_key": ""}, "not empty"),
        ({"latency_ms": 0}, "latency_ms is 0"),
        ({"latency_ms": float("nan")}, "latency_ms is nan"),
        ({"latency_ms": "50"}, "latency_ms is '50'; it must be a number of milliseconds"),
        ({"priority": "urgent"}, "'urgent'; it must be one of interactive, background"),
        ({"retries": -1}, "retries is -1"),
        ({"retries": 1.5}, "retries is 1.5; it must be a whole number"),
        ({"retries": float("inf")}, "retries is inf; it must be a whole number"),
        ({"retries": None}, "retries is None; it must be a whole number, 0 or more"),
        ({"timeout_s": None}, "timeout_s is None; it must be a number of seconds"),
        ({"timeout_s": float("inf")}, "timeout_s is inf"),
    ],
)
def test_wrong_terms_say_what_and_the_fix(wrong: dict[str, Any], said: str) -> None:
    wanted: dict[str, Any] = {"url": URL} | wrong
    with pytest.raises(ClientError, match=said) as error:
        ClientConfig(**wanted)
    assert "two" not in str(error.value), "a key is never shown"

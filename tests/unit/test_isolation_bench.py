"""The corpus, the attacker's rate, the clients beside it, and what they saw."""

import selectors
import socket
import time
from threading import Event, Thread
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from penstock.bench.isolation import attacker
from penstock.bench.isolation.attacker import BURST_BYTES, Attack, RateLimit, attack
from penstock.bench.isolation.carried_rate import CARRIED_P99_MS, carried
from penstock.bench.isolation.expensive_inputs import ExpensiveInput, expensive_inputs, frame, post
from penstock.bench.isolation.isolation_run import (
    Between,
    IsolationSettings,
    chosen_inputs,
    compared,
    placement,
    summed,
)
from penstock.bench.isolation.well_behaved import Observed, WellBehaved, well_behaved
from penstock.bench.load.sender import Target
from penstock.core.errors import BenchError
from tests.support.clock import Clock

FAMILIES = {"head", "json", "gzip", "multipart", "chunked", "infer", "raw", "websocket", "picture", "found"}


@pytest.mark.thorough
def test_there_are_at_least_50_inputs_of_every_family() -> None:
    inputs = expensive_inputs()
    assert len({each.name for each in inputs}) == len(inputs) >= 50
    assert {each.name.partition("/")[0] for each in inputs} == FAMILIES
    assert all(each.first or each.again for each in inputs)
    assert expensive_inputs() == inputs


def test_a_rate_limit_lets_no_more_pass_than_the_rate_and_one_burst() -> None:
    limit, taken = RateLimit(1_000, 50, 0.0), 0
    for step in range(1_000):
        taken += limit.take(1_000, step / 1_000)
        assert taken <= 50 + step
    assert taken >= 990


def test_a_rate_limit_saves_up_one_burst() -> None:
    limit = RateLimit(1_000, 50, 0.0)
    assert limit.take(1_000, 100.0) == 50
    assert limit.take(1_000, 100.0) == 0
    limit.give_back(7)
    assert limit.take(1_000, 100.0) == 7


def test_the_attacker_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    received = 0
    # Time that does not pass while the machine is busy with others.
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(attacker, "time", SimpleNamespace(monotonic=clock, sleep=sleep))

    def take_all(listener: socket.socket) -> None:
        nonlocal received
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(1 << 20):
                received += len(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        taking = Thread(target=take_all, args=(listener,))
        taking.start()
        now_s = clock()
        flood = ExpensiveInput(name="flood", first=b"", again=bytes(1 << 20))
        sent = attack("127.0.0.1", listener.getsockname()[1], Attack(input=flood, begin_s=now_s, end_s=now_s + 0.4))
        taking.join()
    assert 0 < received <= sent <= BURST_BYTES + 400_000 * 1.1


def test_frames_and_requests_are_whole() -> None:
    assert frame(b"ab", 1) == b"\x81\x82\0\0\0\0ab"
    assert frame(bytes(300), 0, final=False)[:4] == b"\x00\xfe\x01\x2c"
    assert post("/x", b"12").endswith(b"Content-Length: 2\r\n\r\n12")


def observed(latency_s: list[float], late_s: float = 0.0) -> Observed:
    count = len(latency_s)
    return Observed(
        due_s=np.arange(count) / 1000, latency_s=np.array(latency_s), late_s=np.full(count, late_s), busy=0.1
    )


def test_a_request_without_an_answer_is_refused_and_slower_than_any() -> None:
    seen = summed("x", [observed([0.002] * 970 + [np.inf] * 30, 0.001)], attacker_bytes=5, settled_s=0.2)
    assert (seen.requests, seen.refused, seen.p99_ms) == (1000, 30, np.inf)
    assert (seen.late_p99_ms, seen.attacker_bytes, seen.settled_s) == (pytest.approx(1.0), 5, 0.2)
    quiet = summed("quiet", [observed([0.002] * 300), observed([0.004] * 300)])
    assert (quiet.requests, quiet.refused, quiet.p99_ms) == (600, 0, pytest.approx(4.0))
    with pytest.raises(BenchError, match="only 10 requests"):
        summed("x", [observed([0.002] * 10)])


def test_what_is_compared_again_is_all_times_with_all_times_around_them() -> None:
    def between(around_ms: float, beside_ms: float, gone: int = 0) -> Between:
        around = observed([around_ms / 1e3] * 500)
        return Between(around, observed([beside_ms / 1e3] * 495 + [np.inf] * gone), around, 10, 0.1)

    before = summed("x", [observed([0.050] * 500 + [np.inf])], attacker_bytes=5, settled_s=0.2)
    # During the third the server did not carry the rate without an attacker either.
    seen = compared(before, [between(2, 3), between(4, 5), between(30, 90, gone=1)])
    assert (seen.name, seen.p99_ms, seen.quiet_p99_ms) == ("x", pytest.approx(5.0), pytest.approx(4.0))
    assert seen.ratio == pytest.approx(1.25)
    assert (seen.refused, seen.requests, seen.attacker_bytes, seen.settled_s) == (2, 501 + 3 * 495 + 1, 35, 0.2)
    # Where the rate was never carried, those times are all there is.
    assert compared(before, [between(30, 90)] * 2).ratio == pytest.approx(3.0)


def test_the_server_and_the_clients_have_their_own_cores() -> None:
    def placed(cores: list[int], **given: frozenset[int]) -> tuple[frozenset[int] | None, frozenset[int] | None]:
        return placement(IsolationSettings(**given), cores)  # pyright: ignore[reportArgumentType]

    assert placed([0, 1]) == ({0}, {1})
    assert placed([0, 1, 2, 3, 4]) == ({0, 1}, {2, 3, 4})
    assert placed([0, 1, 2], client_cpus=frozenset({2})) == ({0, 1}, {2})
    assert placed([0, 1, 2], server_cpus=frozenset({1})) == ({1}, {0, 2})
    assert placed([0]) == (None, None)
    assert placed([0, 1], server_cpus=frozenset({0, 1})) == ({0, 1}, None)


class Carrying:
    """A server that carries a rate, and whose latency is long beyond it."""

    def __init__(self, rate: float, late_every: int = 0) -> None:
        self.rate, self.late_every, self.count = rate, late_every, 0

    def send(self, rate: float, seconds: float) -> Observed:
        self.count += 1
        if self.late_every and self.count % self.late_every:
            return observed([0.5] * 1000, late_s=0.4)
        assert rate * seconds >= 500
        return observed([0.002 if rate <= self.rate else 0.5] * 1000)


@pytest.mark.parametrize("late_every", [0, 4])
def test_what_a_server_carries_is_the_highest_rate_with_a_short_p99(late_every: int) -> None:
    said: list[str] = []
    found = carried(cast(WellBehaved, Carrying(7_000, late_every)), 16_000, said.append)
    assert 0.96 * 7_000 <= found <= 7_000
    assert said == [f"The server carries {found:,.0f} requests/s with a p99 within {CARRIED_P99_MS:g} ms."]


def test_a_server_that_carries_nothing_is_an_error() -> None:
    with pytest.raises(BenchError, match="not even"):
        carried(cast(WellBehaved, Carrying(0)), 16_000, print)


def test_clients_that_stay_send_one_load_after_another() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"
    refusal = b"HTTP/1.1 503 X\r\nContent-Length: 1\r\n\r\nx"
    refused_every = 10
    over = Event()

    def serve(listener: socket.socket) -> None:
        count = 0
        with selectors.DefaultSelector() as polled:
            polled.register(listener, selectors.EVENT_READ)
            while not over.is_set():
                for key, _ in polled.select(0.05):
                    if key.fileobj is listener:
                        polled.register(listener.accept()[0], selectors.EVENT_READ)
                        continue
                    client = cast(socket.socket, key.fileobj)
                    if client.recv(1 << 16):
                        count += 1
                        client.sendall(answer if count % refused_every else refusal)
                    else:
                        polled.unregister(client)
                        client.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = Thread(target=serve, args=(listener,))
        serving.start()
        target = Target(
            host="127.0.0.1",
            port=listener.getsockname()[1],
            requests=(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",),
            answers=None,
            tolerance=0.0,
        )
        with well_behaved(target, 4, None, 0) as clients:
            for rate in (500, 1000):
                seen = clients.send(rate, 0.3)
                assert len(seen.due_s) == pytest.approx(rate * 0.3, rel=0.5)
                assert seen.refused == pytest.approx(len(seen.due_s) / refused_every, abs=1)
                assert np.isfinite(seen.latency_s).sum() == len(seen.due_s) - seen.refused
                assert (seen.late_s >= 0).all()
        over.set()
        serving.join()


@pytest.mark.thorough
def test_inputs_are_chosen_by_the_beginning_of_their_names() -> None:
    chosen = chosen_inputs(IsolationSettings(only=("json/deep",)))
    assert {each.name for each in chosen} == {"json/deep", "json/deep-unclosed"}
    assert chosen_inputs(IsolationSettings(seed=1)) == chosen_inputs(IsolationSettings(seed=1))
    with pytest.raises(BenchError, match="no input 'jsn'"):
        chosen_inputs(IsolationSettings(only=("jsn",)))

"""The corpus, the attacker's rate, the division of the time, and what the others saw."""

import socket
import time
from itertools import pairwise
from threading import Thread

import numpy as np
import pytest

from penstock.bench.isolation.attacker import BURST_BYTES, Attack, RateLimit, attack
from penstock.bench.isolation.expensive_inputs import ExpensiveInput, expensive_inputs, frame, post
from penstock.bench.isolation.isolation_run import IsolationSettings, beside, chosen_inputs, windows
from penstock.core.errors import BenchError

FAMILIES = {"head", "json", "gzip", "multipart", "chunked", "infer", "raw", "websocket", "picture", "found"}


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


def test_the_attacker_keeps_its_rate() -> None:
    received = 0

    def take_all(listener: socket.socket) -> None:
        nonlocal received
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(1 << 20):
                received += len(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        taking = Thread(target=take_all, args=(listener,))
        taking.start()
        now_s = time.monotonic()
        flood = ExpensiveInput(name="flood", first=b"", again=bytes(1 << 20))
        (sent,) = attack(
            "127.0.0.1", listener.getsockname()[1], [Attack(input=flood, begin_s=now_s, end_s=now_s + 0.4)]
        )
        taking.join()
    assert 0 < received <= sent <= BURST_BYTES + 400_000 * 1.1


def test_frames_and_requests_are_whole() -> None:
    assert frame(b"ab", 1) == b"\x81\x82\0\0\0\0ab"
    assert frame(bytes(300), 0, final=False)[:4] == b"\x00\xfe\x01\x2c"
    assert post("/x", b"12").endswith(b"Content-Length: 2\r\n\r\n12")


def test_the_time_is_divided() -> None:
    quiet_end_s, times = windows(50.0, 40, 100.0)
    assert quiet_end_s == 106.0
    assert times[0][0] > quiet_end_s
    assert times[-1][1] == pytest.approx(150.0)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(times))
    with pytest.raises(BenchError, match="too short for 400 inputs"):
        windows(10.0, 400, 0.0)


def test_a_request_without_an_answer_is_refused_and_slower_than_any() -> None:
    due_s, latency_s = np.arange(100.0), np.full(100, 0.002)
    latency_s[50:53] = np.inf
    seen = beside("x", due_s, latency_s, 0.0, 100.0)
    assert (seen.requests, seen.refused, seen.p99_ms) == (100, 3, np.inf)
    quiet = beside("quiet", due_s, latency_s, 0.0, 50.0)
    assert (quiet.refused, quiet.p99_ms) == (0, pytest.approx(2.0))
    with pytest.raises(BenchError, match="only 10 requests"):
        beside("x", due_s, latency_s, 0.0, 10.0)


def test_inputs_are_chosen_by_the_beginning_of_their_names() -> None:
    chosen = chosen_inputs(IsolationSettings(only=("json/deep",)))
    assert {each.name for each in chosen} == {"json/deep", "json/deep-unclosed"}
    assert chosen_inputs(IsolationSettings(seed=1)) == chosen_inputs(IsolationSettings(seed=1))
    with pytest.raises(BenchError, match="no input 'jsn'"):
        chosen_inputs(IsolationSettings(only=("jsn",)))

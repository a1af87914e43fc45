"""The short way of requests compared with the complete one: two servers get the same bytes, and one has no lanes.

The server without lanes is interpreted, so that the compiled modules are compared with their sources.
"""

import json
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.serve.compiled import VARIABLE
from tests.fuzz.exchange import Answer, answers_in
from tests.fuzz.requests import JSON, RAW, request
from tests.support.processes import eventually
from tests.support.serving import RunningServer, write_doubler

APP, INFER = "/v1/apps/doubler", "/v2/models/doubler/infer"
Floats = npt.NDArray[np.float32]
Pair = tuple[RunningServer, RunningServer]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    bundle = write_doubler(tmp_path_factory.mktemp("doubler"))
    with ExitStack() as servers:
        short = servers.enter_context(RunningServer(bundle))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(VARIABLE, "1")
            # The log needs to see each request, so that there are no lanes.
            complete = servers.enter_context(RunningServer(bundle, "--log-requests"))
        log = complete.process.stderr
        assert log is not None
        # A full pipe would hold the server up.
        reader = threading.Thread(target=lambda: [None for _ in log], daemon=True)
        reader.start()
        yield short, complete
        complete.process.kill()
        reader.join()


def one_of(chance: random.Random) -> bytes:
    """A request, right or wrong, of one of a few heads."""
    numbers = np.array([chance.choice((0, 1, 3.5, 1e30, 17, 999)) for _ in range(4)], np.float32)
    lines = [f"Content-Type: {chance.choice((RAW, JSON))}"]
    accept = chance.choice(("", RAW, JSON))
    lines += [f"Accept: {accept}"] * bool(accept)
    lines += ["Accept-Encoding: gzip"] * (chance.random() < 0.2)
    lines += [f"Penstock-Latency-Ms: {chance.choice((4000, 4000, 0.0001))}"] * (chance.random() < 0.1)
    lines += [f"Penstock-Priority: {chance.choice(('background', 'normal'))}"] * (chance.random() < 0.1)
    bodies = (
        numbers.tobytes(),
        json.dumps(numbers.tolist()).encode(),
        json.dumps([numbers.tolist()] * 2).encode(),
        json.dumps({"inputs": [numbers.tolist()]}).encode(),
        numbers.tobytes()[:-1],
        b"[1, 2, 3, 4",
        b"[NaN, 1, 2, 3]",
        np.full(4, np.nan, np.float32).tobytes(),
        b"",
    )
    if chance.random() < 0.5:
        return infer_request(chance, numbers, lines)
    path = chance.choice((APP,) * 8 + ("/v1/apps/nobody", f"{APP}/stream"))
    return request("POST", path, chance.choice(bodies), *lines)


def infer_request(chance: random.Random, numbers: Floats, lines: list[str]) -> bytes:
    """A request of the Open Inference Protocol, right or wrong, with or without binary tensors."""
    batched = chance.random() < 0.5
    shape = chance.choice(([1, 4] if batched else [4],) * 4 + ([2, 4], [4, 1], [0]))
    tensor: dict[str, object] = {"name": chance.choice(("input",) * 6 + ("x",)), "datatype": "FP32", "shape": shape}
    head: dict[str, object] = {"inputs": [tensor]}
    if chance.random() < 0.3:
        head["id"] = chance.choice(("a", "b", "\N{SNOWMAN}", 7))
    wanted = chance.choice((None, None, {}, {"binary_data": True}, {"binary_data": False}, {"classification": 2}))
    if wanted is not None:
        head["outputs"] = [{"name": "output", "parameters": wanted}]
    parameters = chance.choice(
        ({},) * 6
        + ({"timeout": 4_000_000}, {"priority": 2}, {"priority": 1}, {"sequence_id": 3}, {"binary_data_output": True})
    )
    if parameters:
        head["parameters"] = parameters
    raw = chance.choice(
        (numbers.tobytes(),) * 6 + (numbers.tobytes()[:-1], np.full(4, np.nan, np.float32).tobytes(), b"")
    )
    form = chance.randrange(4)
    if form < 2:
        tensor["parameters"] = {"binary_data_size": len(raw)}
    else:
        tensor["data"] = chance.choice((numbers.tolist(), [numbers.tolist()], [1, 2, 3]))
    start = json.dumps(head, ensure_ascii=False).encode()
    if form == 3:
        return request("POST", INFER, start, *lines)
    body = start + raw if form < 2 else start
    return request("POST", INFER, body, *lines, f"Inference-Header-Content-Length: {len(start)}")


def exchanged(server: RunningServer, pieces: list[bytes], count: int) -> bytes:
    """Send pieces one after another, and receive until there are as many answers or the connection ends."""
    received = b""
    with socket.create_connection((server.host, server.port), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            if len(pieces) > 1 and received.count(b"HTTP/1.1 ") < count:
                connection.settimeout(0.002)
                with suppress(TimeoutError):
                    received += connection.recv(1 << 16)
                connection.settimeout(20)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            received += part
    return received


def assert_same(servers: Pair, pieces: list[bytes], count: int) -> None:
    found = [[undated(answer) for answer in answers_in(exchanged(server, pieces, count))] for server in servers]
    assert found[0] == found[1], pieces
    assert found[0]


def undated(answer: Answer) -> Answer:
    """Check the date of an answer, and return the rest: a second may begin between two servers."""
    headers = dict(answer.headers)
    date = parsedate_to_datetime(headers.pop("date"))
    assert abs(datetime.now(UTC) - date) < timedelta(seconds=5), date
    return replace(answer, headers=headers)


def learned(servers: Pair, data: bytes) -> None:
    """Let a head be known, and its lane be made."""
    for _ in range(3):
        for server in servers:
            exchanged(server, [data], 1)


@pytest.mark.parametrize("seed", range(4))
def test_both_ways_give_the_same_answers(servers: Pair, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        data = one_of(chance)
        learned(servers, data)
        same_head = data.partition(b"\r\n\r\n")[0]
        # The same head with other bodies of its length, and others' requests between them.
        requests = [data]
        for _ in range(chance.randint(0, 3)):
            # No byte that could make a number negative, which would take the network as many seconds.
            body = bytes(chance.randrange(128) for _ in range(len(data) - len(same_head) - 4))
            requests.append(chance.choice((data, same_head + b"\r\n\r\n" + body, one_of(chance))))
        way = chance.randrange(3)
        if way == 0:
            pieces = requests
        elif way == 1:
            pieces = [b"".join(requests)]
        else:
            whole = b"".join(requests)
            places = sorted({0, len(whole), *(chance.randrange(len(whole)) for _ in range(4))})
            pieces = [whole[begin:end] for begin, end in pairwise(places)]
        assert_same(servers, pieces, len(requests))


def test_counts_of_both_ways_are_the_same(servers: Pair) -> None:
    good = request("POST", APP, np.ones(4, np.float32).tobytes(), f"Content-Type: {RAW}", f"Accept: {RAW}")
    broken = request("POST", APP, np.full(4, 17, np.float32).tobytes(), f"Content-Type: {RAW}", f"Accept: {RAW}")
    counted: list[dict[str, int]] = []
    for server in servers:
        before = server.ask("GET", "/v1/stats")[2]
        for _ in range(20):
            for data in (good, broken):
                exchanged(server, [data, data], 2)
        after = server.ask("GET", "/v1/stats")[2]
        names = [name for name, value in after.items() if isinstance(value, int) and not isinstance(value, bool)]
        counted.append({name: after[name] - before[name] for name in names})
        assert after["slots"]["in_use"] == 0
    for name in ("answered", "invalid", "failed", "refused"):
        assert counted[0].get(name) == counted[1].get(name), name
    assert counted[0]["answered"] == 40


def test_clients_that_leave_free_their_slots(servers: Pair) -> None:
    server = servers[0]
    slow = np.full(4, -0.3, np.float32).tobytes()
    data = request("POST", APP, slow, f"Content-Type: {RAW}", f"Accept: {RAW}")
    learned(servers, request("POST", APP, np.ones(4, np.float32).tobytes(), f"Content-Type: {RAW}", f"Accept: {RAW}"))
    for _ in range(5):
        with socket.create_connection((server.host, server.port), timeout=20) as connection:
            connection.sendall(data)
    assert server.ask("POST", APP, np.ones(4, np.float32).tobytes(), {"Content-Type": RAW})[0] == 200
    eventually(lambda: server.ask("GET", "/v1/stats")[2]["slots"]["in_use"] == 0, within_s=20)


def test_a_lane_ends_with_what_it_led_to(servers: Pair, tmp_path: Path) -> None:
    """A model that is loaded anew, or an engine that was replaced, is not served by what was known before."""
    bundle = write_doubler(tmp_path)
    models = tmp_path / "models"
    models.mkdir()
    bundle.rename(models / "doubler")
    data = request("POST", APP, np.ones(4, np.float32).tobytes(), f"Content-Type: {RAW}", f"Accept: {RAW}")
    with RunningServer(None, "--models", str(models)) as server:
        for _ in range(3):
            assert exchanged(server, [data, data, data], 3).count(b"HTTP/1.1 200 ") == 3
        with socket.create_connection((server.host, server.port), timeout=20) as kept:
            kept.sendall(data)
            assert b" 200 " in kept.recv(4096)
            assert server.ask("POST", "/v2/repository/models/doubler/unload")[0] == 200
            kept.sendall(data)
            assert b" 404 " in kept.recv(4096)
            assert server.ask("POST", "/v2/repository/models/doubler/load")[0] == 200
            kept.sendall(data)
            assert b" 200 " in kept.recv(4096)


def test_a_server_says_at_its_start_that_it_is_interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with RunningServer(write_doubler(tmp_path)) as server:
        assert server.ask("GET", "/v2/health/ready")[0] == 200
        server.process.terminate()
        assert server.process.stdout is not None
        said = server.process.stdout.read()
    assert "Note: the request path is interpreted, as PENSTOCK_INTERPRETED says" in said

"""A running server under each kind of hostile client once; `tests.fuzz.http` goes on for any time."""

import asyncio
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.core.machine.process_stat import cpu_seconds
from tests.fuzz import process
from tests.fuzz.http import SLOW_KINDS, Fuzzer
from tests.fuzz.requests import request
from tests.support import serving
from tests.support.serving import RunningServer

DESCRIPTORS = 60


def test_no_kind_of_client_gets_what_is_wrong_or_disturbs_a_neighbour(server: RunningServer) -> None:
    fuzzer = Fuzzer(server.host, server.port, seed=1)
    for name in (kind for kind in fuzzer.kinds if kind not in SLOW_KINDS):
        asyncio.run(fuzzer.run(name))
        assert fuzzer.rows[name].failures == []


def test_a_client_that_asks_ahead_for_thousands_of_answers_is_not_answered_in_one_go(server: RunningServer) -> None:
    with socket.create_connection((server.host, server.port)) as greedy:
        greedy.setblocking(False)
        ahead = request("GET", "/metrics") * 10_000
        greedy.send(ahead)
        start_s = time.monotonic()
        assert server.ask("GET", "/v2/health/live")[0] == 200
        # All of the answers take several times as long.
        assert time.monotonic() - start_s < 1.5


@pytest.mark.thorough
def test_without_descriptors_the_server_waits_for_them_and_not_in_a_loop(bundle: Path) -> None:
    with RunningServer(bundle) as server:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        pid = process.listening_on(server.port)
        assert pid is not None
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
        waiting = [socket.create_connection((server.host, server.port)) for _ in range(2 * DESCRIPTORS)]
        before_s = cpu_seconds(pid)
        time.sleep(1.5)
        assert cpu_seconds(pid) - before_s < 0.3
        for connection in waiting:
            connection.close()
        assert server.ask("GET", "/v2/health/live")[0] == 200


def test_idle_connections_make_room_below_the_hard_limit_of_descriptors(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = serving.serve_command
    limited = ("bash", "-c", f'ulimit -n {2 * DESCRIPTORS}; exec "$@"', "-")
    monkeypatch.setattr(serving, "serve_command", lambda *given: [*limited, *command(*given)])
    with RunningServer(bundle) as server, ExitStack() as waiting:
        for _ in range(4 * DESCRIPTORS):
            waiting.enter_context(socket.create_connection((server.host, server.port)))
        assert server.ask("GET", "/v2/health/ready")[0] == 200


def test_what_cannot_be_a_budget_holds_no_slot(server: RunningServer) -> None:
    body = (
        b'{"inputs":[{"name":"numbers","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}],"parameters":{"timeout":%d}}'
    )
    status, _, content = server.ask("POST", "/v2/models/bounded/infer", body % (2**64 - 1))
    assert (status, "timeout" in content["error"]) == (400, True)
    assert server.ask("GET", "/v1/stats")[2]["slots"]["in_use"] == 0

"""A supervisor, its engine and its front-ends: what clients notice when one of them dies, hangs or cannot start."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.process_usage import worker_pids
from penstock.core.machine.process_stat import cpu_seconds
from penstock.serve.control.child import BUDGETS_BLOCKED, STALLED_S
from penstock.serve.http.listener import SWEEP_S
from tests.support.processes import Crowd, eventually, exists, kill, owner, tables_of
from tests.support.serving import LATENCY_S, RunningServer, write_doubler

ASK = "/v1/apps/doubler"
RAW = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
ONE = np.array([1, 2, 3, 4], np.float32)
ROLES = {"engine", "front-end 0", "front-end 1"}
# What a restart may take besides what the engine must import, and a front-end must not.
RESTART_S = 2.0
HANGS_S = "3"
# The watchdog allows for batches that take a whole budget of the server.
SILENT_S = float(HANGS_S) + BUDGETS_BLOCKED * LATENCY_S


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Slow enough that there is always a request that waits.
    return write_doubler(tmp_path_factory.mktemp("doubler"), sleep_s=0.005)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(bundle, "--frontends", "2", "--watchdog-s", HANGS_S) as server:
        yield server


def import_s(module: str) -> float:
    """Seconds that a process takes to start and to import a module, here and now."""
    start_s = time.monotonic()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.monotonic() - start_s


def assert_back_in_time(took_s: float, module: str) -> None:
    """Within two seconds besides an import; where other work slows this machine down, it slows both down."""
    assert took_s < RESTART_S + max(import_s(module) for _ in range(2))


def at_once(took_s: float, back_s: float) -> bool:
    """Long before whoever was killed was back; a machine that other work slows down slows down both."""
    return took_s < max(0.5, back_s / 3)


def request(body: bytes) -> bytes:
    head = b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
    return head + b"Accept: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def is_free(port: int) -> bool:
    with socket.socket() as taking:
        taking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taking.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def ready(server: RunningServer) -> bool:
    return server.ask("GET", "/v2/health/ready")[0] == 200


def assert_counts_add_up(server: RunningServer) -> None:
    assert ready(server)
    stats = server.ask("GET", "/v1/stats")[2]
    assert stats["slots"]["in_use"] == 0
    assert 0 < stats["answered"] <= sum(stats["latency"]["counts"])


@pytest.mark.alone
def test_every_front_end_answers_rightly(server: RunningServer) -> None:
    assert worker_pids(server.process.pid).keys() == ROLES
    asked: set[str] = set()
    for number in range(200):
        with socket.create_connection((server.host, server.port), timeout=5) as connection:
            numbers = np.full(4, number + 20, np.float32)
            connection.sendall(request(numbers.tobytes()))
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert answer.endswith((numbers * 2).tobytes())
            asked.add(owner(server, connection.getsockname()[1]))
        if len(asked) == 2 and number > 20:
            break
    assert asked == {"front-end 0", "front-end 1"}


@pytest.mark.alone
def test_a_killed_engine_is_said_at_once_and_soon_replaced(server: RunningServer) -> None:
    with Crowd(server) as crowd:
        crowd.until_right(200)
        # Requests wait for it when it is killed.
        os.kill(worker_pids(server.process.pid)["engine"], signal.SIGSTOP)
        time.sleep(0.05)
        killed_s = kill(server, "engine")
        back_s = crowd.until_right(50, since_s=killed_s + 0.1, within_s=60)
    waited = [event for event in crowd.events if event.sent_s < killed_s < event.ended_s]
    assert any(event.outcome == "refused" for event in waited)
    assert all(at_once(event.ended_s - killed_s, back_s - killed_s) for event in waited)
    assert crowd.outcomes.keys() == {"right", "refused"}
    assert_counts_add_up(server)
    assert worker_pids(server.process.pid).keys() == ROLES
    assert_back_in_time(back_s - killed_s, "torch")


@pytest.mark.alone
def test_a_killed_front_end_takes_only_its_own_connections_along(server: RunningServer) -> None:
    with Crowd(server, clients=12) as crowd:
        crowd.until_right(200)
        ports = {event.port for event in crowd.events}
        owners = {port: owner(server, port) for port in ports}
        assert set(owners.values()) == {"front-end 0", "front-end 1"}
        engine = worker_pids(server.process.pid)["engine"]
        killed_s = kill(server, "front-end 0")

        def accepts() -> bool:
            with socket.create_connection((server.host, server.port), timeout=30) as connection:
                connection.sendall(request(ONE.tobytes()))
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
                return owner(server, connection.getsockname()[1]) == "front-end 0"

        eventually(accepts, within_s=30)
        back_s = time.monotonic()
        crowd.until_right(200, since_s=back_s)
    assert worker_pids(server.process.pid)["engine"] == engine
    closed = [event for event in crowd.events if event.outcome == "closed"]
    assert closed
    assert all(owners[event.port] == "front-end 0" for event in closed)
    assert all(at_once(event.ended_s - killed_s, back_s - killed_s) for event in closed)
    assert crowd.outcomes.keys() == {"right", "closed"}
    assert_counts_add_up(server)
    assert_back_in_time(back_s - killed_s, "penstock.serve.control.child_main")


@pytest.mark.alone
def test_whoever_connects_while_a_front_end_is_dead_waits_for_nobody(server: RunningServer) -> None:
    with Crowd(server, clients=6, reconnect=True) as crowd:
        crowd.until_right(50)
        dead = worker_pids(server.process.pid)["front-end 0"]
        # Killed again and again, it is started ever more slowly.
        for _ in range(3):
            kill(server, "front-end 0")
            eventually(lambda dead=dead: worker_pids(server.process.pid).get("front-end 0", dead) != dead, within_s=15)
            dead = worker_pids(server.process.pid)["front-end 0"]
        killed_s = kill(server, "front-end 0")
        crowd.until_right(200, since_s=killed_s + 0.1)
        eventually(lambda: "front-end 0" in worker_pids(server.process.pid), within_s=15)
        back_s = time.monotonic()
    # What was under way at a kill breaks; nobody else waits for the next front-end.
    assert crowd.outcomes.keys() <= {"right", "closed"}
    waited_s = max(event.ended_s - event.sent_s for event in crowd.events if event.outcome == "right")
    assert at_once(waited_s, back_s - killed_s)


def serves(server: RunningServer, role: str) -> bool:
    """Tell whether a front-end accepts a connection, and says on it that it is ready."""
    with suppress(OSError), socket.create_connection((server.host, server.port), timeout=5) as connection:
        connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n")
        return (
            connection.recv(4096).startswith(b"HTTP/1.1 200 OK") and owner(server, connection.getsockname()[1]) == role
        )
    return False


@pytest.mark.alone
def test_a_front_end_that_served_is_replaced_at_once_however_soon_it_is_killed(server: RunningServer) -> None:
    waited_s = 0.0
    for _ in range(5):
        eventually(lambda: serves(server, "front-end 0"), within_s=60)
        killed = worker_pids(server.process.pid)["front-end 0"]
        kill(server, "front-end 0")
        waited_s += eventually(
            lambda killed=killed: worker_pids(server.process.pid).get("front-end 0", killed) != killed, within_s=15
        )
    # With a pause before each restart after the first, of 0.4 s and then twice as long each time, it would be 6 s.
    assert waited_s < 3
    eventually(lambda: serves(server, "front-end 0"), within_s=60)
    assert server.ask("POST", ASK, ONE.tobytes(), RAW)[0] == 200
    assert_counts_add_up(server)


@pytest.mark.alone
def test_front_ends_that_are_killed_together_are_forked_anew(server: RunningServer) -> None:
    def forked() -> bool:
        before = worker_pids(server.process.pid)
        for role in ("front-end 0", "front-end 1"):
            with suppress(KeyError):
                os.kill(before[role], signal.SIGKILL)
        eventually(lambda: not exists(before["front-end 0"]) and not exists(before["front-end 1"]), within_s=5)
        eventually(lambda: worker_pids(server.process.pid).keys() == ROLES, within_s=15)
        return all(
            Path(f"/proc/{worker_pids(server.process.pid)[role]}/comm").read_text().strip() == role
            for role in ("front-end 0", "front-end 1")
        )

    # The first time, the process that forks may still import.
    eventually(forked, within_s=60)
    killed_s = time.monotonic()
    eventually(lambda: server.ask("POST", ASK, ONE.tobytes(), RAW)[0] == 200, within_s=15)
    assert time.monotonic() - killed_s < 5
    assert_counts_add_up(server)


@pytest.mark.alone
def test_whoever_connects_while_a_front_end_hangs_is_answered_by_another(server: RunningServer) -> None:
    eventually(lambda: worker_pids(server.process.pid).keys() == ROLES and ready(server), within_s=60)
    hanging = worker_pids(server.process.pid)["front-end 0"]
    os.kill(hanging, signal.SIGSTOP)
    connections: list[socket.socket] = []
    try:
        connections += [socket.create_connection((server.host, server.port), timeout=SILENT_S) for _ in range(12)]
        for connection in connections:
            connection.sendall(request(ONE.tobytes()))
        stopped_s = time.monotonic()
        for connection in connections:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        # Before the supervisor knows that it hangs.
        assert time.monotonic() - stopped_s < 1 < STALLED_S
    finally:
        os.kill(hanging, signal.SIGCONT)
        for connection in connections:
            connection.close()
    assert worker_pids(server.process.pid)["front-end 0"] == hanging
    assert_counts_add_up(server)


@pytest.mark.alone
def test_nobody_says_ready_before_everybody_answers(server: RunningServer) -> None:
    eventually(lambda: ready(server), within_s=60)
    kill(server, "front-end 1")
    kill(server, "engine")
    time.sleep(0.2)
    eventually(lambda: ready(server), within_s=60)
    for _ in range(20):
        assert server.ask("POST", ASK, ONE.tobytes(), RAW)[0] == 200
    assert_counts_add_up(server)


@pytest.mark.drill
@pytest.mark.alone
def test_an_engine_that_hangs_is_replaced(server: RunningServer) -> None:
    hanging = worker_pids(server.process.pid)["engine"]
    with Crowd(server) as crowd:
        crowd.until_right(100)
        os.kill(hanging, signal.SIGSTOP)
        stopped_s = time.monotonic()
        eventually(lambda: not exists(hanging), within_s=SILENT_S + 4)
        assert time.monotonic() - stopped_s > SILENT_S - 1
        crowd.until_right(50, since_s=time.monotonic(), within_s=60)
    assert "wrong" not in crowd.outcomes
    assert_counts_add_up(server)


@pytest.mark.thorough
@pytest.mark.alone
def test_requests_in_an_engine_that_hangs_are_answered_long_before_it_is_replaced(bundle: Path) -> None:
    with RunningServer(bundle, "--frontends", "1", "--latency-ms", "100", "--watchdog-s", "60") as server:
        engine = worker_pids(server.process.pid)["engine"]
        os.kill(engine, signal.SIGSTOP)
        try:
            sent_s = time.monotonic()
            status, _, said = server.ask("POST", ASK, ONE.tobytes(), RAW)
            waited_s = time.monotonic() - sent_s
            assert (status, said) == (503, {"error": "Deadline of 100 ms exceeded; come back later."})
            assert 2.0 < waited_s < 2.1 + 2 * SWEEP_S + 1
        finally:
            os.kill(engine, signal.SIGCONT)
        # It lets go of the row, and goes on.
        eventually(lambda: server.ask("POST", ASK, ONE.tobytes(), RAW)[0] == 200, within_s=20)
        assert worker_pids(server.process.pid)["engine"] == engine
        assert_counts_add_up(server)
        assert "requests long past their deadline: 1" in server.log()


@pytest.mark.drill
@pytest.mark.alone
def test_a_supervisor_that_was_stopped_itself_kills_nobody(server: RunningServer) -> None:
    before = worker_pids(server.process.pid)
    server.stop(signal.SIGSTOP)
    time.sleep(SILENT_S + 2)
    server.stop(signal.SIGCONT)
    time.sleep(2)
    assert worker_pids(server.process.pid) == before
    assert server.ask("POST", ASK, ONE.tobytes(), RAW)[0] == 200


@pytest.mark.drill
@pytest.mark.alone
def test_an_input_that_ends_the_engine_ends_it_alone(server: RunningServer) -> None:
    begun_s = cpu_seconds(server.process.pid)
    for _ in range(3):
        engine = worker_pids(server.process.pid)["engine"]
        status, headers, _ = server.ask("POST", ASK, np.full(4, 19, np.float32).tobytes(), RAW)
        assert (status, headers["retry-after"]) == (503, "3")
        eventually(lambda gone=engine: not exists(gone), within_s=5)
        # Until the supervisor sees that the engine is gone, the server still says that it is ready.
        eventually(lambda: ready(server) and server.ask("POST", ASK, ONE.tobytes(), RAW)[0] == 200, within_s=60)
    assert cpu_seconds(server.process.pid) - begun_s < 1.0


@pytest.mark.thorough
def test_nothing_is_left_of_a_server_whose_supervisor_is_killed(bundle: Path) -> None:
    with RunningServer(bundle, "--frontends", "2") as server, Crowd(server) as crowd:
        crowd.until_right(50)
        processes = list(worker_pids(server.process.pid).values())
        assert all(tables_of([process]) for process in processes)
        processes += [
            int(pid)
            for pid in Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        ]
        server.process.kill()
        # The fork server ends when it has imported what it is importing.
        eventually(lambda: not any(map(exists, processes)), within_s=30)
        # A process has ended before its last thread has, which holds its files until then.
        eventually(lambda: tables_of(processes) == 0 and is_free(server.port), within_s=5)
    assert crowd.outcomes.keys() <= {"right", "closed"}


@pytest.mark.thorough
def test_no_accepted_request_is_lost_when_front_ends_drain_under_load(bundle: Path) -> None:
    with RunningServer(bundle, "--frontends", "2", "--verbose") as server:
        processes = list(worker_pids(server.process.pid).values())
        with Crowd(server, clients=12, pause_s=0.0) as crowd:
            crowd.until_right(500)
            server.stop()
            assert server.process.wait(10) == 0
        assert not any(map(exists, processes))
        assert crowd.outcomes.keys() <= {"right", "closed"}
        told = [int(line.split("drained; ")[1].split()[0]) for line in server.log().splitlines() if "drained; " in line]
        # Whatever the server read and answered has reached its client.
        assert (len(told), sum(told)) == (2, crowd.outcomes["right"])


@pytest.mark.slow
def test_a_second_signal_ends_every_process_at_once(bundle: Path) -> None:
    with RunningServer(bundle, "--frontends", "2", "--latency-ms", "60000", "--max-batch", "1") as server:
        processes = list(worker_pids(server.process.pid).values())
        connections = [socket.create_connection((server.host, server.port)) for _ in range(6)]
        for connection in connections:
            # Its network takes ten seconds.
            connection.sendall(request(np.full(4, -10, np.float32).tobytes()))
        eventually(lambda: server.ask("GET", "/v1/stats")[2]["slots"]["in_use"] == 6, within_s=10)
        server.stop()
        time.sleep(0.1)
        second_s = time.monotonic()
        server.stop(signal.SIGINT)
        assert server.process.wait(10) == 0
        assert time.monotonic() - second_s < 2
        assert not any(map(exists, processes))
        for connection in connections:
            connection.close()

"""The server from outside: what each route answers, connections, draining."""

import gzip
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import eventually
from tests.support.serving import RunningServer, write_doubler
from tests.support.thorough import thorough

ASK = "/v1/apps/doubler"
JSON = {"Content-Type": "application/json"}
RAW = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
ONE = np.array([1, 2, 3, 4], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(write_doubler(tmp_path_factory.mktemp("doubler"))) as server:
        yield server


def request(body: bytes, extra: bytes = b"") -> bytes:
    head = b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Type: application/octet-stream\r\n"
    return head + b"Accept: application/octet-stream\r\nContent-Length: %d\r\n%s\r\n" % (len(body), extra) + body


def test_json_raw_bytes_and_what_curl_sends(server: RunningServer) -> None:
    doubled = {"doubled": [2.0, 4.0, 6.0, 8.0]}
    assert server.ask("POST", ASK, b"[1, 2, 3, 4]", JSON)[2] == doubled
    assert server.ask("POST", ASK, ONE.tobytes(), {"Content-Type": "application/octet-stream"})[2] == doubled
    assert server.ask("POST", ASK, b"[1, 2, 3, 4]", {"Content-Type": "application/x-www-form-urlencoded"})[2] == doubled
    assert server.ask("POST", ASK, b"3", {"Content-Type": "text/x-number; charset=utf-8"})[2] == {"doubled": [6.0] * 4}
    status, headers, content = server.ask("POST", ASK, ONE.tobytes(), RAW)
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    assert np.frombuffer(content, np.float32).tolist() == [2, 4, 6, 8]


def test_compression_of_requests_and_answers(server: RunningServer) -> None:
    body, headers = gzip.compress(ONE.tobytes()), {**RAW, "Content-Encoding": "gzip"}
    assert np.frombuffer(server.ask("POST", ASK, body, headers)[2], np.float32).tolist() == [2, 4, 6, 8]
    status, headers, content = server.ask("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
    assert (status, headers["content-encoding"]) == (200, "gzip")
    assert b"penstock_latency_seconds_bucket" in gzip.decompress(content)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        thorough("HEAD", "/page/page.js", 200),
        thorough("GET", "/nothing", 404),
        thorough("DELETE", ASK, 405),
    ],
)
def test_a_response_has_the_date_of_its_second(server: RunningServer, method: str, path: str, status: int) -> None:
    for _ in range(2):
        asked_s = time.time()
        reply = server.raw(f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        assert reply.startswith(f"HTTP/1.1 {status} ".encode())
        (date,) = re.findall(rb"(?i)\r\nDate: ([^\r]*)", reply.partition(b"\r\n\r\n")[0])
        assert asked_s - 2.5 < seconds_of(date.decode()) <= time.time() + 0.01
        time.sleep(1.2)


def seconds_of(date: str) -> float:
    return parsedate_to_datetime(date).timestamp()


@pytest.mark.thorough
def test_an_answer_after_seconds_without_the_loop_has_the_date_of_its_second(tmp_path: Path) -> None:
    # A batch of a single process runs in the loop, whose timers wait for it.
    with RunningServer(write_doubler(tmp_path), "--frontends", "0") as server:
        asked_s = time.time()
        status, headers, _ = server.ask("POST", ASK, b"[-2.5, 2, 3, 4]", JSON)
        assert status == 200
        assert seconds_of(headers["date"]) > asked_s + 2.5 - 2
        continued_s: list[float] = []

        def go_on() -> None:
            continued_s.append(time.time())
            server.stop(signal.SIGCONT)

        server.stop(signal.SIGSTOP)
        threading.Timer(2.5, go_on).start()
        # The system accepts the connection meanwhile.
        status, headers, _ = server.ask("GET", "/v2/health/ready")
        assert status == 200
        assert seconds_of(headers["date"]) > continued_s[0] - 2


def test_what_the_server_says_of_itself(server: RunningServer) -> None:
    (app,) = server.ask("GET", "/v1/apps")[2]["apps"]
    assert (app["name"], app["latency_ms"], app["input"]["shape"]) == ("doubler", 5000.0, [4])
    stats = server.ask("GET", "/v1/stats")[2]
    assert stats["slots"]["total"] > 0
    assert len(stats["latency"]["upper_ms"]) == len(stats["latency"]["counts"])
    assert stats["latency"]["upper_ms"][-1] is None
    text = server.ask("GET", "/metrics")[2].decode()
    assert 'penstock_requests_total{app="doubler",outcome="answered"}' in text
    assert 'penstock_batch_rows_bucket{app="doubler",engine="0",le="+Inf"}' in text
    for name in ("queue", "compute", "latency"):
        assert f"penstock_{name}_seconds_sum" in text
    assert server.ask("GET", "/v2")[2]["name"] == "penstock"
    assert server.ask("GET", "/v2/health/live")[0] == server.ask("GET", "/v2/health/ready")[0] == 200


def test_the_page_asks_nobody_else(server: RunningServer) -> None:
    status, headers, content = server.ask("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'self'" in headers["content-security-policy"]
    assert b"http://" not in content.replace(b"http://www.w3.org", b"")
    assert server.ask("GET", "/page/../server.py")[0] == 404
    assert server.ask("GET", "/page/%2e%2e/server.py")[0] == 404
    status, _, content = server.ask("HEAD", "/")
    assert (status, content) == (200, b"")


def test_the_counts_add_up(server: RunningServer) -> None:
    before = server.ask("GET", "/v1/stats")[2]
    for _ in range(7):
        server.ask("POST", ASK, ONE.tobytes(), RAW)
    server.ask("POST", ASK, b"[]", JSON)
    after = server.ask("GET", "/v1/stats")[2]
    assert after["answered"] - before["answered"] == 7
    assert after["invalid"] - before["invalid"] == 1
    assert sum(after["latency"]["counts"]) - sum(before["latency"]["counts"]) == 7
    assert after["slots"]["in_use"] == 0


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    sent = b"".join(request(np.full(4, value, np.float32).tobytes()) for value in range(20, 60))
    answers = server.raw(sent).split(b"HTTP/1.1 200 OK")[1:]
    assert [np.frombuffer(answer.partition(b"\r\n\r\n")[2], np.float32)[0] for answer in answers] == [
        2.0 * value for value in range(20, 60)
    ]


def test_a_request_may_come_byte_by_byte(server: RunningServer) -> None:
    with socket.create_connection((server.host, server.port)) as connection:
        for byte in request(ONE.tobytes()):
            connection.sendall(bytes([byte]))
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")


def test_a_client_that_only_reads_on_after_half_closing_is_answered(server: RunningServer) -> None:
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(request(ONE.tobytes()))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        assert connection.recv(4096) == b""


def test_expect_continue_and_http_1_0(server: RunningServer) -> None:
    with socket.create_connection((server.host, server.port)) as connection:
        head, _, body = request(ONE.tobytes(), b"Expect: 100-continue\r\n").partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
    answer = server.raw(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
    assert b"200 OK" in answer
    assert b"Connection: close" in answer


def test_a_client_that_leaves_gives_its_slot_back(server: RunningServer) -> None:
    for _ in range(20):
        with socket.create_connection((server.host, server.port)) as connection:
            connection.sendall(request(ONE.tobytes()))
    eventually(lambda: in_use(server) == 0, within_s=5)


def test_a_budget_of_ones_own_and_overload(tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path, sleep_s=0.2), "--latency-ms", "3000", "--max-batch", "1") as server:
        clients = [socket.create_connection((server.host, server.port)) for _ in range(30)]
        for client in clients:
            client.sendall(request(ONE.tobytes()))
        answers = [client.recv(4096) for client in clients]
        for client in clients:
            client.close()
        statuses = [int(answer.split()[1]) for answer in answers]
        assert set(statuses) == {200, 503}
        assert statuses.count(200) >= 3
        refusals = [answer.decode() for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
        assert all(re.search(r"\r\nRetry-After: [1-9]", refusal) for refusal in refusals)
        # What was refused came at no cost to the next.
        assert server.ask("POST", ASK, ONE.tobytes(), RAW)[0] == 200
        assert server.ask("POST", ASK, ONE.tobytes(), {**RAW, "Penstock-Latency-Ms": "5"})[0] == 504


def slow(seconds: float) -> bytes:
    """A request that keeps the doubler's network busy for so long."""
    return request(np.full(4, -seconds, np.float32).tobytes())


def in_use(server: RunningServer) -> int:
    return server.ask("GET", "/v1/stats")[2]["slots"]["in_use"]


def test_sigterm_answers_what_was_accepted_and_leaves(tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path), "--latency-ms", "60000", "--max-batch", "1") as server:
        keep = [socket.create_connection((server.host, server.port)) for _ in range(13)]
        for connection in keep[:12]:
            connection.sendall(slow(0.3))
        # Looked at between two batches, when all of them have been read.
        eventually(lambda: in_use(server) >= 3, within_s=10)
        server.stop()
        answers = [connection.recv(4096) for connection in keep[:12]]
        assert all(answer.startswith(b"HTTP/1.1 200 OK") for answer in answers)
        # Some may have been answered before; which of them is the last follows from how they were read.
        assert any(b"Connection: close" in answer for answer in answers)
        assert all(connection.recv(4096) == b"" for connection in keep)
        for connection in keep:
            connection.close()
        assert server.process.wait(10) == 0


def test_readiness_turns_false_before_the_listener_closes(tmp_path: Path) -> None:
    bundle = write_doubler(tmp_path)
    # On a busy machine the listener may have closed before anybody asked; then there is nothing to see.
    assert any(turns_false_first(bundle) for _ in range(5))


def turns_false_first(bundle: Path) -> bool:
    """Check the readiness of a server that drains; False if its listener was closed when it was asked."""
    with RunningServer(bundle) as server:
        server.stop()
        try:
            # Nobody knows which of the first ones come before the signal.
            while (answer := server.ask("GET", "/v2/health/ready"))[0] == 200:
                pass
            live = server.ask("GET", "/v2/health/live")[0]
        except ConnectionError:
            return False
        status, _, content = answer
        assert (status, "shutting down" in content["error"]) == (503, True)
        assert live == 200
        assert server.process.wait(10) == 0
        with pytest.raises(ConnectionRefusedError):
            server.ask("GET", "/v2/health/live")
        return True


def was_closed_before(connection: socket.socket) -> bool:
    """Tell whether the server had closed a connection when the last request came: the kernel resets it then."""
    reset = select.poll()
    reset.register(connection, 0)
    return bool(reset.poll(5000))


def test_no_accepted_request_is_lost_when_it_drains_under_load(tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path), "--verbose") as server:
        lost: list[str] = []
        answered = 0
        stop = threading.Event()

        def client() -> None:
            nonlocal answered
            while not stop.is_set():
                try:
                    connection = socket.create_connection((server.host, server.port), timeout=5)
                except ConnectionError:
                    return
                with connection:
                    while True:
                        try:
                            connection.sendall(request(ONE.tobytes()))
                            answer = connection.recv(4096)
                        except ConnectionResetError:
                            break  # closed before the request was read; the server's count tells if that is not so
                        if not answer and was_closed_before(connection):
                            break
                        if not answer.startswith(b"HTTP/1.1 200 OK"):
                            lost.append(repr(answer[:60]))
                            break
                        answered += 1
                        if b"Connection: close" in answer:
                            break

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        eventually(lambda: answered > 200, within_s=30)
        server.stop()
        assert server.process.wait(10) == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert lost == []
        # Whatever the server read and answered has reached its client.
        assert f"drained; {answered} requests were answered in all" in server.log()


@pytest.mark.thorough
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path), "--latency-ms", "60000", "--max-batch", "1") as server:
        connections = [socket.create_connection((server.host, server.port)) for _ in range(20)]
        for connection in connections:
            connection.sendall(slow(1.0))
        eventually(lambda: in_use(server) > 10, within_s=10)
        start_s = time.monotonic()
        server.stop()
        time.sleep(0.1)
        server.stop(signal.SIGINT)
        assert server.process.wait(10) == 0
        # The batch that runs is not interrupted; ten more would take ten seconds.
        assert time.monotonic() - start_s < 8
        for connection in connections:
            connection.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--latency-ms", "0"], "--latency-ms is 0; it must be above 0"),
        thorough(["--max-batch", "0"], "--max-batch is 0; it must be at least 1"),
        thorough(["--frontends", "99"], "--frontends is 99; it must be from 0 to 64"),
        thorough(["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        thorough(["--latency-ms", "1"], "for one request on this machine, more than the latency budget of 1 ms"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_sentence(tmp_path: Path, options: list[str], sentence: str) -> None:
    bundle = write_doubler(tmp_path, sleep_s=0.01)
    command = [sys.executable, "-m", "penstock", "serve", str(bundle), "--port", "0", "--executor", "torch", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_said(server: RunningServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "serve", str(write_doubler(tmp_path)), "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "choose another --host or --port" in done.stderr) == (2, True)

"""A server that is about to end: not ready, and answering as before; then its streams end, and it drains."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection, connect

from tests.support.live import live_bundle
from tests.support.processes import eventually, kill
from tests.support.serving import RunningServer, serve_command, write_doubler

# Long enough for all that a test does meanwhile, on a busy machine.
LEAVE_S = 5.0
LEAVE = ("--leave-s", str(LEAVE_S))
NEVER = ("--leave-s", "3600")
CHUNK = b"\0" * 640
RESULT = '{"type":"result"'


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    live_bundle(folder)
    return folder / "bundle"


def agent_port(server: RunningServer) -> int:
    assert server.process.stdout is not None
    return int(server.process.stdout.readline().split()[-1])


def agent_line(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        return connection.recv(100)


def leave(server: RunningServer) -> float:
    """Send SIGTERM, and wait until the server is not ready; return when it was sent."""
    sent_s = time.monotonic()
    server.stop()
    eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 503, within_s=10)
    return sent_s


@pytest.mark.thorough
@pytest.mark.parametrize("frontends", ["0", "2"])
def test_it_is_not_ready_and_answers(doubler: Path, frontends: str) -> None:
    with RunningServer(doubler, "--agent-port", "0", "--frontends", frontends, *NEVER) as server:
        port = agent_port(server)
        assert agent_line(port) == b"ready up 100%\n"
        with socket.create_connection((server.host, server.port), timeout=10) as kept:
            leave(server)
            # Each front-end takes the message in its own time.
            for _ in range(20):
                eventually(lambda: agent_line(port) == b"drain\n", within_s=10)
            for _ in range(20):
                eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 503, within_s=10)
            said = server.ask("GET", "/v2/health/ready")[2]
            assert said["error"] == "The server is shutting down; retry elsewhere."
            assert server.ask("GET", "/v1/models/doubler")[2]["ready"] is False
            assert server.ask("GET", "/v2/health/live")[0] == 200
            # On a new connection, and on one of before, which stays open.
            assert server.ask("POST", "/v1/apps/doubler", b"[1, 2, 3, 4]")[0] == 200
            kept.sendall(b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n[1, 2, 3, 4]")
            answer = kept.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert b"Connection: close" not in answer
            # A second signal does not wait.
            server.stop()
            assert server.process.wait(30) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("frontends", ["0", "1"])
def test_it_ends_when_the_time_is_over(doubler: Path, frontends: str) -> None:
    with RunningServer(doubler, "--leave-s", "0.5", "--frontends", frontends) as server:
        sent_s = time.monotonic()
        server.stop()
        assert server.process.wait(30) == 0
        assert time.monotonic() - sent_s >= 0.5


@pytest.mark.slow
def test_a_front_end_that_dies_meanwhile_comes_back_and_is_not_ready(doubler: Path) -> None:
    with RunningServer(doubler, "--frontends", "1", *NEVER) as server:
        leave(server)
        kill(server, "front-end 0")

        def answers() -> bool:
            try:
                return server.ask("POST", "/v1/apps/doubler", b"[1, 2, 3, 4]")[0] == 200
            except OSError:
                return False

        eventually(answers, within_s=30)
        eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 503, within_s=10)
        server.process.kill()


@contextmanager
def open_stream(server: RunningServer) -> Generator[ClientConnection]:
    with connect(f"ws://{server.host}:{server.port}/v1/apps/hark/stream") as stream:
        stream.send('{"type":"start"}')
        assert '"ready"' in str(stream.recv(timeout=10))
        yield stream


@pytest.mark.thorough
def test_streams_end_by_themselves_or_with_1012_after_their_last_result(live: Path) -> None:
    with RunningServer(live, *LEAVE) as server, open_stream(server) as short, open_stream(server) as long:
        leave(server)
        with open_stream(server) as new:
            for stream in (short, long, new):
                stream.send(b"\0\0\0\0" + CHUNK)
            for stream in (short, new):
                stream.send('{"type":"end"}')
                assert [kind_of(each) for each in messages(stream)] == [RESULT, RESULT, '{"type":"end"']
                assert stream.close_code == 1000
        said = messages(long)
        assert [kind_of(each) for each in said] == [RESULT, RESULT]
        assert '"last":true' in said[-1]
        assert (long.close_code, long.close_reason) == (1012, "The server is shutting down; open another stream.")
        assert server.process.wait(30) == 0


def test_a_recording_and_chunks_of_streams_are_load(live: Path) -> None:
    with RunningServer(live) as server:
        head = {"Content-Type": "application/octet-stream", "endpoint-load-metrics-format": "json"}

        def rows_s() -> float:
            headers = server.ask("POST", "/v1/apps/hark", 4 * CHUNK, head)[1]
            return json.loads(headers["endpoint-load-metrics"].removeprefix("JSON "))["rps_fractional"]

        rows_s()
        with open_stream(server) as stream:
            stream.send(b"\0\0\0\0" + CHUNK)
            stream.send('{"type":"end"}')
            messages(stream)
        eventually(lambda: rows_s() > 0, within_s=10)


def messages(stream: ClientConnection) -> list[str]:
    """All further messages of a stream, however it is closed."""
    said: list[str] = []
    with suppress(ConnectionClosedError):
        said += (str(message) for message in stream)
    return said


def kind_of(message: str) -> str:
    return message.partition(",")[0]


@pytest.fixture(scope="module")
def server(doubler: Path) -> Iterator[RunningServer]:
    with RunningServer(doubler) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body", "head"),
    [
        ("/v1/apps/doubler", b"\0" * 16, {"Content-Type": "application/octet-stream"}),
        ("/v1/apps/doubler", b"[1, 2, 3, 4]", {"Accept": "application/octet-stream"}),
        ("/v1/apps/doubler", b"5", {"Content-Type": "text/x-number"}),
        (
            "/v2/models/doubler/infer",
            b'{"inputs":[{"name":"numbers","shape":[1,4],"datatype":"FP32","data":[1,2,3,4]}]}',
            {},
        ),
        ("/v1/models/doubler:predict", b'{"instances":[[1,2,3,4]]}', {}),
        ("/v1/apps/doubler", b"nonsense", {}),
    ],
)
def test_a_report_comes_with_the_answer_where_it_is_asked_for(
    server: RunningServer, path: str, body: bytes, head: dict[str, str]
) -> None:
    plain = server.ask("POST", path, body, head)
    assert "endpoint-load-metrics" not in plain[1]
    # The first request of a head goes the complete way, later ones down its lane.
    for _ in range(3):
        status, headers, content = server.ask("POST", path, body, {**head, "endpoint-load-metrics-format": "TEXT"})
        assert headers["endpoint-load-metrics"].startswith("TEXT application_utilization=")
        assert (status, content) == (plain[0], plain[2])


def test_a_form_that_is_not_known_is_refused(server: RunningServer) -> None:
    head = {"endpoint-load-metrics-format": "xml"}
    status, _, said = server.ask("POST", "/v1/apps/doubler", b"[1, 2, 3, 4]", head)
    assert (status, said["error"]) == (400, "endpoint-load-metrics-format is 'xml'; it must be text, json or bin.")


def test_a_report_comes_with_refusals_too_and_by_setting_with_all(doubler: Path) -> None:
    with RunningServer(doubler, "--load-report", "json", "--latency-ms", "200", "--max-batch", "1") as server:
        headers = server.ask("POST", "/v1/apps/doubler", b"[1, 2, 3, 4]")[1]
        assert headers["endpoint-load-metrics"].startswith('JSON {"application_utilization":')
        # Seconds of the network, of which a part fits into the budget.
        body = b"[-0.1, 0, 0, 0]"
        head = b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        statuses: set[bytes] = set()

        def some_are_answered_and_some_refused() -> bool:
            with ExitStack() as held:
                address = (server.host, server.port)
                connections = [held.enter_context(socket.create_connection(address, timeout=20)) for _ in range(30)]
                for connection in connections:
                    connection.sendall(head + body)
                answers = [connection.recv(4096) for connection in connections]
            assert all(b"\r\nendpoint-load-metrics: JSON {" in answer for answer in answers)
            statuses.update(answer[9:12] for answer in answers)
            return {b"200", b"503"} <= statuses

        eventually(some_are_answered_and_some_refused, within_s=30)
        # On a busy machine the time of some is over before their turn.
        assert statuses <= {b"200", b"503", b"504"}


@pytest.mark.thorough
def test_a_port_of_agent_checks_that_is_taken_is_named(doubler: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = serve_command(doubler, "--agent-port", str(port))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"cannot listen for agent checks on 127.0.0.1:{port} (Address already in use)" in done.stderr
    assert "choose another --host or --agent-port." in done.stderr


def test_a_negative_time_to_leave_is_refused(doubler: Path) -> None:
    command = serve_command(doubler, "--leave-s=-1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "--leave-s is -1; it must be from 0 to 86,400 seconds." in done.stderr) == (2, True)


def test_sighup_of_a_closed_terminal_leaves_too(doubler: Path) -> None:
    with RunningServer(doubler, "--leave-s", "0.1") as server:
        server.stop(signal.SIGHUP)
        assert server.process.wait(30) == 0

"""A server in operation: keys, sites, limits, logs and readiness, from outside."""

import contextlib
import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

import penstock
from penstock.core.errors import Forbidden, Unauthorized
from tests.support.serving import RunningServer, serve_command, write_doubler
from tests.support.thorough import thorough

ASK = "/v1/apps/doubler"
LOAD = "/v2/repository/models/twice/load"
ANNA, BEN = "anna-0123456789abcdef", "ben-0123456789abcdef"
ONE = np.array([1, 2, 3, 4], np.float32)
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
STATS = b"GET /v1/stats HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"))


@final
class _Blank(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>Another site</title><link rel=icon href=data:,>")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def sites() -> Iterator[tuple[str, str]]:
    """The origins of two sites with an empty page each."""
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Blank) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{servers[0].server_port}", f"http://127.0.0.1:{servers[1].server_port}"
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def server(bundle: Path, sites: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Keys, one listed site, and a model directory."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text(f"anna {ANNA} admin\nben {BEN}\n")
    # A bundle in a model directory finds its application where it was made.
    shutil.copytree(bundle, folder / "models" / "twice")
    options = ["--api-keys", str(folder / "keys"), "--cors", sites[0]]
    with RunningServer(bundle, *options, "--models", str(folder / "models")) as server:
        (folder / "models" / "broken" / "1").mkdir(parents=True)
        yield server


def with_key(key: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in more.items()}}


def url(server: RunningServer) -> str:
    return f"http://{server.host}:{server.port}"


def test_a_key_opens_what_is_closed_without(server: RunningServer) -> None:
    for path in ("/v1/apps", "/v1/stats", "/metrics", "/v2/models/doubler"):
        status, headers, content = server.ask("GET", path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert "Authorization: Bearer KEY" in content["error"]
        assert server.ask("GET", path, headers=with_key(BEN))[0] == 200
    assert server.ask("GET", "/v2/health/live")[0] == server.ask("GET", "/v2/health/ready")[0] == 200
    assert server.ask("POST", ASK, b"[1, 2, 3, 4]", {"X-Api-Key": BEN})[2] == {"doubled": [2, 4, 6, 8]}


def test_the_python_client_sends_its_key(server: RunningServer) -> None:
    with penstock.Client(url(server), api_key=BEN) as client:
        assert client.predict("doubler", ONE).tolist() == [2, 4, 6, 8]
        with pytest.raises(Forbidden):
            client.load("twice")
    with penstock.Client(url(server)) as client, pytest.raises(Unauthorized):
        client.predict("doubler", ONE)


def test_a_head_that_was_let_in_lets_no_other_in(server: RunningServer) -> None:
    # Heads are remembered by their bytes, so the key is part of what is remembered.
    for key, status in ((BEN, 200), (BEN + "x", 401), (BEN, 200), ("", 401)):
        head = f"GET /v1/stats HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n\r\n"
        for _ in range(3):
            assert server.raw(head.encode()).startswith(f"HTTP/1.1 {status} ".encode())


def count(server: RunningServer, outcome: str) -> int:
    return server.ask("GET", "/v1/stats", headers=with_key(BEN))[2][outcome]


def test_refusals_to_another_site_are_readable_and_counted(server: RunningServer, sites: tuple[str, str]) -> None:
    before = count(server, "invalid")
    for body, content_type, status in (
        (b"[1]", "application/json", 400),
        (b"crash", "text/x-number", 500),
        (b"{", "text/html", 415),
    ):
        headers = with_key(BEN, Origin=sites[0], Content_Type=content_type)
        answer = server.ask("POST", ASK, body, headers)
        assert (answer[0], answer[1]["access-control-allow-origin"]) == (status, sites[0])
    assert count(server, "invalid") - before == 2


def test_a_header_that_is_echoed_cannot_begin_another(server: RunningServer, sites: tuple[str, str]) -> None:
    head = f"OPTIONS {ASK} HTTP/1.1\r\nHost: a\r\nOrigin: {sites[0]}\r\nAccess-Control-Request-Method: POST\r\n"
    for evil in ("x\r\n Evil: 1", "x\nEvil: 1", "x\rEvil: 1", "x\x0b\r\n\tEvil: 1"):
        answer = server.raw(f"{head}Access-Control-Request-Headers: {evil}\r\n\r\n".encode())
        lines = answer.replace(b"\r", b"\n").split(b"\n")
        assert not any(line.lstrip().startswith(b"Evil") for line in lines), answer


@pytest.fixture
def page(browser: Browser, sites: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[Page]:
    page = browser.new_page()
    page.goto(sites[request.param])
    yield page
    page.close()


FETCH = """async ([url, options]) => {
    try {
        const answer = await fetch(url, options);
        return [answer.status, await answer.text(), answer.headers.get("Retry-After")];
    } catch (error) {
        return [0, String(error), null];
    }
}"""


def fetched(page: Page, address: str, **options: Any) -> tuple[int, str, str | None]:
    status, text, retry_after = page.evaluate(FETCH, [address, options])
    return status, text, retry_after


@pytest.mark.parametrize("page", [0], indirect=True)
def test_a_page_of_a_listed_site_asks_and_reads_answers_and_refusals(page: Page, server: RunningServer) -> None:
    ask = {"method": "POST", "body": "[1, 2, 3, 4]"}
    # Both headers make the browser ask before it asks.
    headers = with_key(BEN, Content_Type="application/json", Penstock_Latency_Ms="4000")
    status, text, _ = fetched(page, url(server) + ASK, **ask, headers=headers)
    assert (status, json.loads(text)) == (200, {"doubled": [2, 4, 6, 8]})
    headers = {"X-Api-Key": BEN, "Content-Type": "application/json"}
    assert fetched(page, url(server) + ASK, **ask, headers=headers)[0] == 200
    assert fetched(page, url(server) + ASK, **ask)[0] == 401
    assert fetched(page, url(server) + "/nowhere", headers=with_key(BEN))[0] == 404
    assert fetched(page, url(server) + ASK, method="POST", body="[1]", headers=with_key(BEN))[0] == 415
    large = {"method": "POST", "body": "x" * 3_000_000, "headers": with_key(BEN)}
    status, text, _ = fetched(page, url(server) + ASK, **large)
    assert (status, "bytes" in text) == (413, True)


@pytest.mark.parametrize("page", [1], indirect=True)
def test_a_page_of_any_other_site_reads_nothing(page: Page, server: RunningServer) -> None:
    before = count(server, "answered")
    headers = with_key(BEN, Content_Type="application/json")
    assert fetched(page, url(server) + ASK, method="POST", body="[1, 2, 3, 4]", headers=headers)[0] == 0
    assert fetched(page, url(server) + "/v1/apps", headers=with_key(BEN))[0] == 0
    assert fetched(page, url(server) + "/v2/health/live")[0] == 0
    assert count(server, "answered") == before


def test_only_an_admin_loads_models(server: RunningServer) -> None:
    refusal = server.ask("POST", LOAD, headers=with_key(BEN))
    assert (refusal[0], "'ben' may not load" in refusal[2]["error"]) == (403, True)
    assert server.ask("POST", LOAD)[0] == 401
    with penstock.Client(url(server), api_key=ANNA) as client:
        client.load("twice")
        assert client.predict("twice", ONE).tolist() == [2, 4, 6, 8]
    # What cannot be loaded is said, and what is served goes on.
    status, _, content = server.ask("POST", LOAD.replace("twice", "broken"), headers=with_key(ANNA))
    assert (status, "cannot be loaded" in content["error"]) == (400, True)
    assert server.ask("GET", "/v2/health/ready")[0] == 200


@pytest.fixture(scope="module")
def narrow(bundle: Path) -> Iterator[RunningServer]:
    """Small limits, every site, and a log of JSON that must parse to its end."""
    options = [
        "--max-connections",
        "5",
        "--max-headers",
        "24",
        "--idle-timeout-s",
        "2",
        "--request-timeout-s",
        "1",
        "--cors",
        "*",
    ]
    with RunningServer(bundle, *options, "--log-format", "json", "--verbose") as server:
        yield server
        lines = [json.loads(line) for line in server.log().splitlines()]
        assert {line["process"] for line in lines} == {"penstock"}
        assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
        assert {line["level"] for line in lines} <= {"INFO", "WARNING", "ERROR"}
        assert all(line["message"] for line in lines)
        exceptions = [line["exception"] for line in lines if "exception" in line]
        assert all(text.startswith("Traceback (most recent call last):\n") for text in exceptions)
        assert {text.rpartition("\n")[2] for text in exceptions} <= {
            "RuntimeError: decode crashed",
            "ValueError: thirteen",
        }
        assert any(line["message"].startswith("drained;") for line in lines)


def test_a_fault_of_the_application_is_one_line_of_the_log(narrow: RunningServer) -> None:
    assert narrow.ask("POST", ASK, b"crash", {"Content-Type": "text/x-number"})[0] == 500
    assert narrow.ask("POST", ASK, b"13", {"Content-Type": "text/x-number"})[0] == 500


@pytest.mark.parametrize("page", [1], indirect=True)
def test_a_star_lets_every_site_ask(page: Page, narrow: RunningServer) -> None:
    headers = {"Content-Type": "application/json"}
    assert fetched(page, url(narrow) + ASK, method="POST", body="[1, 2, 3, 4]", headers=headers)[0] == 200


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def connected(server: RunningServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=10)


def held(server: RunningServer, connections: contextlib.ExitStack) -> socket.socket:
    """Open a connection that counts among those a front-end may have: one too many answers statistics with 503."""
    while True:
        connection = connections.enter_context(connected(server))
        connection.sendall(STATS)
        if connection.recv(65536).startswith(b"HTTP/1.1 200 OK"):
            return connection
        # A browser before this had a request a moment ago, and keeps its connection.
        time.sleep(0.1)


def test_one_connection_too_many_takes_the_place_of_one_that_has_no_request(bundle: Path) -> None:
    with RunningServer(bundle, "--max-connections", "5") as server, contextlib.ExitStack() as connections:
        few = [held(server, connections) for _ in range(5)]
        for connection in few:
            connection.sendall(LIVE)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        # Who has had no request for a moment alone may be on the way to the next.
        time.sleep(0.5)
        with connected(server) as late:
            late.sendall(STATS)
            assert late.recv(4096).startswith(b"HTTP/1.1 200 OK")
            assert few[0].recv(4096) == b""
            for connection in few[1:]:
                connection.sendall(LIVE)
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.thorough
def test_a_silent_connection_is_closed_without_a_word(narrow: RunningServer) -> None:
    with connected(narrow) as connection:
        # Before the server's own time begins.
        start_s = time.monotonic()
        connection.sendall(LIVE)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        assert connection.recv(4096) == b""
        assert 1.9 < time.monotonic() - start_s < 8


@pytest.mark.parametrize(
    "begun", [b"GET / HT", thorough(b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n[1, 2")]
)
def test_a_request_that_does_not_come_on_is_refused(narrow: RunningServer, begun: bytes) -> None:
    with connected(narrow) as connection:
        connection.sendall(begun)
        assert until_closed(connection).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def test_many_headers_a_large_head_and_a_large_body(narrow: RunningServer) -> None:
    def ask(headers: bytes) -> bytes:
        with connected(narrow) as connection:
            connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n" + headers + b"Connection: close\r\n\r\n")
            return until_closed(connection)

    assert ask(b"X: 1\r\n" * 22).startswith(b"HTTP/1.1 200 ")
    assert b"more than 24 headers" in ask(b"X: 1\r\n" * 23)
    assert ask(b"X: " + b"x" * 15_000 + b"\r\n").startswith(b"HTTP/1.1 200 ")
    assert ask(b"X: " + b"x" * 17_000 + b"\r\n").startswith(b"HTTP/1.1 413 ")
    # A line that never ends.
    with connected(narrow) as connection:
        connection.sendall(b"GET /" + b"x" * 40_000)
        assert until_closed(connection).startswith(b"HTTP/1.1 413 ")
    assert narrow.ask("POST", ASK, b" " * 2_000_000, {"Content-Type": "text/x-number"})[0] == 413


@pytest.mark.thorough
def test_readiness_is_false_before_front_ends_of_their_own_end_connections(bundle: Path) -> None:
    options = ["--frontends", "1", "--log-format", "json", "--verbose"]
    with RunningServer(bundle, *options) as server:
        kept = [connected(server) for _ in range(150)]
        asks = LIVE.replace(b"live", b"ready")
        # A connection on which a request has begun is not closed as one without, however late its rest comes.
        kept[0].sendall(asks[:-2])
        kept[1].sendall(LIVE[:-2])
        server.stop()
        answers: list[bytes] = []
        # Nobody knows for how long the signal has not yet arrived.
        while not answers or answers[-1].startswith(b"HTTP/1.1 200 OK"):
            time.sleep(0.01)
            kept[0].sendall(asks[-2:] + asks[:-2])
            answers.append(kept[0].recv(4096))
        kept.pop(0).close()
        assert answers[-1].startswith(b"HTTP/1.1 503 ")
        assert b"The server is shutting down" in answers[-1]
        assert b"Connection: close" in answers[-1]
        # What still comes is answered, and is each connection's last answer.
        kept[0].sendall(LIVE[-2:])
        answer = until_closed(kept[0])
        assert (answer[:15], b"Connection: close" in answer) == (b"HTTP/1.1 200 OK", True), answer
        for connection in kept:
            connection.close()
        assert server.process.wait(15) == 0
        lines = [json.loads(line) for line in server.log().splitlines()]
    assert {"penstock", "engine", "front-end 0"} == {line["process"] for line in lines}
    assert any("drained" in line["message"] for line in lines)


@pytest.mark.thorough
def test_keys_that_cannot_be_used_are_said_in_one_sentence(bundle: Path, tmp_path: Path) -> None:
    # They are read before any process is started.
    command = serve_command(bundle, "--frontends", "1")
    command += ["--api-keys", str(tmp_path / "keys")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(
        f"penstock: --api-keys {tmp_path / 'keys'} cannot be read (No such file or directory)."
    )

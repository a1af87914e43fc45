"""HTTP/1.0, as nginx speaks it to servers by default: raw requests to a real server, and real nginx before it."""

import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from benchmarks.acceptance.fleet.routing_servers import free_ports
from tests.support.generating import SERVED, counter_bundle, examples
from tests.support.processes import eventually
from tests.support.serving import RunningServer

ASK = "/v1/apps/counter"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
EVENTS = "Accept: text/event-stream\r\n"
KEEP = "Connection: keep-alive\r\n"
# The default of nginx: HTTP/1.0 and `Connection: close` to the server. The last place has what the others lack.
CONFIGURATION = """\
daemon off;
pid {folder}/pid;
error_log {folder}/errors;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://127.0.0.1:{server};
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header X-Asked-By nginx;
        }}
    }}
}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    bundle = counter_bundle(tmp_path_factory.mktemp("counter") / "bundle", SERVED)
    options = ("--app", "tests.support.generating:SERVED", "--executor", "auto")
    with RunningServer(bundle.folder, *options) as server:
        yield server


def asking(version: str = "1.0", headers: str = "") -> bytes:
    given = {name: np.asarray(each).tolist() for name, each in examples()[0].items()}
    body = json.dumps(given)
    return f"POST {ASK} HTTP/{version}\r\nHost: a\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def parts(received: bytes) -> tuple[str, bytes]:
    head, _, body = received.partition(b"\r\n\r\n")
    return head.decode(), body


def length_of(head: str) -> int:
    (length,) = [line.split(": ")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
    return int(length)


@pytest.mark.parametrize("keeps", ["", KEEP])
def test_an_answer_has_a_length_and_ends_the_connection(server: RunningServer, keeps: str) -> None:
    head, body = parts(server.raw(asking(headers=keeps)))
    assert " 200 OK" in head
    assert "Connection: close" in head
    assert length_of(head) == len(body)


@pytest.mark.parametrize("keeps", ["", KEEP])
def test_events_end_with_the_connection_and_are_those_of_http_1_1(server: RunningServer, keeps: str) -> None:
    head, body = parts(server.raw(asking(headers=EVENTS + keeps)))
    assert "200 OK" in head
    assert "text/event-stream" in head
    assert "Connection: close" in head
    assert "transfer-encoding" not in head.lower()
    assert "content-length" not in head.lower()
    # The last event says that all is here.
    assert b"event: done" in body
    chunks = parts(server.raw(asking("1.1", f"{EVENTS}Connection: close\r\n")))[1]
    assert b"".join(dechunked(chunks)) == body


@pytest.mark.parametrize(("version", "first"), [("1.0", b""), ("1.1", b"HTTP/1.1 100 Continue\r\n\r\n")])
def test_a_status_100_is_for_http_1_1_alone(server: RunningServer, version: str, first: bytes) -> None:
    head, _, body = asking(version, "Expect: 100-continue\r\nConnection: close\r\n").partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"\r\n\r\n")
        if first:
            assert connection.recv(1000) == first
        # A client that does not wait for it either.
        time.sleep(0.3)
        connection.sendall(body)
        received = b"".join(iter(lambda: connection.recv(10_000), b""))
    assert received.partition(b"\r\n")[0].endswith(b" 200 OK")


def test_a_second_request_behind_the_first_is_not_answered(server: RunningServer) -> None:
    received = server.raw(asking(headers=KEEP) * 2)
    assert received.count(b" 200 OK") == 1
    head, body = parts(received)
    assert length_of(head) == len(body)


def dechunked(body: bytes) -> Generator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


@pytest.mark.parametrize(
    ("request_", "status", "sentence"),
    [
        (
            b"POST /v1/apps/counter HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b" 400 ",
            b"HTTP/1.0 has no Transfer-Encoding; send a Content-Length",
        ),
        (
            b"GET /v1/streams HTTP/1.0\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
            b" 505 ",
            b"let the proxy speak HTTP/1.1",
        ),
    ],
)
def test_what_http_1_0_does_not_have_is_refused_with_a_sentence(
    server: RunningServer, request_: bytes, status: bytes, sentence: bytes
) -> None:
    received = server.raw(request_)
    assert status in received.partition(b"\r\n")[0]
    assert sentence in received
    assert b"Connection: close" in received


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def ask(port: int, accept: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", ASK, parts(asking())[1], {"Accept": accept})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@contextmanager
def nginx_before(server: RunningServer, folder: Path) -> Generator[int]:
    if NGINX is None:
        pytest.skip("nginx is not installed; 'make fleet' installs it")
    (port,) = free_ports(1)
    file = folder / "nginx.conf"
    file.write_text(CONFIGURATION.format(folder=folder, port=port, server=server.port))
    process = subprocess.Popen([NGINX, "-c", str(file), "-e", str(folder / "errors")])
    try:
        eventually(lambda: is_open(port), within_s=20)
        yield port
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.fleet
def test_nginx_as_it_is_by_default(server: RunningServer, tmp_path: Path) -> None:
    with nginx_before(server, tmp_path) as port:
        for accept, kind in (("application/json", "application/json"), ("text/event-stream", "text/event-stream")):
            status, head, body = ask(port, accept)
            assert (status, head["content-type"]) == (200, kind)
            assert body == ask(server.port, accept)[2]
        # nginx makes chunks of what ended with the connection.
        assert head["transfer-encoding"] == "chunked"
        with pytest.raises(InvalidStatus) as raised, connect(f"ws://127.0.0.1:{port}/v1/apps/counter/stream"):
            pass
        assert raised.value.response.status_code == 505
        assert b"let the proxy speak HTTP/1.1" in raised.value.response.body

"""A server that speaks TLS: https from end to end, and clients that do not get as far as a request."""

import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

import penstock
from penstock.core.errors import Unreachable
from tests.support.processes import eventually
from tests.support.serving import RunningServer, serve_command, write_doubler
from tests.support.thorough import thorough
from tests.support.tls import Certificate, certificate

# The clients are not typed.
triton: Any = tritonclient.grpc
ONE = np.array([1, 2, 3, 4], np.float32)
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\n\r\n"
BEGUN_S = 1.0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(bundle: Path, made: Certificate) -> Iterator[RunningServer]:
    options = [*made.options(), "--request-timeout-s", str(BEGUN_S), "--idle-timeout-s", "2"]
    with RunningServer(bundle, *options) as server:
        yield server
        # Whatever its clients did, nothing of it is worth a line in the log.
        assert server.log() == ""


def is_alive(server: RunningServer, made: Certificate) -> bool:
    with made.connected(server) as connection:
        connection.sendall(LIVE)
        return connection.recv(4096).startswith(b"HTTP/1.1 200 OK")


def test_the_python_client_asks_over_https(server: RunningServer, made: Certificate) -> None:
    transport = httpx2.HTTPTransport(verify=made.trusting())
    with penstock.Client(f"https://{server.host}:{server.port}", transport=transport) as client:
        assert client.predict("doubler", ONE).tolist() == [2, 4, 6, 8]
        assert client.ask("doubler", [1, 2, 3, 4]) == {"doubled": [2.0, 4.0, 6.0, 8.0]}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("days", "said"),
    [(3, "expires in 2 days, at 20"), (-1, "expired at 20")],
    ids=["soon", "expired"],
)
def test_a_certificate_that_ends_is_served_and_said_once(bundle: Path, tmp_path: Path, days: int, said: str) -> None:
    ending = certificate(tmp_path)
    again = ["openssl", "x509", "-in", str(ending.certificate), "-signkey", str(ending.key), "-days", str(days)]
    subprocess.run([*again, "-out", str(ending.certificate)], check=True, capture_output=True, timeout=30)
    with RunningServer(bundle, *ending.options(), "--frontends", "2") as server:
        anybody = ssl.create_default_context()
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        plain = socket.create_connection((server.host, server.port), timeout=10)
        with anybody.wrap_socket(plain) as connection:
            connection.sendall(LIVE)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        (line,) = server.log().splitlines()
    assert f" WARNING front-end 0 penstock.serve.control.certificate_watch: the TLS certificate {tmp_path}" in line
    assert f"certificate.pem {said}" in line


def test_a_client_that_does_not_trust_the_certificate_sends_nothing(server: RunningServer, made: Certificate) -> None:
    with (
        penstock.Client(f"https://{server.host}:{server.port}", retries=0) as client,
        pytest.raises(Unreachable, match=r"(?i)certificate"),
    ):
        client.ask("doubler", [1, 2, 3, 4])
    assert is_alive(server, made)


def test_old_versions_of_tls_are_not_spoken(server: RunningServer, made: Certificate) -> None:
    with made.connected(server) as connection:
        assert connection.version() in ("TLSv1.2", "TLSv1.3")


@pytest.mark.parametrize("garbage", [b"\x00" * 4096, LIVE, b"\x16\x03\x01\xff\xff" + b"\xaa" * 600])
def test_garbage_ends_that_connection_alone(server: RunningServer, made: Certificate, garbage: bytes) -> None:
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(garbage)
        received = b""
        try:
            while part := connection.recv(4096):
                received += part
        except ConnectionResetError:
            pass
    assert b"HTTP" not in received
    assert is_alive(server, made)


def test_a_handshake_that_never_ends_is_ended(server: RunningServer, made: Certificate) -> None:
    start_s = time.monotonic()
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(b"\x16\x03\x01")
        assert connection.recv(4096) == b""
    assert BEGUN_S - 0.1 < time.monotonic() - start_s < BEGUN_S + 3
    assert is_alive(server, made)


@pytest.mark.thorough
def test_a_request_that_never_ends_is_refused(server: RunningServer, made: Certificate) -> None:
    with made.connected(server) as connection:
        connection.sendall(b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: 16\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert connection.recv(4096) == b""


def test_a_refusal_reaches_a_client_that_still_sends(server: RunningServer, made: Certificate) -> None:
    with made.connected(server) as connection:
        connection.sendall(
            b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 100_000
        )
        received = b""
        while part := connection.recv(4096):
            received += part
    assert received.startswith(b"HTTP/1.1 413 ")
    assert received.endswith(b'are taken."}')


@pytest.mark.thorough
def test_a_silent_connection_is_closed(server: RunningServer, made: Certificate) -> None:
    with made.connected(server) as connection:
        connection.sendall(LIVE)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        assert connection.recv(4096) == b""


def test_closing_in_either_way_leaves_the_server_well(server: RunningServer, made: Certificate) -> None:
    for polite in (True, False):
        connection = made.connected(server)
        connection.sendall(LIVE)
        connection.recv(4096)
        if polite:
            connection.unwrap()
        connection.close()
    # Before its answer, and in the middle of a handshake.
    made.connected(server).close()
    socket.create_connection((server.host, server.port)).close()
    assert is_alive(server, made)


@pytest.mark.slow
def test_front_ends_of_their_own_speak_it_too_and_drain(bundle: Path, made: Certificate) -> None:
    options = [*made.options(), "--frontends", "2", "--drain-timeout-s", "30"]
    with RunningServer(bundle, *options) as server, made.connected(server) as connection:
        connection.sendall(LIVE)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
        start_s = time.monotonic()
        server.stop()
        assert connection.recv(4096) == b""
        # This client never says farewell, and is not waited for as long as a request would be.
        assert server.process.wait(25) == 0
        assert time.monotonic() - start_s < 20
        assert server.log() == ""


@pytest.mark.slow
def test_grpc_speaks_it_too(bundle: Path, made: Certificate) -> None:
    options = [*made.options(), "--grpc-port", "0", "--head-timeout-s", str(BEGUN_S)]
    given = triton.InferInput("numbers", [1, 4], "FP32")
    given.set_data_from_numpy(ONE[None])
    with RunningServer(bundle, *options) as server:
        assert server.process.stdout is not None
        port = int(server.process.stdout.readline().split()[-1])
        with (
            triton.InferenceServerClient(
                f"{server.host}:{port}", ssl=True, root_certificates=str(made.certificate)
            ) as client,
            socket.create_connection((server.host, port), timeout=10) as plain,
        ):
            assert client.infer("doubler", [given]).as_numpy("doubles").tolist() == [[2, 4, 6, 8]]
            start_s = time.monotonic()
            assert plain.recv(100) == b""
            assert BEGUN_S - 0.1 < time.monotonic() - start_s < BEGUN_S + 3
            with (
                triton.InferenceServerClient(f"{server.host}:{port}") as naked,
                pytest.raises(InferenceServerException),
            ):
                naked.is_server_live(client_timeout=5)
            server.stop()
            assert server.process.wait(25) == 0
        assert server.log() == ""


# They are read before any process is started.
@pytest.mark.parametrize(
    ("mistake", "frontends"), [("missing", "0"), thorough("another's", "1"), thorough("locked", "0")]
)
def test_files_that_cannot_be_used_are_said_in_one_sentence(
    bundle: Path, made: Certificate, tmp_path: Path, mistake: str, frontends: str
) -> None:
    key = tmp_path / "missing.pem"
    if mistake == "another's":
        key = certificate(tmp_path).key
    elif mistake == "locked":
        locking = ["openssl", "pkcs8", "-topk8", "-in", str(made.key), "-out", str(key), "-passout", "pass:word"]
        subprocess.run(locking, check=True, capture_output=True, timeout=30)
    command = serve_command(bundle, "--frontends", frontends)
    command += ["--tls-certificate", str(made.certificate), "--tls-key", str(key)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: the TLS certificate ")
    assert done.stderr.count("\n") == 1
    assert str(key) in done.stderr


def test_a_tls_session_that_is_cut_off_in_the_middle_of_an_answer_gives_the_slot_back(
    server: RunningServer, made: Certificate
) -> None:
    for _ in range(5):
        connection = made.connected(server)
        connection.sendall(b"POST /v1/apps/doubler HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\n[1, 2, 3, 4]")
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    eventually(lambda: b'"in_use":0' in _stats(server, made), within_s=10)


def _stats(server: RunningServer, made: Certificate) -> bytes:
    received = b""
    with made.connected(server) as connection:
        connection.sendall(b"GET /v1/stats HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        while part := _read(connection):
            received += part
    return received


def _read(connection: ssl.SSLSocket) -> bytes:
    try:
        return connection.recv(65536)
    except ssl.SSLEOFError:
        return b""

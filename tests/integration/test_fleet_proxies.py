"""Real HAProxy and Envoy with the configurations of `deploy/`, before real servers."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection, connect

from benchmarks.acceptance.fleet.routing_drills import lost_behind
from benchmarks.acceptance.fleet.routing_load import EndlessLoad, lost_of
from benchmarks.acceptance.fleet.routing_proxies import (
    AS_DEPLOYED,
    DEPLOY,
    ENVOY,
    HAPROXY,
    PROXIES,
    Changes,
    command_of,
    find_program,
    running_proxy,
)
from benchmarks.acceptance.fleet.routing_servers import (
    NUMBERS,
    RoutedServers,
    free_ports,
    routed_servers,
    write_paced,
)
from benchmarks.acceptance.speech import server_kills
from penstock import Reconnect
from penstock.bench.load.golden_target import golden_target
from tests.support.live import live_bundle
from tests.support.processes import eventually
from tests.support.refusing import RefusingServer, refusing_server

pytestmark = pytest.mark.fleet

LATENCY = ("--latency-ms", "5000")
PACED = "/v1/apps/paced"
ROW = json.dumps(list(range(NUMBERS))).encode()


@pytest.fixture(scope="module", autouse=True)
def started_anew() -> Iterator[None]:
    """Start servers as processes of their own and not as forks, whose groups are not theirs alone to kill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", f"{sys.prefix}/bin/python")
        yield


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest) -> str:
    return installed(request.param)


def installed(proxy: str) -> str:
    if find_program(proxy) is None:
        pytest.skip(f"{proxy} is not installed; 'make fleet' installs it")
    return proxy


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_paced(tmp_path_factory.mktemp("paced"))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    live_bundle(folder)
    return folder / "bundle"


@pytest.fixture(scope="module")
def pair(paced: Path) -> Iterator[RoutedServers]:
    """Two servers, of which tests leave both running."""
    with routed_servers(paced, LATENCY, (0.0, 0.0)) as servers:
        yield servers


@contextmanager
def proxied(proxy: str, servers: RoutedServers, changes: Changes = AS_DEPLOYED) -> Generator[str]:
    with running_proxy(proxy, free_ports(1)[0], servers.backends, changes) as url:
        yield url


def ask(
    url: str, method: str, path: str, body: bytes = b"", head: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Send one request on a connection of its own."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    try:
        connection.request(method, path, body, head or {})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_the_program_takes_the_file_as_it_is(proxy: str) -> None:
    file = DEPLOY / ("haproxy.cfg" if proxy == HAPROXY else "envoy.yaml")
    done = subprocess.run(command_of(proxy, file, check=True), capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING" not in said


def test_a_restart_and_a_kill_lose_no_request(proxy: str) -> None:
    assert lost_behind(proxy, rolling=1, kills=1, rate=50, count=2) == 0


@pytest.mark.slow
def test_rolling_restarts_and_kills_of_four_lose_no_request(proxy: str) -> None:
    assert lost_behind(proxy, rolling=1, kills=4, rate=50) == 0


def test_bodies_beyond_haproxys_own_buffer_are_sent_again(proxy: str, paced: Path) -> None:
    """HAProxy's own buffer has 16 KiB, and what is larger was lost with its server."""
    rows = np.arange(20 * NUMBERS, dtype=np.float32).reshape(20, NUMBERS) + 0.123
    body = json.dumps({"inputs": rows.tolist()}).encode()
    assert len(body) > 1 << 14
    with routed_servers(paced, LATENCY, (0.05, 0.05)) as servers, proxied(proxy, servers) as url:
        over = threading.Event()

        def client() -> list[int]:
            statuses: list[int] = []
            while not over.is_set():
                status, _, said = ask(url, "POST", PACED, body)
                statuses.append(status)
                assert status == 200, said
                np.testing.assert_allclose(json.loads(said)["outputs"], 2 * rows, rtol=1e-6)
            return statuses

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client) for _ in range(4)]
            try:
                servers.kill(0)
                servers.start(0)
                servers.await_requests(0)
                servers.kill(1)
            finally:
                over.set()
            assert all(len(each.result()) > 2 for each in clients)


def test_a_server_that_refuses_takes_no_request_from_its_client(proxy: str, pair: RoutedServers) -> None:
    with refusing_server() as refuser:
        servers = [pair.backends[0], refuser.backend]
        with running_proxy(proxy, free_ports(1)[0], servers) as url:
            statuses = [ask(url, "POST", PACED, ROW)[0] for _ in range(100)]
        assert statuses == [200] * 100
        # Turns and second attempts of one client may go in step: each first attempt goes to the same server.
        assert 0 < refuser.refused <= 100


def test_the_fewest_connections_are_those_of_a_server_that_refuses(paced: Path) -> None:
    """The trap that the deployed configuration avoids."""
    shares: list[float] = []
    for fewest in (True, False):
        changes = Changes(load_report=False, second_attempts=False, fewest_connections=fewest)
        with (
            refusing_server() as refuser,
            routed_servers(paced, LATENCY, (0.2,) * 3) as servers,
            running_proxy(installed(HAPROXY), free_ports(1)[0], [*servers.backends, refuser.backend], changes) as url,
        ):
            with EndlessLoad(golden_target(url, paced), 60.0) as load:
                eventually(lambda refuser=refuser: refuser.refused >= 60, within_s=60)
            shares.append(refuser.refused / load.result.offered)
    assert shares[0] > 0.4 > 0.3 > shares[1]


def test_one_of_four_that_refuses_neither_draws_requests_nor_multiplies_them(proxy: str, paced: Path) -> None:
    with (
        refusing_server() as refuser,
        routed_servers(paced, LATENCY, (0.05,) * 3) as servers,
        running_proxy(proxy, free_ports(1)[0], [*servers.backends, refuser.backend]) as url,
    ):
        # The server that refuses does not describe the model.
        target = replace(golden_target(servers.process(0).url, paced), port=int(url.rpartition(":")[2]))
        with EndlessLoad(target, 60.0) as load:
            eventually(lambda: sum(offered(servers, index) for index in range(3)) >= 300, within_s=60)
        assert lost_of(load.result) == 0
        # Each refusal is followed by one more attempt, elsewhere.
        assert sum(offered(servers, index) for index in range(3)) == load.result.offered
    # By turns a quarter of all attempts comes to it; by predicted finish, about one request a second.
    attempts = load.result.offered + refuser.refused
    assert 0 < refuser.refused < attempts * (0.12 if proxy == HAPROXY else 0.3)


@pytest.mark.parametrize(
    ("status", "report"),
    [
        (500, ""),
        (500, "TEXT application_utilization=0.000000001,rps_fractional=1000000000,named_metrics.predicted_finish_ms=0"),
        (503, "TEXT application_utilization=0.000000001,rps_fractional=1000000000,named_metrics.predicted_finish_ms=0"),
    ],
)
def test_one_of_four_that_fails_at_once_draws_few_requests_whatever_it_reports(
    paced: Path, status: int, report: str
) -> None:
    with (
        refusing_server() as refuser,
        routed_servers(paced, LATENCY, (0.05,) * 3) as servers,
        running_proxy(installed(HAPROXY), free_ports(1)[0], [*servers.backends, refuser.backend]) as url,
    ):
        refuser.status, refuser.report = status, report
        target = replace(golden_target(servers.process(0).url, paced), port=int(url.rpartition(":")[2]))
        with EndlessLoad(target, 40.0) as load:
            eventually(lambda: sum(offered(servers, index) for index in range(3)) >= 200, within_s=60)
    # One that refuses is free again 0.1 s later by its own word, so that it gets some ten a second.
    assert 0 < refuser.refused < load.result.offered * (0.12 if status == 500 else 0.35)


def test_second_attempts_of_envoy_have_a_budget_when_all_servers_refuse() -> None:
    count = 200
    with refusing_server(wait_s=1.0) as one, refusing_server(wait_s=1.0) as other:
        backends = [each.backend for each in (one, other)]
        with running_proxy(installed(ENVOY), free_ports(1)[0], backends) as url, ThreadPoolExecutor(count) as pool:
            statuses = list(pool.map(lambda _: ask(url, "POST", PACED, ROW)[0], range(count)))
    assert statuses == [503] * count
    # Half of the requests under way, which become fewer as they end; without a budget, each has a second attempt.
    assert count + 40 < one.refused + other.refused < 1.75 * count


def test_a_sooner_server_gets_the_requests_and_one_that_leaves_none(paced: Path) -> None:
    options = ("--latency-ms", "1000", "--max-batch", "1", "--leave-s", "600")
    with routed_servers(paced, options, (0.005, 0.1)) as servers, proxied(installed(HAPROXY), servers) as url:
        with EndlessLoad(golden_target(url, paced), 40.0) as load:
            eventually(lambda: offered(servers, 0) > 200, within_s=60)
            # By turns it would be half of them.
            assert offered(servers, 1) < 0.2 * offered(servers, 0)
            servers.process(0).process.terminate()
            eventually(lambda: ask(servers.process(0).url, "GET", "/v2/health/ready")[0] == 503, within_s=20)
            time.sleep(1)
            before = offered(servers, 0)
            time.sleep(1)
            assert offered(servers, 0) == before
        assert load.result.wrong == 0


def test_second_attempts_have_a_budget_when_all_servers_refuse() -> None:
    with refusing_server() as one, refusing_server() as other:
        servers: list[RefusingServer] = [one, other]
        backends = [each.backend for each in servers]
        with running_proxy(installed(HAPROXY), free_ports(1)[0], backends) as url:
            statuses = [ask(url, "POST", PACED, ROW)[0] for _ in range(300)]
    assert statuses == [503] * 300
    # A fifth is the budget; one in five of 300 is above 100 with a probability below 1e-8.
    assert 300 < sum(each.refused for each in servers) <= 400


def test_the_load_report_is_for_the_proxy_alone(pair: RoutedServers) -> None:
    with proxied(installed(ENVOY), pair) as url:
        assert "endpoint-load-metrics" not in ask(url, "POST", PACED, ROW)[1]


def test_an_overloaded_server_has_less_weight_in_haproxy(paced: Path) -> None:
    options = ("--latency-ms", "300", "--max-batch", "1")
    by_weight = Changes(predicted_finish=False)
    with (
        routed_servers(paced, options, (0.01, 0.1)) as servers,
        proxied(installed(HAPROXY), servers, by_weight) as url,
    ):
        target = golden_target(url, paced)
        with EndlessLoad(target, 40.0):
            # By turns it would be offered twice what it can answer.
            eventually(lambda: offered(servers, 1) > 100, within_s=60)
            before = [offered(servers, index) for index in range(2)]
            eventually(lambda: offered(servers, 0) - before[0] > 200, within_s=60)
            fast, slow = (offered(servers, index) - before[index] for index in range(2))
    assert slow < 0.6 * fast


def offered(servers: RoutedServers, index: int) -> int:
    said = json.loads(ask(servers.process(index).url, "GET", "/v1/stats")[2])["models"]["paced"]
    return said["answered"] + said["refused"]


def chunk_of(sequence: int, at: int, last: bool) -> bytes:
    sound = {"name": "sound", "shape": [1, 320], "datatype": "INT16", "data": [at] * 320}
    parameters = {"sequence_id": sequence, "sequence_start": at == 0, "sequence_end": last}
    return json.dumps({"parameters": parameters, "inputs": [sound]}).encode()


def test_a_sequence_stays_at_its_server_also_while_that_leaves(proxy: str, live: Path) -> None:
    count, chunks = 12, 4
    with routed_servers(live, (*LATENCY, "--leave-s", "600"), (0.0, 0.0)) as servers, proxied(proxy, servers) as url:

        def send(sequence: int, at: int) -> tuple[int, bytes]:
            # HAProxy finds the number in the JSON; Envoy needs the header.
            head = {"X-Sequence-Id": str(sequence)} if proxy == ENVOY else {}
            body = chunk_of(sequence, at, at == chunks - 1)
            status, _, said = ask(url, "POST", "/v2/models/hark/infer", body, head)
            return status, said

        for at in range(chunks - 1):
            assert [send(sequence, at)[0] for sequence in range(1, count + 1)] == [200] * count
        opened = [json.loads(ask(servers.process(index).url, "GET", "/v1/stats")[2]) for index in range(2)]
        each = [said["models"]["hark"]["streams"]["opened"] for said in opened]
        assert sum(each) == count
        assert min(each) > 0
        servers.process(0).process.terminate()
        eventually(lambda: ask(servers.process(0).url, "GET", "/v2/health/ready")[0] == 503, within_s=20)
        # Longer than the probes need to see it.
        time.sleep(1)
        assert [send(sequence, chunks - 1)[0] for sequence in range(1, count + 1)] == [200] * count


def test_streams_through_a_proxy_end_by_themselves_or_with_1012(proxy: str, live: Path) -> None:
    with routed_servers(live, (*LATENCY, "--leave-s", "6"), (0.0, 0.0)) as servers, proxied(proxy, servers) as url:
        address = f"{url.replace('http', 'ws')}/v1/apps/hark/stream"

        def speak(stream: ClientConnection) -> None:
            stream.send('{"type":"start"}')
            assert '"ready"' in str(stream.recv(timeout=20))
            stream.send(b"\0\0\0\0" + b"\0" * 640)

        with connect(address) as one, connect(address) as two, connect(address) as short:
            for stream in (one, two, short):
                speak(stream)
            # By turns, so that one of the first two is at each.
            process = servers.process(0).process
            process.terminate()
            short.send('{"type":"end"}')
            assert said_by(short)[-1].startswith('{"type":"end"')
            assert process.wait(60) == 0
            with connect(address) as new:
                speak(new)
                new.send('{"type":"end"}')
                assert said_by(new)[-1].startswith('{"type":"end"')
            servers.process(1).process.terminate()
            for stream in (one, two):
                assert '"last":true' in said_by(stream)[-1]
                assert stream.close_code == 1012


def said_by(stream: ClientConnection) -> list[str]:
    said: list[str] = []
    with suppress(ConnectionClosedError):
        said += (str(message) for message in stream)
    return said


def test_clients_of_http_1_0_are_answered(proxy: str, pair: RoutedServers) -> None:

    with proxied(proxy, pair) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(
                b"POST %b HTTP/1.0\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (PACED.encode(), len(ROW), ROW)
            )
            received = b""
            while part := connection.recv(1 << 16):
                received += part
    assert b" 200 OK\r\n" in received
    assert b"transfer-encoding" not in received.lower()


def test_a_load_counts_what_is_lost(paced: Path) -> None:
    """A drill that could not see a loss would be of no use."""
    with routed_servers(paced, LATENCY, (0.0,)) as servers:
        with EndlessLoad(golden_target(servers.process(0).url, paced), 50.0) as load:
            eventually(lambda: offered(servers, 0) > 20, within_s=30)
            servers.kill(0)
            servers.start(0)
            eventually(lambda: offered(servers, 0) > 20, within_s=30)
        result: Any = load.result
    assert result.latency_s.size > 0
    assert lost_of(result) >= 0


@pytest.mark.parametrize("tickets", [False, True])
def test_streams_of_clients_that_reconnect_lose_nothing_when_servers_are_killed(tickets: bool) -> None:
    # A busy machine is silent for longer than the default. With tickets, less is kept than a stream has.
    kept_bytes = server_kills.TICKETED_BYTES if tickets else Reconnect().kept_bytes
    result = server_kills.run(
        streams=8, kills=3, reconnect=Reconnect(silent_s=10, kept_bytes=kept_bytes), tickets=tickets
    )
    assert result.lost_samples == 0
    assert result.signals >= 8
    # Some of the streams were on a server that was killed.
    assert max(result.gaps_s) > 0

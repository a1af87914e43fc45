"""Two engines of which one is killed: requests that it had are answered by the other one, where their budgets allow."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from penstock.bench.process_usage import worker_pids
from tests.support.chained import Chained, answer, picture, write_chained
from tests.support.processes import Crowd, eventually, kill
from tests.support.serving import RunningServer, write_doubler

ENGINES = ("engine 0 on cpu", "engine 1 on cpu")
DOUBLER, JSON = "/v1/apps/doubler", {"Content-Type": "application/json"}
ROWS = np.arange(30, 42, dtype=np.float32).reshape(3, 4)
MARKS = [(1, 1), (4, 5), (7, 7)]
triton: Any = tritonclient.grpc


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, str]]:
    folder = tmp_path_factory.mktemp("second")
    chained: Chained = write_chained(folder, partial=False)
    (folder / "doubler").mkdir()
    bundle = write_doubler(folder / "doubler")
    # Longer than the engines are stopped for, on a busy machine too.
    options = ("--device", "cpu,cpu", "--frontends", "1", "--grpc-port", "0", "--latency-ms", "20000")
    with RunningServer(bundle, *chained.arguments, *options) as server:
        assert server.process.stdout is not None
        yield server, f"127.0.0.1:{server.process.stdout.readline().split()[-1]}"


@pytest.fixture
def server(running: tuple[RunningServer, str]) -> RunningServer:
    server = running[0]
    eventually(lambda: len(stats(server)["engines"]) == 2 and len(stats(server, "scale")["engines"]) == 2, within_s=60)
    return server


def stats(server: RunningServer, name: str = "doubler") -> dict[str, Any]:
    return server.ask("GET", "/v1/stats")[2]["models"][name]


def waiting(server: RunningServer, name: str = "doubler") -> list[int]:
    """Rows of a model in each engine."""
    return [engine["slots"]["in_use"] for engine in stats(server, name)["engines"]]


def stopped(server: RunningServer) -> list[int]:
    """Stop both engines, so that what is sent waits there; returns their processes."""
    processes = [worker_pids(server.process.pid)[name] for name in ENGINES]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    return processes


def ask(server: RunningServer, row: list[float], **headers: str) -> tuple[int, dict[str, str], Any]:
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.ask("POST", DOUBLER, json.dumps(row).encode(), JSON | headers)


def ask_grpc(url: str) -> list[list[float]]:
    client = triton.InferenceServerClient(url)
    given = triton.InferInput("numbers", list(ROWS.shape), "FP32")
    given.set_data_from_numpy(ROWS)
    try:
        return client.infer("doubler", [given]).as_numpy("doubles").tolist()
    finally:
        client.close()


def ask_protocol(server: RunningServer) -> Any:
    inputs = [{"name": "numbers", "datatype": "FP32", "shape": list(ROWS.shape), "data": ROWS.ravel().tolist()}]
    status, _, reply = server.ask("POST", "/v2/models/doubler/infer", json.dumps({"inputs": inputs}).encode())
    return status, reply["outputs"][0]["data"]


def ask_batch(server: RunningServer) -> Any:
    status, _, reply = server.ask("POST", DOUBLER, json.dumps({"inputs": ROWS.tolist()}).encode(), JSON)
    return status, [each["doubled"] for each in reply["outputs"]]


def ask_chain(server: RunningServer) -> Any:
    status, _, reply = server.ask("POST", "/v1/apps/look", json.dumps(picture(*MARKS).tolist()).encode(), JSON)
    return status, reply["weights"]


def test_requests_of_every_protocol_are_answered_by_the_engine_that_is_left(
    server: RunningServer, running: tuple[RunningServer, str]
) -> None:
    before = stats(server)["retried"], stats(server, "marks")["retried"], stats(server)["answered"]
    processes = stopped(server)
    with ThreadPoolExecutor(16) as pool:
        plain = [pool.submit(ask, server, [float(number), 2, 3, 4]) for number in range(30, 34)]
        timed = [pool.submit(ask, server, [50.0, 2, 3, 4], Penstock_Timing="1") for _ in range(2)]
        batches = [pool.submit(ask_batch, server) for _ in range(2)]
        protocol = [pool.submit(ask_protocol, server) for _ in range(2)]
        grpc = [pool.submit(ask_grpc, running[1]) for _ in range(2)]
        chains = [pool.submit(ask_chain, server) for _ in range(2)]
        eventually(lambda: sum(waiting(server)) == 6 + 3 * 6 and sum(waiting(server, "marks")) == 2, within_s=15)
        mine, others = waiting(server)
        assert min(mine, others) > 0
        os.kill(processes[0], signal.SIGKILL)
        eventually(lambda: len(waiting(server)) == 1, within_s=15)
        assert sum(waiting(server)) == mine + others
        os.kill(processes[1], signal.SIGCONT)
        doubled = (2 * ROWS).tolist()
        for number, future in enumerate(plain):
            assert future.result()[0] == 200
            assert future.result()[2] == {"doubled": [2.0 * (30 + number), 4, 6, 8]}
        assert [future.result()[0] for future in timed] == [200] * 2
        assert [future.result() for future in batches] == [(200, doubled)] * 2
        assert [future.result() for future in protocol] == [(200, (2 * ROWS).ravel().tolist())] * 2
        assert [future.result() for future in grpc] == [doubled] * 2
        assert [future.result() for future in chains] == [(200, answer(*MARKS))] * 2
    after = stats(server)["retried"], stats(server, "marks")["retried"], stats(server)["answered"]
    assert (after[0] - before[0], after[1] - before[1], after[2] - before[2]) == (mine, 1, 12)
    text = server.ask("GET", "/metrics")[2].decode()
    assert f'penstock_retried_rows_total{{app="doubler"}} {after[0]}.0' in text


@pytest.mark.thorough
def test_a_request_whose_budget_is_too_short_is_told_as_before(server: RunningServer) -> None:
    processes = stopped(server)
    with ThreadPoolExecutor(4) as pool:
        short = [pool.submit(ask, server, [30.0, 2, 3, 4], Penstock_Latency_Ms="300") for _ in range(2)]
        eventually(lambda: waiting(server) == [1, 1], within_s=15)
        long = [pool.submit(ask, server, [30.0, 2, 3, 4]) for _ in range(2)]
        eventually(lambda: waiting(server) == [2, 2], within_s=15)
        time.sleep(0.3)
        os.kill(processes[0], signal.SIGKILL)
        eventually(lambda: any(future.done() for future in short), within_s=15)
        told = next(future for future in short if future.done()).result()
        assert told[0] == 503
        assert told[2]["error"] == "The engine that it was on stopped; send it again."
        os.kill(processes[1], signal.SIGCONT)
        assert [future.result()[0] for future in long] == [200] * 2
        # The other engine had it all the time, and lets it expire.
        assert sorted(future.result()[2]["error"][:8] for future in short) == ["Deadline", "The engi"]


@pytest.mark.slow
def test_an_engine_that_is_killed_again_and_again_under_load_fails_no_request(server: RunningServer) -> None:
    with Crowd(server, clients=12, pause_s=0.0) as crowd:
        for turn in range(3):
            crowd.until_right(100, since_s=time.monotonic())
            kill(server, ENGINES[turn % 2])
            eventually(lambda: len(stats(server)["engines"]) == 1, within_s=10)
            eventually(lambda: len(stats(server)["engines"]) == 2, within_s=60)
        crowd.until_right(100, since_s=time.monotonic())
    assert crowd.outcomes.keys() == {"right"}


# The last test: for a minute after it, rows that were being run get no second try.
@pytest.mark.slow
def test_a_row_that_kills_engines_kills_two_once_and_then_one_each_time(server: RunningServer) -> None:
    poison = [19.0, 2, 3, 4]

    def is_whole() -> bool:
        try:
            return len(stats(server)["engines"]) == 2 and ask(server, [30.0, 2, 3, 4])[0] == 200
        except KeyError:
            return False

    before = worker_pids(server.process.pid)
    status, headers, reply = ask(server, poison)
    # Its client must not send it again by itself.
    assert (status, "retry-after" in headers) == (500, False)
    assert reply["error"] == "Two engines stopped while they ran this request; it is not tried again."
    eventually(is_whole, within_s=60)
    after = worker_pids(server.process.pid)
    assert all(before[name] != after[name] for name in ENGINES)
    status, headers, reply = ask(server, poison)
    assert (status, "retry-after" in headers) == (503, True)
    assert reply["error"] == "The engine that it was on stopped; send it again."
    # The other one goes on.
    assert ask(server, [30.0, 2, 3, 4])[2] == {"doubled": [60, 4, 6, 8]}
    eventually(is_whole, within_s=60)
    last = worker_pids(server.process.pid)
    assert sum(after[name] != last[name] for name in ENGINES) == 1

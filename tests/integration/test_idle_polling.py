"""A server whose processes poll for a while instead of sleeping: the same answers, and rest afterwards."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.bench.process_usage import worker_pids
from penstock.core.machine.process_stat import cpu_seconds
from tests.support.processes import eventually
from tests.support.serving import RunningServer, write_doubler

ASK = "/v1/apps/doubler"
RAW = {"Content-Type": "application/octet-stream", "Accept": "application/octet-stream"}
POLL_S = 0.5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    bundle = write_doubler(tmp_path_factory.mktemp("doubler"))
    with RunningServer(bundle, "--frontends", "1", "--idle-poll-ms", f"{POLL_S * 1e3:g}") as server:
        yield server


def used_s(server: RunningServer, seconds: float) -> dict[str, float]:
    """Processor time of the engine and the front-end in the seconds from now on."""
    workers = worker_pids(server.process.pid)
    before = {name: cpu_seconds(pid) for name, pid in workers.items()}
    time.sleep(seconds)
    return {name: cpu_seconds(pid) - before[name] for name, pid in workers.items()}


def test_the_answers_are_right_and_the_processes_poll_and_then_rest(server: RunningServer) -> None:

    def polls_and_rests() -> bool:
        for value in range(12):
            given = np.full(4, value, np.float32)
            status, _, body = server.ask("POST", ASK, given.tobytes(), RAW)
            assert status == 200
            np.testing.assert_array_equal(np.frombuffer(body, np.float32), 2 * given)
        polling = used_s(server, POLL_S)
        resting = used_s(server, POLL_S)
        assert set(polling) == {"engine", "front-end 0"}
        return all(used > 3 * resting[name] + 0.02 for name, used in polling.items())

    # On a busy machine a process may get nothing of the half second in which it polls.
    eventually(polls_and_rests, within_s=60)


@pytest.mark.thorough
def test_a_server_on_a_cpu_sleeps_by_default(tmp_path: Path) -> None:
    with RunningServer(write_doubler(tmp_path), "--frontends", "1") as server:
        server.ask("POST", ASK, np.zeros(4, np.float32).tobytes(), RAW)
        assert max(used_s(server, POLL_S).values()) < POLL_S / 4

"""Processes of a server killed at random moments: while they load, while they drain, several at once."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from penstock.bench.process_usage import worker_pids
from tests.support.processes import Crowd, eventually, exists, kill, mapped_tables, tables_of
from tests.support.serving import RunningServer, serve_command, write_doubler

pytestmark = pytest.mark.drill

SECONDS = 20.0


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_doubler(tmp_path_factory.mktemp("doubler"), sleep_s=0.005)


def kill_some(server: RunningServer, chance: random.Random) -> None:
    there = worker_pids(server.process.pid)
    for role in chance.sample(sorted(there), min(len(there), chance.choice((1, 1, 2, 3)))):
        try:
            os.kill(there[role], signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_killed_when_everything_comes_back(bundle: Path, seed: int) -> None:
    chance = random.Random(seed)
    with (
        RunningServer(bundle, "--frontends", "2") as server,
        Crowd(server, clients=4) as staying,
        Crowd(server, clients=4, reconnect=True) as changing,
    ):
        staying.until_right(50)
        end_s = time.monotonic() + SECONDS
        while time.monotonic() < end_s:
            time.sleep(chance.choice((0.001, 0.05, 0.3, 1, 4)) * chance.random())
            kill_some(server, chance)
        last_s = time.monotonic()
        for crowd in (staying, changing):
            crowd.until_right(50, since_s=last_s, within_s=60)
            # While every front-end is dead, who connects waits for the first that is back.
            assert crowd.outcomes.keys() <= {"right", "refused", "closed", "late", "not accepted"}
        eventually(lambda: len(worker_pids(server.process.pid)) == 3, within_s=15)
        eventually(lambda: server.ask("GET", "/v2/health/ready")[0] == 200, within_s=60)
        for process in worker_pids(server.process.pid).values():
            eventually(lambda process=process: mapped_tables(process) == 1, within_s=15)
        assert tables_of([server.process.pid]) == 1


@pytest.mark.parametrize("roles", [("engine",), ("front-end 0",), ("engine", "front-end 0", "front-end 1")])
def test_kills_while_it_drains(bundle: Path, roles: tuple[str, ...]) -> None:
    with RunningServer(bundle, "--frontends", "2") as server:
        processes = list(worker_pids(server.process.pid).values())
        with Crowd(server, clients=8, pause_s=0.0) as crowd:
            crowd.until_right(50)
            server.stop()
            time.sleep(0.1)
            for role in roles:
                kill(server, role)
            assert server.process.wait(5) == 0
        assert not any(map(exists, processes))
        assert crowd.outcomes.keys() <= {"right", "refused", "closed"}


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.3, 0.6, 1.0, 2.0, 3.0])
def test_a_supervisor_killed_while_it_starts_leaves_nothing(bundle: Path, after_s: float) -> None:
    command = serve_command(bundle, "--frontends", "2")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        eventually(lambda: len(worker_pids(process.pid)) > 0, within_s=30)
        time.sleep(after_s)
        there = list(worker_pids(process.pid).values())
        process.kill()
        eventually(lambda: not any(map(exists, there)), within_s=2)

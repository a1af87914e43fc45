"""The fork server: what it forks is a child of the supervisor, and it forks nothing that a thread could spoil."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.runtime.trial_order import TrialOrder
from penstock.serve.control import fork_server
from penstock.serve.control.fork_server import ForkedProcess, ForkServer, Preload, reap_orphans
from tests.support.processes import exists

ORDER = TrialOrder(bundle="there-is-none", app=None, accept_changed=False, network=False).to_json()


def running(work: Callable[[ForkServer], Awaitable[None]], *preloads: Preload) -> None:
    async def run() -> None:
        server = ForkServer(lambda: preloads)
        server.start()
        try:
            await work(server)
        finally:
            server.close()

    asyncio.run(run())


def verdict(server: ForkServer) -> tuple[ForkedProcess | None, str]:
    """Fork a trial of a bundle that is not there; returns its process and what it says."""
    (their_input, our_input), (our_output, their_output) = os.pipe(), os.pipe()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    forked = server.fork("trial", ORDER, (their_input, their_output, nowhere))
    for descriptor in (their_input, their_output, nowhere):
        os.close(descriptor)
    said = os.read(our_output, 4096).decode()
    os.close(our_input)
    os.close(our_output)
    return forked, said


async def until_forked(server: ForkServer, within_s: float = 30.0) -> ForkedProcess:
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        forked, said = verdict(server)
        if forked is not None:
            assert "there-is-none" in said
            return forked
        await asyncio.sleep(0.05)
    raise AssertionError("nothing was forked")


@pytest.fixture(autouse=True)
def _imports_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "GATHER_S", 0.02)


async def preload(server: ForkServer, *modules: str) -> None:
    """Ask for imports; returns when another process has begun to make them."""
    for module in modules:
        server.preload(Preload(module))
    end_s = time.monotonic() + 10
    while len(server.pids) < 2:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.005)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', os.getcwd())}")
    return tmp_path


def test_what_is_forked_is_a_child_of_the_caller() -> None:
    async def work(server: ForkServer) -> None:
        begun_s = time.monotonic()
        forked = await until_forked(server)
        assert forked.pid not in (server.pid, os.getpid())
        # It ends by itself, or when its standard input ends.
        assert forked.wait() in (0, 1)
        assert forked.wait() in (0, 1)
        assert time.monotonic() - begun_s < 30
        # A process that was waited for is not killed: another may have its number.
        forked.kill()

    running(work)


def test_nothing_is_forked_while_something_is_imported(modules: Path) -> None:
    (modules / "slow_module.py").write_text("import time\ntime.sleep(1.5)\n")

    async def work(server: ForkServer) -> None:
        begun_s = time.monotonic()
        assert verdict(server) == (None, "")
        assert time.monotonic() - begun_s < 0.5
        (await until_forked(server)).wait()

    running(work, Preload("slow_module"))


async def until_pids(server: ForkServer, are: Callable[[frozenset[int]], bool]) -> None:
    end_s = time.monotonic() + 30
    while not are(server.pids):
        assert time.monotonic() < end_s, server.pids
        # It notices at a fork that another one is ready.
        forked, _ = verdict(server)
        assert forked is not None
        forked.wait()
        await asyncio.sleep(0.02)


def test_what_was_imported_before_is_forked_during_a_further_import(modules: Path) -> None:
    (modules / "slow_module.py").write_text("import time\ntime.sleep(1.0)\n")
    (modules / "none.py").write_text("")

    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        first = server.pid
        await preload(server, "slow_module", "none")
        forked, said = verdict(server)
        assert forked is not None
        assert "there-is-none" in said
        forked.wait()
        assert server.pid == first
        await until_pids(server, lambda pids: len(pids) == 1)
        assert server.pid != first
        assert not exists(first or 0)
        # Each is forked from the one before; none is left.
        seen = {first, server.pid}
        for _ in range(3):
            await preload(server, "none")
            await until_pids(server, lambda pids: len(pids) == 1)
            seen.add(server.pid)
        assert len(seen) == 5
        assert [pid for pid in seen if exists(pid or 0)] == [server.pid]

    running(work)


def test_an_import_that_starts_a_thread_changes_nothing(modules: Path) -> None:
    (modules / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )

    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        first = server.pid
        await preload(server, "threaded")
        await until_pids(server, lambda pids: len(pids) == 1)
        assert server.pid == first
        (await until_forked(server)).wait()

    running(work)


def test_nothing_is_forked_beside_a_thread_of_the_first_import(modules: Path) -> None:
    (modules / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )

    async def work(server: ForkServer) -> None:
        end_s = time.monotonic() + 2.0
        while time.monotonic() < end_s:
            assert verdict(server) == (None, "")
            await asyncio.sleep(0.1)

    running(work, Preload("threaded"))


def test_a_next_fork_server_that_is_killed_leaves_the_current_one(modules: Path) -> None:
    (modules / "slow_module.py").write_text("import time\ntime.sleep(600)\n")

    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        first = server.pid
        await preload(server, "slow_module")
        (following,) = server.pids - {first}
        os.kill(following, signal.SIGKILL)
        await until_pids(server, lambda pids: following not in pids)
        assert server.pid == first
        # The current one is killed: the next one has its place once it has imported.
        await preload(server, "penstock.core.errors")
        (following,) = server.pids - {first}
        os.kill(first or 0, signal.SIGKILL)
        end_s = time.monotonic() + 10
        while server.pid != following:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.02)
        (await until_forked(server)).wait()

    running(work)


@pytest.mark.parametrize("source", ["raise SystemExit(3)", "raise ValueError", "import no_such_module"])
def test_an_import_that_fails_ends_nothing(modules: Path, source: str) -> None:
    (modules / "failing.py").write_text(source)

    async def work(server: ForkServer) -> None:
        first = server.pid
        (await until_forked(server)).wait()
        assert server.pid == first

    running(work, Preload("failing"), Preload(application="failing:app"))


def test_a_fork_server_that_was_killed_or_hangs_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "RESTART_PAUSE_S", 0.1)
    monkeypatch.setattr(fork_server, "FORK_TIMEOUT_S", 2.0)

    async def work(server: ForkServer) -> None:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            (await until_forked(server)).wait()
            before = server.pid
            assert before is not None
            os.kill(before, number)
            assert verdict(server)[0] is None
            (await until_forked(server)).wait()
            assert server.pid != before
            assert not exists(before)

    running(work)


def test_a_pause_ends_the_process_until_the_next_start() -> None:
    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        before = server.pid
        server.pause()
        server.pause()
        assert server.pid is None
        assert verdict(server) == (None, "")
        server.start()
        (await until_forked(server)).wait()
        assert server.pid != before

    running(work)


def test_forks_end_with_the_supervisor() -> None:
    program = """
import asyncio, os, sys
from penstock.serve.control.fork_server import ForkServer
from tests.unit.test_fork_server import until_forked

async def main():
    server = ForkServer(lambda: ())
    server.start()
    while True:
        reader, writer = os.pipe()
        forked = server.fork("child", '["front-end 0", 0, "{}"]', (reader,))
        if forked:
            break
        await asyncio.sleep(0.05)
    (await until_forked(server)).wait()
    print(server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert supervisor.stdout is not None
        process = int(supervisor.stdout.readline())
        assert exists(process)
    finally:
        supervisor.kill()
        supervisor.communicate()
    end_s = time.monotonic() + 5
    while exists(process) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not exists(process)


def test_orphans_are_waited_for_and_own_children_are_not() -> None:
    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        # Its child becomes one of this process, which has become the subreaper.
        line = "import os, time\nif os.fork() == 0:\n    time.sleep(0.2)\n"
        parent = subprocess.run([sys.executable, "-c", f"{line}else: os._exit(0)"], check=True)
        assert parent.returncode == 0
        own = subprocess.Popen([sys.executable, "-c", "pass"])
        ended = os.pidfd_open(own.pid)
        await asyncio.sleep(1.0)
        reap_orphans({own.pid, *server.pids})
        assert own.wait() == 0
        os.close(ended)
        reap_orphans({*server.pids})
        with suppress(ChildProcessError):
            left = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            assert left is None or left.si_pid == server.pid

    running(work)

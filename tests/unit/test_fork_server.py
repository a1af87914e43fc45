"""The fork server: what it forks is a child of the supervisor, and it forks nothing that a thread could spoil."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.core.machine.priority import LOW
from penstock.runtime.trial_order import TrialOrder
from penstock.serve.control import fork_generation, fork_server
from penstock.serve.control.fork_generation import ForkedProcess, Generation, Preload
from penstock.serve.control.fork_server import ForkServer, reap_orphans
from tests.support.processes import eventually, exists
from tests.support.thorough import thorough

ORDER = TrialOrder(bundle="there-is-none", app=None, accept_changed=False, network=False).to_json()


# What the forks need; `preload` adds to it.
NEEDED: list[Preload] = []


def running(work: Callable[[ForkServer], Awaitable[None]], *preloads: Preload, has_spare: bool = False) -> None:
    async def run() -> None:
        NEEDED[:] = preloads
        server = ForkServer(lambda: NEEDED, has_spare=has_spare)
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
    # A process that lives is not given up on a busy machine.
    monkeypatch.setattr(fork_generation, "FORK_TIMEOUT_S", 30.0)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Processes for whose answers nobody waits long."""
    pids, receive = set[int](), Generation.receive

    def soon(generation: Generation, timeout_s: float) -> bytes | None:
        return receive(generation, min(timeout_s, 0.2) if generation.pid in pids else timeout_s)

    monkeypatch.setattr(Generation, "receive", soon)
    return pids


async def until(is_so: Callable[[], bool], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.005)


async def preload(server: ForkServer, *modules: str) -> None:
    """Ask for imports; returns when another process has begun to make them."""
    before = server.pids
    for module in modules:
        NEEDED.append(Preload(module))
        server.preload(Preload(module))
    await until(lambda: not server.pids <= before)


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


# Its import ends when a file is there.
SLOW = "import pathlib, time\nwhile not pathlib.Path(__file__).with_suffix('.go').exists():\n    time.sleep(0.01)\n"


def test_nothing_is_forked_while_something_is_imported(modules: Path) -> None:
    (modules / "slow_module.py").write_text(SLOW)

    async def work(server: ForkServer) -> None:
        begun_s = time.monotonic()
        assert verdict(server) == (None, "")
        # Without a wait for an answer.
        assert time.monotonic() - begun_s < fork_generation.FORK_TIMEOUT_S / 2
        (modules / "slow_module.go").touch()
        (await until_forked(server)).wait()

    running(work, Preload("slow_module"))


async def until_pids(server: ForkServer, are: Callable[[frozenset[int]], bool]) -> None:
    end_s = time.monotonic() + 60
    while not are(server.pids):
        assert time.monotonic() < end_s, server.pids
        # It is noticed at a fork that another process is ready.
        forked, _ = verdict(server)
        if forked is not None:
            forked.wait()
        await asyncio.sleep(0.02)


# Writes down where it is imported.
NOTES = "import os, pathlib\npathlib.Path(__file__).with_suffix(f'.{os.getpid()}').touch()\n"
THREADED = NOTES + "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


def importers(module: Path) -> set[int]:
    return {int(file.suffix[1:]) for file in module.parent.glob(f"{module.stem}.*") if file.suffix[1:].isdigit()}


@pytest.mark.thorough
def test_what_was_imported_before_is_forked_during_a_further_import(modules: Path) -> None:
    (modules / "slow_module.py").write_text(NOTES + SLOW)
    for module in ("quick", "other", "third", "fourth"):
        (modules / f"{module}.py").write_text(NOTES)

    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        first = server.pid
        await preload(server, "slow_module", "quick")
        forked, said = verdict(server)
        assert forked is not None
        assert "there-is-none" in said
        forked.wait()
        assert server.pid == first
        (modules / "slow_module.go").touch()
        await until_pids(server, lambda pids: len(pids) == 1)
        assert server.pid != first
        assert not exists(first or 0)
        assert importers(modules / "slow_module.py") == importers(modules / "quick.py") == {server.pid}
        # Each is forked from the one before; none is left.
        seen = {first, server.pid}
        for module in ("other", "third", "fourth"):
            await preload(server, module)
            await until_pids(server, lambda pids: len(pids) == 1)
            assert importers(modules / f"{module}.py") == {server.pid}
            seen.add(server.pid)
        assert len(seen) == 5
        assert [pid for pid in seen if exists(pid or 0)] == [server.pid]

    running(work)


@pytest.mark.thorough
def test_imports_that_are_wanted_again_and_again_are_made(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "GATHER_S", 0.5)

    def made() -> int:
        return sum(bool(importers(file)) for file in modules.glob("module_*.py"))

    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        begun_s = time.monotonic()
        for number in itertools.count():
            # Models come and go: those before are not needed any more.
            (modules / f"module_{number}.py").write_text(NOTES)
            NEEDED[:] = [Preload(f"module_{number}")]
            server.preload(NEEDED[0])
            await asyncio.sleep(0.1)
            if number >= 39 and made() >= 2:
                break
            assert time.monotonic() - begun_s < 60, "they are not made while others are wanted"
        await until_pids(server, lambda pids: len(pids) == 1)
        assert made() <= 1 + (time.monotonic() - begun_s) / fork_server.GATHER_S

    running(work)


@pytest.mark.thorough
def test_an_import_that_starts_a_thread_is_left_to_the_forks(modules: Path) -> None:
    (modules / "threaded.py").write_text(THREADED)
    (modules / "quick.py").write_text(NOTES)

    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        first = server.pid
        await preload(server, "threaded", "quick")
        # The other import is made without it.
        await until_pids(server, lambda pids: len(pids) == 1 and server.pid in importers(modules / "quick.py"))
        assert server.pid != first
        assert server.pid not in importers(modules / "threaded.py")
        (await until_forked(server)).wait()
        imported = importers(modules / "threaded.py")
        server.preload(Preload("threaded"))
        await asyncio.sleep(0.2)
        assert (len(server.pids), importers(modules / "threaded.py")) == (1, imported)

    running(work)


def test_a_thread_of_the_first_imports_does_not_prevent_forks(modules: Path) -> None:
    (modules / "threaded.py").write_text(THREADED)
    (modules / "quick.py").write_text(NOTES)

    async def work(server: ForkServer) -> None:
        (await until_forked(server, within_s=60)).wait()
        assert len(importers(modules / "threaded.py")) == 1
        assert server.pid not in importers(modules / "threaded.py")
        assert server.pid in importers(modules / "quick.py")

    running(work, Preload("threaded"), Preload("quick"))


@pytest.mark.thorough
def test_what_is_forked_does_not_inherit_the_priority_of_imports(modules: Path) -> None:
    (modules / "quick.py").write_text(
        NOTES + "pathlib.Path(__file__).with_suffix('.nice').write_text(str(os.nice(0)))\n"
    )
    own = os.getpriority(os.PRIO_PROCESS, 0)

    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        await preload(server, "quick")
        await until_pids(server, lambda pids: len(pids) == 1)
        assert (modules / "quick.nice").read_text() == str(max(LOW, own))
        assert os.getpriority(os.PRIO_PROCESS, server.pid or 0) == own

    running(work)


# What it holds, in cycles as modules do, is garbage when `drops` is imported; it writes down where it is collected.
HOLDS = """
import os, pathlib

class Held:
    def __init__(self):
        self.itself = self

    def __del__(self):
        pathlib.Path(FILE).with_suffix(f".{os.getpid()}").touch()

FILE = __file__
held = [Held()]
"""


def test_garbage_of_earlier_imports_is_collected_after_several(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "KEPT_IMPORTS", 3)
    (modules / "holds.py").write_text(HOLDS)
    (modules / "drops.py").write_text("import holds\nholds.held.clear()\n")
    (modules / "third.py").write_text("")
    (modules / "fourth.py").write_text("")

    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        for name in ("holds", "drops", "third", "fourth"):
            # A collection would copy the memory that each fork server shares with the one before.
            assert importers(modules / "holds.py") == set(), name
            await preload(server, name)
            await until_pids(server, lambda pids: len(pids) == 1)
        assert importers(modules / "holds.py") == {server.pid}

    running(work)


@pytest.mark.thorough
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
        # It is not imported again.
        await asyncio.sleep(0.2)
        assert server.pids == {first}
        # The current one is killed: the next one has its place once it has imported.
        await preload(server, "penstock.core.errors")
        (following,) = server.pids - {first}
        os.kill(first or 0, signal.SIGKILL)
        await until(lambda: server.pid == following)
        (await until_forked(server)).wait()

    running(work)


@pytest.mark.parametrize(
    "source", [thorough("raise SystemExit(3)"), thorough("raise ValueError"), "import no_such_module"]
)
def test_an_import_that_fails_ends_nothing(modules: Path, source: str) -> None:
    (modules / "failing.py").write_text(source)

    async def work(server: ForkServer) -> None:
        first = server.pid
        (await until_forked(server)).wait()
        assert server.pid == first

    running(work, Preload("failing"), Preload(application="failing:app"))


@pytest.mark.thorough
def test_an_application_that_ends_its_process_is_left_to_the_forks(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "RESTART_PAUSE_S", 0.1)
    for number in range(3):
        (modules / f"ending_{number}.py").write_text(NOTES + "os._exit(3)\n")
    (modules / "quick.py").write_text(NOTES)

    async def work(server: ForkServer) -> None:
        (await until_forked(server, within_s=60)).wait()
        assert len(importers(modules / "ending_0.py")) == 1
        NEEDED.extend([Preload(application="ending_1:app"), Preload(application="ending_2:app"), Preload("quick")])
        for each in NEEDED[1:]:
            server.preload(each)
        await until_pids(server, lambda pids: len(pids) == 1 and server.pid in importers(modules / "quick.py"))
        assert [len(importers(modules / f"ending_{number}.py")) for number in range(3)] == [1, 1, 1]

    running(work, Preload(application="ending_0:app"))


@pytest.mark.thorough
def test_an_application_before_one_that_ends_its_process_is_imported_again(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "RESTART_PAUSE_S", 0.1)
    (modules / "whole.py").write_text(NOTES)
    (modules / "ending.py").write_text("import os\nos._exit(3)\n")

    async def work(server: ForkServer) -> None:
        first = server.pid
        # Nothing is forked meanwhile, so the answer to the import of the first is not read before the process ends.
        await until(lambda: server.pid not in (first, None), within_s=60)
        (await until_forked(server, within_s=60)).wait()
        assert importers(modules / "whole.py") == {first, server.pid}

    running(work, Preload(application="whole:app"), Preload(application="ending:app"))


def test_a_fork_server_that_was_killed_or_hangs_is_started_anew(
    monkeypatch: pytest.MonkeyPatch, hanging: set[int]
) -> None:
    monkeypatch.setattr(fork_server, "RESTART_PAUSE_S", 0.1)

    async def work(server: ForkServer) -> None:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            (await until_forked(server)).wait()
            before = server.pid
            assert before is not None
            os.kill(before, number)
            hanging.add(before)
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


async def until_spare(server: ForkServer, *, not_before: int | None = None) -> int:
    end_s = time.monotonic() + 60
    while server.spare_pid in (None, not_before):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)
    assert server.spare_pid is not None
    return server.spare_pid


def test_a_spare_becomes_the_next_process_and_another_one_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "SPARE_S", 0.05)
    monkeypatch.setattr(fork_server, "ADVANCE_S", 0.05)

    async def work(server: ForkServer) -> None:
        first = await until_spare(server)
        assert first != server.pid
        forked = await until_forked(server)
        assert forked.pid == first
        assert first not in server.pids
        forked.wait()
        # Before there is another one, the process itself is forked.
        assert server.spare_pid is None
        between = await until_forked(server)
        assert between.pid != first
        between.wait()
        second = await until_spare(server)
        assert second not in (first, between.pid, server.pid)
        assert (await until_forked(server)).wait() in (0, 1)

    running(work, has_spare=True)


def test_a_spare_makes_further_imports_itself(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "SPARE_S", 0.05)
    monkeypatch.setattr(fork_server, "ADVANCE_S", 0.05)
    monkeypatch.setattr(fork_server, "KEPT_IMPORTS", 2)
    for number in range(3):
        (modules / f"module_{number}.py").write_text(NOTES)

    async def work(server: ForkServer) -> None:
        first = await until_spare(server)
        for number in range(3):
            NEEDED.append(Preload(f"module_{number}"))
            server.preload(NEEDED[-1])
            file = modules / f"module_{number}.py"
            await until(lambda file=file: len(importers(file)) >= 2, within_s=60)
            # The next process made it first, and is the current one by then.
            assert importers(file) == {server.pid, first}
        # After so many, the garbage of its imports goes with it.
        second = await until_spare(server, not_before=first)
        assert (await until_forked(server)).pid == second
        await until(lambda: not exists(first))

    running(work, has_spare=True)


def test_a_spare_that_ended_or_hangs_prevents_no_fork(monkeypatch: pytest.MonkeyPatch, hanging: set[int]) -> None:
    monkeypatch.setattr(fork_server, "SPARE_S", 0.05)
    monkeypatch.setattr(fork_server, "ADVANCE_S", 0.05)
    monkeypatch.setattr(fork_server, "RESTART_PAUSE_S", 0.05)

    async def work(server: ForkServer) -> None:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            spare = await until_spare(server)
            current = server.pid
            os.kill(spare, number)
            hanging.add(spare)
            forked, said = verdict(server)
            assert forked is not None
            assert "there-is-none" in said
            assert forked.pid != spare
            forked.wait()
            assert server.pid == current
            await until_spare(server, not_before=spare)
            await until(lambda spare=spare: not exists(spare))

    running(work, has_spare=True)


@pytest.mark.thorough
def test_a_spare_ends_with_its_fork_server() -> None:
    seen: list[int] = []

    async def work(server: ForkServer) -> None:
        seen.append(await until_spare(server))
        server.pause()
        assert server.spare_pid is None
        server.start()
        seen.append(await until_spare(server))

    running(work, has_spare=True)
    assert len(set(seen)) == 2
    assert not any(map(exists, seen))


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
    eventually(lambda: not exists(process), within_s=30)


def test_a_fork_ends_when_the_supervisor_has_ended_before_it_and_nobody_waits_for_that() -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, supervisor.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{supervisor.pid}").exists()
    # This process is its parent, and not that supervisor.
    program = (
        "from penstock.serve.control.fork_loop import _run\n"
        f"assert _run({{'target': 'fork server', 'parent': {supervisor.pid}}}, [0]) is None\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
    assert supervisor.wait() == 0


ORPHAN = """
import os, sys
child = os.fork()
if child:
    print(child, flush=True)
else:
    sys.stdin.read()
os._exit(0)
"""


def test_orphans_are_waited_for_and_own_children_are_not() -> None:
    async def work(server: ForkServer) -> None:
        (await until_forked(server)).wait()
        # Its child becomes one of this process, which has become the subreaper.
        with subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            orphan = int(parent.stdout.readline())
            assert parent.wait() == 0
        own = subprocess.Popen([sys.executable, "-c", "pass"])
        for pid in (orphan, own.pid):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        reap_orphans({own.pid, *server.pids})
        assert own.wait() == 0
        reap_orphans({*server.pids})
        with pytest.raises(ChildProcessError):
            os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    running(work)

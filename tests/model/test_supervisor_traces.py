"""The real supervisor against the model: whatever is killed and asked for, the model explains what it did."""

import asyncio
import os
import random
import socket
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import RequestError
from penstock.serve.control.supervisor import _Supervisor
from penstock.serve.messages import Heartbeat, LoadProgress, Message
from penstock.serve.settings import BatchSettings, ExecutionSettings, ModelSettings, Settings
from tests.model.supervisor_processes import inside, outside
from tests.model.supervisor_state import FRONTENDS, Rules, State
from tests.model.supervisor_trace import Event, explained, number_of, record, said
from tests.support.fake_processes import PAUSE_S, Chances, Process, Processes
from tests.support.serving import write_doubler
from tests.support.thorough import thorough


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "only" / "1").mkdir(parents=True)
    return Settings(models=ModelSettings(directory=tmp_path), frontends=2)


async def ask(processes: Processes, choose: Callable[[list[Process]], Process], what: str) -> None:
    """Ask a front-end for a change, if one serves; who asks sees an answer, or the end of the connection."""
    serving = [process for process in processes.alive() if process.serves]
    if serving:
        process = choose(serving)
        change = asyncio.create_task(process.side._change("only", what == "unload"))
        process.side._tasks._tasks.add(change)
        with suppress(RequestError, asyncio.CancelledError):
            await asyncio.wait_for(change, 5)


async def happen(supervisor: _Supervisor, processes: Processes, trace: list[Event], events: int) -> None:
    """Kill processes, and ask for loads and unloads."""
    chance = processes.chances.random
    asked: list[asyncio.Task[None]] = []
    for _ in range(events):
        await asyncio.sleep(chance.choice((0, chance.random() * 4 * PAUSE_S)))
        what = chance.choice(("load", "load", "unload", "kill", "kill"))
        alive = processes.alive()
        if what != "kill":
            asked.append(asyncio.create_task(ask(processes, chance.choice, what)))
        elif alive and supervisor._started:
            process = chance.choice(alive)
            trace.append(("kill", process.number))
            process.kill()
        for each in processes.alive():
            if each.number and each.side is not None:
                each.side._front.check()
    await asyncio.gather(*asked)


def traced(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    chances: Chances,
    scene: Callable[[_Supervisor, Processes, list[Event]], Coroutine[Any, Any, None]],
) -> list[Event]:
    """Run a supervisor until the scene ends and nothing happens any more; returns what it did."""
    with monkeypatch.context() as patched:
        trace = record(patched)

        def say(number: int, message: Message) -> None:
            if isinstance(message, LoadProgress):
                return  # not modelled
            event = ("heartbeat",) if isinstance(message, Heartbeat) else said(message)
            assert event is not None, message
            trace.append(("says", number, *event))

        processes = Processes(chances, say, patched)

        async def run() -> None:
            sockets = [socket.socket() for _ in range(2)]
            supervisor = _Supervisor(settings, sockets)
            running = asyncio.create_task(supervisor.run())
            while not supervisor._started:
                await asyncio.sleep(PAUSE_S)
            chances.failing = True
            await scene(supervisor, processes, trace)
            chances.failing = False
            before = -1
            while before < len(trace):
                before = len(trace)
                await asyncio.sleep(20 * PAUSE_S)
            assert not supervisor._repository._models.change_lock.locked()
            assert len(processes.alive()) == 3
            supervisor._signalled()
            await running
            supervisor.kill()
            for wake in {descriptor for child in supervisor._engines for descriptor in child.descriptors}:
                os.close(wake)

        asyncio.run(asyncio.wait_for(run(), 30))
        processes.close()
    return trace


@pytest.mark.parametrize("seed", [0, *map(thorough, range(1, 4)), *range(4, 8), thorough(8), thorough(9)])
def test_the_model_explains_what_the_supervisor_does(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chances = Chances(seed, load_failures=0.1, attach_failures=0.1, find_failures=0.1, exports=0.4)
    trace = traced(settings, monkeypatch, chances, lambda *given: happen(*given, events=25))
    at = explained(trace)
    assert at == len(trace), (at, trace[max(0, at - 8) : at], trace[at : at + 4])


def walked(seed: int) -> list[Event]:
    """A trace of the model itself, whose supervisor seldom looks after one of the front-ends."""
    chance = random.Random(seed)
    rules = Rules(
        boot=True,
        loads=3,
        unloads=2,
        engine_kills=1,
        frontend_kills=2,
        load_failures=1,
        attach_failures=1,
        exports=2,
        steps=3,
        find_failures=1,
        signals=1,
    )
    state, trace, neglected = State(rules), list[Event](), chance.choice(FRONTENDS)
    for _ in range(160):
        if state.ended:
            break
        own, others = list(inside(rules, state)), list(outside(rules, state))
        if chance.random() < 0.9:
            looks = f"receive {neglected}", f"exit {neglected}"
            own = [each for each in own if not each[0].startswith(looks)] or own
        # The start is over first, and the signal comes late.
        likely = {"signal": 0.3} if state.started else {}
        others = [each for each in others if chance.random() < likely.get(each[0], 1.0 if state.started else 0.02)]
        some = others if others and (not own or chance.random() < 0.15) else own
        if not some:
            break
        _, state = chance.choice(some)
        trace += state.seen
    return trace


@pytest.mark.thorough
def test_the_search_explains_whatever_the_model_does() -> None:
    for seed in range(100):
        trace = walked(seed)
        assert explained(trace) == len(trace), seed


@pytest.fixture
def short_trace(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """A front-end is killed, then the engine, then the model is loaded again."""

    async def scene(supervisor: _Supervisor, processes: Processes, trace: list[Event]) -> None:
        for number in (1, 0):
            process = next(process for process in processes.alive() if process.number == number)
            trace.append(("kill", number))
            process.kill()
            while supervisor._repository.states[0].state != "READY" or len(processes.alive()) < 3:
                await asyncio.sleep(PAUSE_S)
            await asyncio.sleep(20 * PAUSE_S)
        # The second front-end, whatever the order of their ends.
        await ask(processes, lambda serving: max(serving, key=lambda process: process.number), "load")

    trace = traced(settings, monkeypatch, Chances(0), scene)
    return trace[: trace.index(("signal",))]


def test_a_trace_without_one_of_its_events_is_refused(short_trace: list[Event]) -> None:
    assert explained(short_trace) == len(short_trace)
    # Without the last event, a trace is the beginning of itself.
    for at, event in list(enumerate(short_trace[:-1]))[::2]:
        assert explained([*short_trace[:at], *short_trace[at + 1 :]]) < len(short_trace) - 1, (at, event)


def test_a_trace_with_events_in_another_order_is_refused(short_trace: list[Event]) -> None:
    refused = 0
    for at, (event, after) in list(enumerate(pairwise(short_trace)))[::2]:
        other = [*short_trace[:at], after, event, *short_trace[at + 2 :]]
        # What two processes do is in no order, and a process may be killed before.
        loose = ("says", "receive", "kill")
        independent = "says" in (event[0], after[0]) or (
            event[0] in loose and after[0] in loose and event[1] != after[1]
        )
        if other != short_trace and not independent:
            assert explained(other) < len(other), (at, event, after)
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    ("event", "other"),
    [
        (("send", 2, "done", 0), ("send", 2, "refused", 0)),
        (("send", 2, "done", 0), ("send", 1, "done", 0)),
        (("send", 0, "load", 2), ("send", 0, "load", 1)),
        (("start", 1), ("start", 0)),
        (("send", 2, "take-over", 1), ("send", 2, "release", 1)),
        (("send", 1, "attach", 1), ("send", 1, "attach", 0)),
    ],
)
def test_a_trace_with_another_event_is_refused(short_trace: list[Event], event: Event, other: Event) -> None:
    at = short_trace.index(event)
    assert explained([*short_trace[:at], other, *short_trace[at + 1 :]]) <= at


@pytest.mark.slow
def test_real_processes_do_what_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A front-end and the engine are killed; then a load, an unload, and the end."""
    (tmp_path / "models").mkdir()
    write_doubler(tmp_path).rename(tmp_path / "models" / "only")
    settings = Settings(
        frontends=2,
        models=ModelSettings(directory=tmp_path / "models"),
        batching=BatchSettings(latency_ms=5000.0),
        execution=ExecutionSettings(device="cpu", executor="torch", cache=tmp_path / "cache"),
    )
    trace = record(monkeypatch)
    with listening() as sockets:

        async def run() -> None:
            supervisor = _Supervisor(settings, sockets)
            running = asyncio.create_task(supervisor.run())

            async def until(condition: Callable[[], bool]) -> None:
                while not condition() and not running.done():
                    await asyncio.sleep(0.01)

            await until(lambda: supervisor._started)
            for child in (supervisor._frontends[0], supervisor._engines[0]):
                starts, process = child.starts, child._process
                assert process is not None
                trace.append(("kill", number_of(child)))
                process.kill()
                await until(lambda child=child, starts=starts: child.starts > starts and child.serving)
                await until(lambda: supervisor._repository.states[0].state == "READY")
            if not running.done():
                await asyncio.to_thread(change, sockets[0], "load")
                await asyncio.to_thread(change, sockets[1], "unload")
                supervisor._signalled()
            try:
                await running
            finally:
                supervisor.kill()
            for wake in {descriptor for child in supervisor._engines for descriptor in child.descriptors}:
                os.close(wake)

        asyncio.run(asyncio.wait_for(run(), 120))
    assert ("exit", 0) in trace
    assert [event[0] for event in trace].count("queue") == 3
    at = explained(trace)
    assert at == len(trace), (at, trace[max(0, at - 8) : at], trace[at : at + 4])


def change(listener: socket.socket, what: str) -> None:
    """Have a server load or unload the model."""
    connection = HTTPConnection(*listener.getsockname(), timeout=60)
    connection.request("POST", f"/v2/repository/models/only/{what}")
    assert connection.getresponse().status == 200
    connection.close()


@contextmanager
def listening() -> Generator[list[socket.socket]]:
    """The listening sockets of two front-ends, each on a port of its own."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()

"""Traces of a real supervisor, and whether the model accepts them.

A trace is what the supervisor receives, sends, starts and sees end, and what is done to it. What happens inside its
processes and between its awaits is not in it: the model searches for steps that explain what is.
"""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any, Literal, final

import pytest

from penstock.serve import messages
from penstock.serve.channel import Channel
from penstock.serve.control.child import ChildProcess
from penstock.serve.control.supervisor import _Supervisor
from penstock.serve.messages import Message
from tests.model import supervisor_model
from tests.model.supervisor_processes import outside, supervised, within
from tests.model.supervisor_state import (
    ENGINE,
    FRONTENDS,
    LOADING,
    READY,
    RESTARTING,
    UNAVAILABLE,
    UNLOADING,
    WITHDRAWN,
    Rules,
    State,
)

Event = tuple[Any, ...]
STATES = {
    "LOADING": LOADING,
    "READY": READY,
    "UNLOADING": UNLOADING,
    "UNAVAILABLE": UNAVAILABLE,
    messages.WITHDRAWN: WITHDRAWN,
}


def number_of(child: ChildProcess) -> int:
    """Number of a process in the model."""
    return ENGINE if child.name == "engine" else child.index + 1


def said(message: Message) -> Event | None:
    """A message of a process as the model has it; None if it is not modelled."""
    match message:
        case messages.ModelLoaded(command=command):
            return "loaded", command.key
        case messages.CommandFailed(key=key):
            return "failed", key
        case messages.CommandDone(key=key):
            return "attached", key
        case messages.TableRetired(key=key):
            return "retired", key
        case messages.FrontendReady():
            return ("ready",)
        case messages.ChangeModel(token=token, unload=unload):
            return "change", token, "unload" if unload else "load"
        case messages.Heartbeat() | messages.LoadProgress() | messages.FrontendUse() | messages.HandedOver():
            return None
        case _:
            raise AssertionError(message)


def sent(child: ChildProcess, message: Message) -> Event | None:
    """A message to a process as the model has it; None if it is not modelled."""
    match message:
        case messages.LoadModel(key=key):
            return "load", key
        case messages.UnloadModel(key=key):
            return "unload", key
        case messages.ModelLoaded(command=command):
            return "attach", command.key
        case messages.RetireTable(key=key):
            return "retire", key
        case messages.DropEngine():
            return ("drop",)
        case messages.ModelState(state=state, reason=reason):
            restarting = state == "LOADING" and reason.startswith(messages.RESTARTING)
            return "state", RESTARTING if restarting else STATES[state]
        case messages.StartListening():
            # The first ones are there when the model begins.
            return ("listen",) if child.starts > 1 else None
        case messages.ServerStarted():
            return ("started",)
        case messages.TakeOverListener(index=index):
            return "take-over", index + 1
        case messages.ReleaseListener(index=index):
            return "release", index + 1
        case messages.Drain():
            return ("drain",)
        case messages.CommandDone(key=token):
            return "done", token
        case messages.CommandFailed(key=token):
            return "refused", token
        case messages.HandOver() | messages.HandedOver():
            return None
        case _:
            raise AssertionError(message)


@final
class RecordedLock(asyncio.Lock):
    """A lock that records in which order changes come to it.

    Args:
        trace: The events.
    """

    def __init__(self, trace: list[Event]) -> None:
        super().__init__()
        self._trace = trace

    async def acquire(self) -> Literal[True]:
        """Come to the lock, and wait for it."""
        task = asyncio.current_task()
        assert task is not None
        coroutine: Any = task.get_coro()
        if coroutine.__name__ == "_change":
            given = coroutine.cr_frame.f_locals
            what = "unload" if given["change"].unload else "load"
            self._trace.append(("queue", what, number_of(given["child"]), given["starts"], given["change"].token))
        # The caller's caller: `restore` takes the lock for more than its loads.
        elif sys._getframe(2).f_code.co_name == "_reload":
            self._trace.append(("queue", "restore"))
        return await super().acquire()


def record(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Record what the next supervisor does."""
    trace: list[Event] = []
    # By the number of a process: how often it was started, and the state of the model that it was told last.
    told: dict[int, tuple[int, Event]] = {}
    make = _Supervisor.__init__
    start, exited, send = ChildProcess.start, ChildProcess._exited, ChildProcess.send
    receive, signalled = _Supervisor._receive, _Supervisor._signalled

    def made_recorded(supervisor: _Supervisor, *given: Any) -> None:
        make(supervisor, *given)
        supervisor._repository._models.change_lock = RecordedLock(trace)

    def start_recorded(child: ChildProcess) -> None:
        start(child)
        if child.starts > 1:
            trace.append(("start", number_of(child)))

    def exited_recorded(child: ChildProcess, exit_fd: int) -> None:
        trace.append(("exit", number_of(child)))
        exited(child, exit_fd)

    def send_recorded(child: ChildProcess, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        channel: Channel | None = child._channel
        event = None if channel is None else sent(child, message)
        if event is not None and isinstance(message, messages.ModelState):
            before = told.get(number_of(child))
            told[number_of(child)] = (child.starts, event)
            # Progress of a load changes the reason alone, but for the first step of an export.
            if message.since_ns and before == (child.starts, event):
                event = None
        if event is not None:
            trace.append(("send", number_of(child), *event))
        send(child, message, descriptors)

    def receive_recorded(
        supervisor: _Supervisor, child: ChildProcess, message: Message, descriptors: list[int]
    ) -> None:
        first = isinstance(message, messages.Heartbeat) and child.name == "engine" and not child.ready
        event = ("heartbeat",) if first else said(message)
        if event is not None:
            trace.append(("receive", number_of(child), *event))
        receive(supervisor, child, message, descriptors)

    def signal_recorded(supervisor: _Supervisor) -> None:
        trace.append(("signal",))
        signalled(supervisor)

    monkeypatch.setattr(_Supervisor, "__init__", made_recorded)
    monkeypatch.setattr(ChildProcess, "start", start_recorded)
    monkeypatch.setattr(ChildProcess, "_exited", exited_recorded)
    monkeypatch.setattr(ChildProcess, "send", send_recorded)
    monkeypatch.setattr(_Supervisor, "_receive", receive_recorded)
    monkeypatch.setattr(_Supervisor, "_signalled", signal_recorded)
    return trace


def explained(trace: list[Event]) -> int:
    """Search for steps of the model that explain a trace.

    Args:
        trace: The events; `"says"` in it are the messages of processes when they are sent, all of them or none.

    Returns:
        How many of them, from the first, can be explained.
    """
    many, says = len(trace), any(event[0] == "says" for event in trace)
    rules = Rules(
        boot=True,
        loads=many,
        unloads=many,
        engine_kills=many,
        frontend_kills=many,
        load_failures=many,
        attach_failures=many,
        exports=many,
        steps=many,
        find_failures=many,
        signals=1,
    )
    waiting: list[tuple[State, int]] = [(State(rules), 0)]
    visited, furthest = {(_key(waiting[0][0]), 0)}, 0
    while waiting:
        state, at = waiting.pop()
        furthest = max(furthest, at)
        if at == len(trace):
            return at
        silent: list[tuple[State, int]] = []
        telling: list[tuple[State, int]] = []
        for after in steps(rules, state, trace[at:], says=says):
            seen = after.seen if says else [event for event in after.seen if event[0] != "says"]
            end = at + len(seen)
            if trace[at:end] == seen and (place := (_key(after), end)) not in visited:
                visited.add(place)
                (telling if seen else silent).append((after, end))
        # The last one is tried first: what explains an event before what does not.
        waiting += [*silent, *telling]
    return furthest


def _key(state: State) -> tuple[Any, ...]:
    """Return what makes a state itself, where budgets do not end and no event names one of the restores."""
    made = state.copy()
    made.budget = {}
    made.lock = tuple(("restore",) if name[0] == "restore" else name for name in state.lock)
    places = {name: place for place, name in enumerate(state.lock)}
    unnamed = (
        task._replace(name=("restore", places.get(task.name, -1))) if task.name[0] == "restore" else task
        for task in state.tasks
    )
    made.tasks = tuple(sorted(unnamed))
    return made.key()


def _may_end_unread(state: State, process: int) -> bool:
    """Tell whether a front-end may exit by itself before its messages are received."""
    drains = state.fronts[process].draining or ("drain",) in state.to[process]
    return drains and bool(state.back[process])


def steps(rules: Rules, state: State, left: list[Event], *, says: bool) -> Iterator[State]:
    """Yield each next state.

    Where a trace has all messages of processes, a step of a process without a message has no effect on others. It is
    left out until the next event is of this process. Otherwise the search would try all orders of such steps. The exit
    of a draining front-end is the exception: its unread messages are lost if the supervisor sends to it afterwards.

    Args:
        rules: The rules.
        state: The state.
        left: What is left of the trace. Without messages of processes, faults and requests that it has nothing of are
            left out.
        says: Whether the trace has these messages.
    """
    if state.ended:
        return
    for task in state.tasks:
        if task.name[0] == "retire" and task.at == "retired":
            # The end of this task has no effect on others, so the order of such ends is not searched either.
            yield supervisor_model.step(rules, state.copy(), task)
            return
    for _, after in supervised(rules, state):
        yield after
    own = left[0][1] if left[0][0] in ("says", "exit") else None
    for process in (ENGINE, *FRONTENDS):
        searched = not says or process == own or _may_end_unread(state, process)
        for _, after in within(rules, state, process):
            if searched or after.seen:
                yield after
    for label, after in outside(rules, state):
        name, *number = label.split()
        if says or name in ("kill-engine", "kill-front-end", "export", "step", "fail-find", "signal"):
            yield after
            continue
        process = int(number[0])
        # Of a load that fails, the number is its key.
        event: Event = "receive", ENGINE, "failed", process
        if name != "fail-load":
            front = state.fronts[process]
            change = "change", front.asked, name
            event = "receive", process, *(("failed", front.importing) if name == "fail-attach" else change)
        if event in left:
            yield after

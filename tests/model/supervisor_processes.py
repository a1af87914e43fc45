"""What happens around the model of the supervisor: its engine and front-ends, their ends, clients and signals.

Penstock's own files are serve/engine/engine_process.py, serve/control/frontend_process.py and serve/control/child.py.
"""

from collections.abc import Iterator
from typing import Any

from tests.model import supervisor_model as supervisor
from tests.model.explorer import Violation
from tests.model.supervisor_state import (
    DEAD,
    ENGINE,
    FRONTENDS,
    HUNG,
    OFF,
    READY,
    RESTARTING,
    UNAVAILABLE,
    UNLOADING,
    UP,
    WITHDRAWN,
    Front,
    Rules,
    State,
)

# As `_IN_ORDER` of frontend_process.py.
IN_ORDER = ("attach", "retire", "listen", "started")


def successors(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    """Yield what the server does by itself, then what may come from outside; where it does nothing, it must be idle."""
    check(state)
    if state.ended:
        check_ended(state)
        return
    does_something = False
    for label, made in inside(rules, state):
        does_something = True
        yield label, made
    if not does_something:
        check_idle(state)
    yield from outside(rules, state)


def inside(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    """Yield each next step of the supervisor and of its processes."""
    yield from supervised(rules, state)
    for process in (ENGINE, *FRONTENDS):
        yield from within(rules, state, process)


def within(rules: Rules, state: State, process: int) -> Iterator[tuple[str, State]]:
    """Yield each next step of a process by itself."""
    if state.life[process] == UP:
        yield from _engine(state) if process == ENGINE else _frontend(rules, state, process)


def supervised(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    """Yield each next step of the supervisor."""
    for task in state.tasks:
        if supervisor.can_step(state, task):
            yield f"s:{task.at} {task.name}", supervisor.step(rules, state.copy(), task)
    for key in state.late:
        if supervisor.awaits_load(state, key):
            yield f"deadline {key}", supervisor.deadline(rules, state.copy(), key)
    for process, life in enumerate(state.life):
        if state.back[process] and life != OFF:
            yield f"receive {process} {state.back[process][0]}", supervisor.receive(rules, state.copy(), process)
        if life == DEAD:
            yield f"exit {process}", supervisor.exited(rules, state.copy(), process)
        elif life == HUNG and rules.watchdog_kills:
            yield f"watchdog {process}", killed(state.copy(), process)
        elif life == OFF and not state.stopping:
            yield f"restart {process}", supervisor.restart(rules, state.copy(), process)
    if state.stopping == "front-ends" and all(state.life[process] == OFF for process in FRONTENDS):
        yield "front-ends-drained", supervisor.frontends_drained(state.copy())
    if state.stopping == "engine" and state.life[ENGINE] == OFF:
        yield "engine-drained", supervisor.end(rules, state.copy(), "drained")


def outside(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    """Yield everything that may befall the server."""
    for name, process in (("kill-engine", ENGINE), *(("kill-front-end", process) for process in FRONTENDS)):
        if state.budget[name] and state.life[process] == UP:
            made = killed(_spend(state, name), process)
            made.seen.append(("kill", process))
            yield f"{name} {process}", made
    for process, life in enumerate(state.life):
        if state.budget["hang"] and life == UP:
            made = _spend(state, "hang")
            made.life[process] = HUNG
            yield f"hang {process}", made
        if state.budget["fail-start"] and life == OFF and not state.stopping:
            yield f"fail-start {process}", failed_start(rules, _spend(state, "fail-start"), process)
    if state.budget["heartbeat"] and state.life[ENGINE] == UP and state.engine_said:
        made = _spend(state, "heartbeat")
        say(made, ENGINE, "heartbeat")
        yield "heartbeat", made
    for what in ("load", "unload"):
        for process in FRONTENDS:
            front = state.fronts[process]
            connected = front.listening or front.accepts
            if state.budget[what] and state.life[process] == UP and connected and not front.starting:
                yield f"{what} {process}", ask(_spend(state, what), process, what)
    yield from _exports(rules, state)
    yield from _failures(rules, state)
    if state.budget["signal"] and not state.stopping:
        yield "signal", supervisor.signalled(rules, _spend(state, "signal"))
    # The time of a drain is over.
    if state.stopping == "front-ends" and HUNG in state.life:
        yield "drain-late", supervisor.frontends_drained(state.copy())


def _exports(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    """Yield what may happen to a load before it has found its model, and to a restarted engine before its load."""
    unread = any(state.life[process] == DEAD and state.back[process] for process in FRONTENDS)
    for task in state.tasks:
        if state.budget["export"] and task.at == "missing":
            yield f"export {task.name}", supervisor.export(_spend(state, "export"), task)
        said = supervisor.said_by_step(rules, state, task) if state.budget["step"] else ""
        if said and (unread or said != state.published):
            yield f"step {task.name}", supervisor.say_step(_spend(state, "step"), said)
        if state.budget["fail-find"] and task.name[0] == "load" and task.at == "lock" and state.lock[0] == task.name:
            for there in ("damaged", "removed"):
                made = supervisor.not_found(rules, _spend(state, "fail-find"), task, there)
                yield f"fail-find {task.name} {there}", made


def _failures(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    for key in state.loading if state.life[ENGINE] == UP else ():
        if state.budget["fail-load"]:
            made = _spend(state, "fail-load")
            made.loading = _without(made.loading, key)
            say(made, ENGINE, "failed", key)
            yield f"fail-load {key}", made
        if state.budget["late"] and key not in state.late and supervisor.awaits_load(state, key):
            made = _spend(state, "late")
            made.late += (key,)
            yield f"late {key}", made
    for process in FRONTENDS:
        if state.budget["fail-attach"] and state.life[process] == UP and state.fronts[process].importing is not None:
            yield f"fail-attach {process}", imported(rules, _spend(state, "fail-attach"), process, fails=True)


def _spend(state: State, name: str) -> State:
    made = state.copy()
    made.budget[name] -= 1
    return made


def say(state: State, process: int, *message: Any) -> None:
    """Send a message to the supervisor."""
    state.seen.append(("says", process, *message))
    state.back[process] += (message,)


def ask(state: State, process: int, what: str) -> State:
    """Ask a front-end to load or unload the model."""
    front = state.fronts[process]
    state.fronts[process] = front._replace(asked=front.asked + 1, open=(*front.open, front.asked))
    say(state, process, "change", front.asked, what)
    return state


def killed(state: State, process: int) -> State:
    """Kill a process: what it sent can still be read."""
    state.life[process], state.to[process] = DEAD, ()
    if process == ENGINE:
        state.engine_said, state.loading, state.late, state.engine_tables = False, (), (), ()
    else:
        # Its clients see that their connection ends.
        state.fronts[process] = Front(state=state.fronts[process].state)
    return state


def failed_start(rules: Rules, state: State, process: int) -> State:
    """Fail in the middle of a start, after the process was made."""
    if not rules.ends_half_starts and process == ENGINE:
        state.strays += 1
    if not rules.retries_starts:
        state.stopping = "never"
    return state


# The engine.


def _engine(state: State) -> Iterator[tuple[str, State]]:
    if not state.engine_said:
        made = state.copy()
        made.engine_said = True
        say(made, ENGINE, "heartbeat")
        yield "e:heartbeat", made
        return
    if state.to[ENGINE]:
        made = state.copy()
        (name, key), made.to[ENGINE] = made.to[ENGINE][0], made.to[ENGINE][1:]
        if name == "load":
            made.loading += (key,)
        else:
            made.engine_tables = _without(made.engine_tables, key)
        yield f"e:{name} {key}", made
    for key in state.loading:
        if key not in state.late:
            made = state.copy()
            made.loading = _without(made.loading, key)
            made.engine_tables += (key,)
            say(made, ENGINE, "loaded", key)
            yield f"e:loaded {key}", made


# A front-end.


def _frontend(rules: Rules, state: State, process: int) -> Iterator[tuple[str, State]]:
    front = state.fronts[process]
    if state.to[process]:
        made = state.copy()
        message, made.to[process] = made.to[process][0], made.to[process][1:]
        in_order = IN_ORDER if rules.listens_in_order else ("attach", "retire", "started")
        if front.importing is not None and message[0] in in_order:
            made.fronts[process] = front._replace(waiting=(*front.waiting, message))
        else:
            frontend_receives(rules, made, process, message)
        yield f"f:{message[0]} {process}", made
    if front.importing is not None:
        yield f"f:imported {process}", imported(rules, state.copy(), process, fails=False)
    if front.becoming:
        made = state.copy()
        made.fronts[process] = front._replace(starting=False, becoming=False)
        say(made, process, "ready")
        yield f"f:ready {process}", made
    for key in front.retiring:
        made = state.copy()
        _detach(made, process, key)
        say(made, process, "retired", key)
        yield f"f:retired {process}", made
    if front.draining:
        yield f"f:end {process}", killed(state.copy(), process)


def frontend_receives(rules: Rules, state: State, process: int, message: tuple[Any, ...]) -> None:
    """Handle a message of the supervisor."""
    front = state.fronts[process]
    match message:
        case ["attach", key] if key in front.tables:
            _served(state, process, key)
            return
        case ["attach", key]:
            made = front._replace(importing=key)
        case ["retire", key]:
            # A model whose engine is lost goes with its last table.
            made = front._replace(
                lost=None if front.lost == key else front.lost,
                served=None if front.served == key else front.served,
                retiring=(*front.retiring, key),
                refused=_without(front.refused, key),
            )
        case ["drop"]:
            gone = [front.importing, *(each[1] for each in front.waiting if each[0] == "attach")]
            made = front._replace(
                tables=(), lost=front.served if front.served in front.tables else front.lost, gone=tuple(gone)
            )
            if not rules.lost_while_importing:
                made = made._replace(gone=())
        case ["state", said]:
            goes = said in (UNLOADING, UNAVAILABLE, WITHDRAWN) or not rules.says_not_attached
            made = front._replace(state="" if said == WITHDRAWN else said, not_attached=front.not_attached and not goes)
        case ["listen"]:
            made = front._replace(listening=True)
        case ["started"]:
            made = front._replace(becoming=True)
        case ["take-over", index]:
            made = front._replace(accepts=(*front.accepts, index))
        case ["release", index]:
            made = front._replace(accepts=_without(front.accepts, index))
        case ["drain"]:
            made = front._replace(draining=True, listening=False, accepts=())
        case ["done" | "refused", token]:
            if token not in front.open:
                raise Violation("each change is answered exactly once", (message, front.open))
            made = front._replace(open=_without(front.open, token))
        case _:
            raise AssertionError(message)
    state.fronts[process] = made


def imported(rules: Rules, state: State, process: int, *, fails: bool) -> State:
    """Attach the table whose application is imported now, and handle what has waited for it."""
    front = state.fronts[process]
    key = front.importing
    assert key is not None
    state.fronts[process] = front._replace(importing=None, gone=_without(front.gone, key))
    if key in front.gone:
        say(state, process, "attached", key)
    elif fails:
        say(state, process, "failed", key)
        if front.starting or (key in front.refused and rules.remembers_refused):
            refused = (*_without(front.refused, key), key)
            state.fronts[process] = state.fronts[process]._replace(not_attached=True, refused=refused)
    else:
        _served(state, process, key)
    while state.fronts[process].waiting and state.fronts[process].importing is None:
        message, *rest = state.fronts[process].waiting
        state.fronts[process] = state.fronts[process]._replace(waiting=tuple(rest))
        frontend_receives(rules, state, process, message)
    return state


def _served(state: State, process: int, key: int) -> None:
    front = state.fronts[process]
    tables = front.tables if key in front.tables else (*front.tables, key)
    state.fronts[process] = front._replace(tables=tables, served=key, lost=None, not_attached=False)
    say(state, process, "attached", key)


def _detach(state: State, process: int, key: int) -> None:
    front = state.fronts[process]
    state.fronts[process] = front._replace(tables=_without(front.tables, key), retiring=_without(front.retiring, key))


def _without(keys: tuple[int, ...], key: int) -> tuple[int, ...]:
    return tuple(each for each in keys if each != key)


# Invariants.


def check(state: State) -> None:
    """Check what holds at every moment.

    Raises:
        Violation: It does not.
    """
    if state.strays and state.life[ENGINE] in (UP, HUNG):
        raise Violation("only one engine runs", state.strays)
    for process in FRONTENDS:
        if state.life[process] == UP:
            _check_front(state, process)
    _check_sockets(state)


def _check_front(state: State, process: int) -> None:
    front = state.fronts[process]
    if front.ready and front.not_found:
        raise Violation("a front-end that is ready answers for every model that is said to be ready", front)
    accepts = front.listening or front.accepts
    if accepts and state.started and state.starts[process] > 1 and front.not_found:
        raise Violation("a front-end takes connections once it is attached", front)
    # Of a table that is attached, the engine lives, or its end is on its way here.
    said = ("drop",) in state.to[process] or state.life[ENGINE] == DEAD
    made = {key for key, starts in state.tables if starts == state.starts[ENGINE] and state.life[ENGINE] != OFF}
    retired = {message[1] for message in (*state.to[process], *front.waiting) if message[0] == "retire"}
    for key in front.tables:
        if not said and key not in made | retired | set(front.retiring):
            raise Violation("an attached table belongs to the engine that runs", (key, front, state.tables))


def _check_sockets(state: State) -> None:
    """While a front-end serves, every socket has one that accepts from it, or will with its next messages."""
    alive = [process for process in FRONTENDS if state.life[process] == UP]
    unnoticed = any(state.life[process] in (DEAD, HUNG) for process in FRONTENDS)
    if not state.started or state.stopping or unnoticed or not any(state.serving[process] for process in alive):
        return
    for index in FRONTENDS:
        own = index in alive and state.fronts[index].listening
        taken = any(
            index in state.fronts[process].accepts or ("take-over", index) in state.to[process] for process in alive
        )
        if not own and not taken:
            raise Violation("every socket has a front-end that accepts", index)


def check_idle(state: State) -> None:
    """Check a state in which the server does nothing more by itself.

    Raises:
        Violation: Something stands still.
    """
    if state.life != [UP] * 3 or state.stopping:
        raise Violation("what ends is started again", (state.life, state.stopping))
    for process in FRONTENDS:
        if state.fronts[process].open:
            raise Violation("each change is answered exactly once", (process, state.fronts[process].open))
    if state.lock or state.tasks:
        raise Violation("the lock becomes free", (state.lock, state.tasks))
    if state.published not in ((UNAVAILABLE, "") if state.model is None else (READY, RESTARTING)):
        raise Violation("a state ends with what it is of", (state.published, state.model))
    if state.model is not None and state.model[0] is None:
        raise Violation("a restarted engine gets its models back", state.model)
    key = None if state.model is None else state.model[0]
    keys = () if key is None else (key,)
    if (state.keys, state.attached, state.engine_tables) != (keys, keys, keys):
        raise Violation("no table is left over", (state.keys, state.attached, state.engine_tables, keys))
    for process in FRONTENDS:
        front = state.fronts[process]
        serves = (front.tables, front.served, front.state) == (keys, key, state.published)
        if not (serves or (front.not_attached and key is not None)) or front.lost is not None or front.starting:
            raise Violation("every front-end is attached to the engine that runs", (process, front, keys))
        if not front.listening or front.accepts:
            raise Violation("every front-end accepts from its own socket", (process, front))


def check_ended(state: State) -> None:
    """Check the end of the server.

    Raises:
        Violation: It left something behind.
    """
    if state.life != [OFF] * 3 or state.strays:
        raise Violation("nothing outlives the server", (state.life, state.strays))

"""A model of the supervisor and its repository, in penstock/serve/control/, one await at a time.

`docs/architecture.md` lists the modules that are modelled.

`--leave-s` is 0 here: otherwise `Leave` precedes `Drain`, and changes nothing that is modelled.

A coroutine goes on at any moment after what it awaits is there, and other things happen before: so between the end of a
process and the next step of a load lies every interleaving. Only the lock of the repository is handed on in order.

What precedes the lock, trials and exports, is the time before a task queues for it; an export says what it does.
"""

from typing import Any

from tests.model.explorer import Violation
from tests.model.supervisor_state import (
    DEAD,
    ENGINE,
    FRONTENDS,
    LOADING,
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
    Task,
)


def send(state: State, process: int, *message: Any) -> None:
    """Send a message. It closes the channel of a process that has ended, and with it what that one has sent."""
    if state.life[process] == OFF:
        return
    state.seen.append(("send", process, *message))
    if state.life[process] == DEAD:
        state.back[process] = ()
    else:
        state.to[process] += (message,)


def receive(rules: Rules, state: State, process: int) -> State:
    """Handle the next message of a process."""
    message, state.back[process] = state.back[process][0], state.back[process][1:]
    state.seen.append(("receive", process, *message))
    match message:
        case ["heartbeat"]:
            first_after_restart = not state.ready and state.starts[ENGINE] > 1
            state.ready = state.serving[ENGINE] = True
            if first_after_restart and rules.restores_after_restart:
                _start_task(state, Task(("restore", _unused(state, "restore"))))
        case ["loaded", key]:
            if not _resolve(state, (process, "load", key)) and rules.unloads_late_loads:
                send(state, process, "unload", key)
        case ["failed", key]:
            _resolve(state, (process, "load" if process == ENGINE else "attach", key), "failed")
        case ["attached", key]:
            _resolve(state, (process, "attach", key))
        case ["retired", key]:
            _resolve(state, (process, "retire", key))
        case ["ready"]:
            state.serving[process] = True
            _arrange_takeovers(rules, state)
            _resolve(state, (process, "started", 0))
        case ["change", token, what]:
            _start_task(state, Task((what, process, state.starts[process], token)))
        case _:
            raise AssertionError(message)
    return state


def exited(rules: Rules, state: State, process: int) -> State:
    """Notice the end of a process: read its last messages, fail what it was to do, forget what it had."""
    state.seen.append(("exit", process))
    # An engine that was ready before this one is: what its last messages say must not count for the next one.
    if not rules.forgets_readiness_at_exit and process == ENGINE:
        state.ready = False
    while state.back[process]:
        receive(rules, state, process)
    if rules.forgets_readiness_at_exit and process == ENGINE:
        state.ready = False
    state.serving[process], state.life[process], state.to[process] = False, OFF, ()
    if process == ENGINE:
        _engine_exited(rules, state)
    else:
        for task in state.tasks if rules.exit_ends_waits_for_a_front_end else ():
            for wait in task.waits:
                if wait[0] == process:
                    _resolve(state, wait)
    if not state.started:
        return end(rules, state, "the start failed")
    if process != ENGINE:
        if rules.replaces_acting_front_end:
            state.takeovers = [None if acting == process else acting for acting in state.takeovers]
        _arrange_takeovers(rules, state)
    return state


def _engine_exited(rules: Rules, state: State) -> None:
    state.engine_said, state.loading, state.late, state.engine_tables = False, (), (), ()
    if not rules.state_before_drop:
        _drop(state)
    for task in state.tasks if rules.exit_fails_loads else ():
        for wait in task.waits:
            if wait[0] == ENGINE:
                _resolve(state, wait, "lost")
    if rules.exit_drops_tables:
        state.tables = state.attached = ()
    if state.model is not None:
        state.model = (None, state.model[1])
        publish(state, RESTARTING)
    # After the state: a front-end that has no table any more must not be ready.
    if rules.state_before_drop:
        _drop(state)


def _drop(state: State) -> None:
    for front in FRONTENDS:
        send(state, front, "drop")


def restart(rules: Rules, state: State, process: int) -> State:
    """Start the next process of one that has ended."""
    state.seen.append(("start", process))
    state.life[process], state.to[process] = UP, ()
    state.starts[process] += 1
    if process == ENGINE:
        return state
    state.fronts[process] = Front()
    if state.published:
        send(state, process, "state", state.published)
    for key in state.attached if rules.attaches_in_order else sorted(state.attached):
        send(state, process, "attach", key)
    send(state, process, "listen")
    if state.started:
        send(state, process, "started")
    acting = state.takeovers[process]
    if acting is not None and not rules.hands_over_when_attached:
        send(state, acting, "release", process)
        state.takeovers[process] = None
    return state


def _arrange_takeovers(rules: Rules, state: State) -> None:
    serving = [each for each in FRONTENDS if state.serving[each]]
    if not state.started or state.stopping or not serving:
        return
    for process in FRONTENDS:
        acting = state.takeovers[process]
        if state.serving[process] and acting is not None:
            send(state, acting, "release", process)
            state.takeovers[process] = None
        elif not state.serving[process] and acting is None:
            send(state, serving[0], "take-over", process)
            state.takeovers[process] = serving[0]


def signalled(rules: Rules, state: State) -> State:
    """Stop: drain what serves, end what starts."""
    state.seen.append(("signal",))
    if not state.started:
        return end(rules, state, "stopped")
    state.stopping = "front-ends"
    for front in FRONTENDS:
        send(state, front, "drain")
    return state


def frontends_drained(state: State) -> State:
    """Go on with the engine, when every front-end has ended or its time is over."""
    state.stopping = "engine"
    # Its channel is closed, at which it ends itself.
    state.back[ENGINE] = state.to[ENGINE] = ()
    if state.life[ENGINE] == UP:
        state.life[ENGINE] = DEAD
    return state


def end(rules: Rules, state: State, status: str) -> State:
    """End the supervisor, and with it every process."""
    state.ended, state.tasks, state.lock = status, (), ()
    if rules.kills_at_the_end:
        state.life = [OFF] * 3
    return state


def publish(state: State, model_state: str) -> None:
    """Publish the state of the model."""
    state.published = "" if model_state == WITHDRAWN else model_state
    for front in FRONTENDS:
        send(state, front, "state", model_state)


# Coroutines.


def _start_task(state: State, task: Task) -> None:
    state.tasks = tuple(sorted((*state.tasks, task)))


def _unused(state: State, kind: str) -> int:
    used = {task.name[1] for task in state.tasks if task.name[0] == kind}
    return next(number for number in range(len(used) + 1) if number not in used)


def _put(state: State, task: Task, after: Task | None) -> None:
    others = [each for each in state.tasks if each.name != task.name]
    state.tasks = tuple(sorted(others if after is None else [*others, after]))


def _resolve(state: State, command: tuple[int, str, int], error: str = "") -> bool:
    """Give the task that waits for a command its result; returns whether one does."""
    for task in state.tasks:
        if command in task.waits:
            waits = tuple(wait for wait in task.waits if wait != command)
            _put(state, task, task._replace(waits=waits, error=task.error or error))
            return True
    return False


def can_step(state: State, task: Task) -> bool:
    """Whether a task may go on: the first failure of several commands is enough."""
    if task.at == "lock":
        return state.lock[0] == task.name
    if task.name[0] == "restore" and task.at in ("new", "exporting"):
        # It takes the lock to look what is missing, and does not wait while it has it.
        return not any(each.name == state.lock[0] and each.at != "lock" for each in state.tasks if state.lock)
    return not task.waits or bool(task.error)


def step(rules: Rules, state: State, task: Task) -> State:
    """Go on with a task, to its next await."""
    # What was not replied to has nobody who waits for it any more.
    task = task._replace(waits=())
    match task.at:
        case "retire" | "undo":
            _retire(state, task)
        case "new" | "exporting" if task.name[0] == "restore" and not _is_missing(state):
            _finish(rules, state, task)
        case "new" | "exporting" if task.name[0] == "restore":
            _put(state, task, task._replace(at={"new": "missing", "exporting": "exported"}[task.at]))
        case "new" | "missing" | "exported":
            state.seen.append(("queue", *task.name) if task.name[0] != "restore" else ("queue", "restore"))
            state.lock += (task.name,)
            _put(state, task, task._replace(at="lock"))
        case "lock":
            _locked(rules, state, task)
        case "locked":
            _publish_loading(state, task)
        case "choosing":
            lost = state.life[ENGINE] == OFF or not (state.ready or state.starts[ENGINE] == 1)
            if lost:
                _fail(rules, state, task._replace(error="lost"))
            else:
                _put(state, task, task._replace(at="pinned"))
        case "pinned":
            _load(state, task)
        case "loading":
            _loaded(rules, state, task)
        case "loaded" if task.key in state.keys:
            _attach(rules, state, task, task.key, "attaching")
        case "loaded":
            _undo(rules, state, task._replace(error="lost"))
        case "attaching":
            _attached(rules, state, task)
        case "giving-back":
            if task.error == "failed" and not rules.undoes_whatever_fails:
                _fail(rules, state, task)
            else:
                _put(state, task, task._replace(at="undo"))
        case "retiring" | "undoing":
            _retired(state, task)
        case "retired":
            if task.name[0] == "unload":
                publish(state, UNAVAILABLE)
            _finish(rules, state, task, "done" if task.name[0] == "unload" else "")
        case "undone":
            _fail(rules, state, task)
        case "starting":
            state.started = True
            _finish(rules, state, task)
        case _:
            raise AssertionError(task)
    return state


def _is_missing(state: State) -> bool:
    """Whether the model is to be served, and its engine does not have it."""
    return state.model is not None and state.model[0] is None


def _locked(rules: Rules, state: State, task: Task) -> None:
    kind = task.name[0]
    if kind == "restore":
        if _is_missing(state) or not rules.looks_again_with_the_lock:
            _load(state, task)
        else:
            # It was replaced, unloaded or loaded again in between.
            _finish(rules, state, task)
            _start_task(state, Task(task.name))
    elif kind == "load":
        _publish_loading(state, task._replace(new=state.model is None))
    elif state.model is None:
        _finish(rules, state, task, "refused")
    else:
        task = task._replace(key=state.model[1])
        state.model = None
        if rules.unloading_before_retire:
            publish(state, UNLOADING)
        _put(state, task, task._replace(at="retire"))


def _publish_loading(state: State, task: Task) -> None:
    if task.new:
        publish(state, LOADING)
    _put(state, task, task._replace(at="choosing"))


def _load(state: State, task: Task) -> None:
    """Order a load; the content is pinned, and the engine may have ended meanwhile."""
    key, state.next_key = state.next_key, state.next_key + 1
    task = task._replace(key=key, at="loading", error="", why="", starts=state.starts[ENGINE])
    if state.life[ENGINE] == OFF:
        _put(state, task, task._replace(error="lost"))
    else:
        send(state, ENGINE, "load", key)
        _put(state, task, task._replace(waits=((ENGINE, "load", key),)))


def _loaded(rules: Rules, state: State, task: Task) -> None:
    same = state.life[ENGINE] != OFF and state.starts[ENGINE] == task.starts
    if not task.error and rules.checks_engine_after_load and not same:
        task = task._replace(error="lost")
    if task.error:
        _fail(rules, state, task)
        return
    state.tables += ((task.key, task.starts),)
    if not rules.ready_after_attach:
        publish(state, READY)
    _put(state, task, task._replace(at="loaded"))


def _attach(rules: Rules, state: State, task: Task, key: int, at: str) -> None:
    if rules.lists_table_before_attach:
        # At the end, where it was attached before: a front-end that is started serves the last one.
        state.attached = (*(each for each in state.attached if each != key), key)
    fronts = [front for front in FRONTENDS if state.life[front] != OFF]
    for front in fronts:
        send(state, front, "attach", key)
    _put(state, task, task._replace(at=at, error="", waits=tuple((front, "attach", key) for front in fronts)))


def _attached(rules: Rules, state: State, task: Task) -> None:
    if not task.error and task.key not in state.keys and rules.checks_table_after_attach:
        task = task._replace(error="lost")
    if task.error:
        _undo(rules, state, task)
        return
    before = state.model
    if task.key not in state.attached and task.key in state.keys:
        state.attached += (task.key,)
    state.model = (task.key, task.key)
    publish(state, READY)
    if task.name[0] == "start":
        fronts = [front for front in FRONTENDS if state.life[front] != OFF]
        for front in fronts:
            send(state, front, "started")
        _release(state, task)
        _put(state, task, task._replace(at="starting", waits=tuple((front, "started", 0) for front in fronts)))
        return
    if before is not None and before[0] is not None and task.name[0] == "load" and rules.retires_replaced:
        _start_task(state, Task(("retire", before[0]), at="retire", key=before[0]))
    _finish(rules, state, task, "done" if task.name[0] == "load" else "")
    if task.name[0] == "restore":
        # It looks again whether anything is missing.
        _start_task(state, Task(task.name))


def _undo(rules: Rules, state: State, task: Task) -> None:
    """Give the name back to the version before, unless its engine is lost too, and then retire the new one."""
    before = None if state.model is None else state.model[0]
    task = task._replace(why=task.error)
    if task.name[0] == "load" and before in state.keys and rules.gives_name_back:
        _attach(rules, state, task, before, "giving-back")
    else:
        _put(state, task, task._replace(at="undo", error=""))


def _retire(state: State, task: Task) -> None:
    state.attached = tuple(key for key in state.attached if key != task.key)
    fronts = [front for front in FRONTENDS if state.life[front] != OFF]
    for front in fronts:
        send(state, front, "retire", task.key)
    at = {"retire": "retiring", "undo": "undoing"}[task.at]
    _put(state, task, task._replace(at=at, error="", waits=tuple((front, "retire", task.key) for front in fronts)))


def _retired(state: State, task: Task) -> None:
    state.attached = tuple(key for key in state.attached if key != task.key)
    if task.key in state.keys:
        send(state, ENGINE, "unload", task.key)
        state.tables = tuple(table for table in state.tables if table[0] != task.key)
    _put(state, task, task._replace(at={"retiring": "retired", "undoing": "undone"}[task.at]))


def _fail(rules: Rules, state: State, task: Task) -> None:
    kind = task.name[0]
    if kind == "start":
        end(rules, state, "the start failed")
    elif kind == "load":
        if task.new:
            publish(state, UNAVAILABLE)
        _finish(rules, state, task, "refused")
    else:
        if state.model is not None and state.model[0] is None:
            publish(state, RESTARTING)
        _finish(rules, state, task)
        # One that lost its engine is started again with the next one.
        if "failed" in (task.error, task.why) and rules.retries_restore:
            _start_task(state, Task(task.name))


def _release(state: State, task: Task) -> None:
    state.lock = tuple(name for name in state.lock if name != task.name)


def _finish(rules: Rules, state: State, task: Task, answer: str = "") -> None:
    """End a task, and answer a change to the process that asked for it: the next one has no such token."""
    if answer != "refused" or rules.releases_lock_on_failure:
        _release(state, task)
    _put(state, task, None)
    if answer:
        _, front, starts, token = task.name
        if state.starts[front] == starts or not rules.answers_the_same_process:
            send(state, front, answer, token)


def export(state: State, task: Task) -> State:
    """Begin an export for a restarted engine; before a load, it is the time until that one queues for the lock."""
    _put(state, task, task._replace(at="exporting"))
    return state


def said_by_step(rules: Rules, state: State, task: Task) -> str:
    """State that a step of an export or of a load publishes; empty where the model is served, or none is said."""
    kind, at = task.name[0], task.at
    if at != "loading" and (kind, at) not in (("load", "new"), ("restore", "exporting")):
        return ""
    if state.model is None:
        # The export for an engine may outlast the model.
        return LOADING if kind != "restore" or not rules.says_only_what_is_served else ""
    return RESTARTING if state.model[0] is None else ""


def say_step(state: State, said: str) -> State:
    """Publish a step. Where it changes the reason alone, it still closes the channels of front-ends that have ended."""
    if said != state.published:
        publish(state, said)
    for front in FRONTENDS:
        if state.life[front] == DEAD:
            state.back[front] = ()
    return state


def not_found(rules: Rules, state: State, task: Task, there: str) -> State:
    """Refuse a load whose model was removed or damaged since its export."""
    if rules.ends_what_was_exported and state.model is None and state.published == LOADING:
        publish(state, WITHDRAWN if there == "removed" else UNAVAILABLE)
    _finish(rules, state, task, "refused")
    return state


def deadline(rules: Rules, state: State, key: int) -> State:
    """Give up the load of which a step takes too long; the engine may still finish it."""
    state.seen.append(("deadline", key))
    state.late = tuple(late for late in state.late if late != key)
    if not _resolve(state, (ENGINE, "load", key), "failed"):
        raise Violation("a deadline belongs to a load", key)
    return state


def awaits_load(state: State, key: int) -> bool:
    """Whether a task waits for a load."""
    return any((ENGINE, "load", key) in task.waits for task in state.tasks)

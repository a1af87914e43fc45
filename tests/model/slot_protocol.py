"""A model of the slot protocol: the docstring of penstock/serve/table/slots.py, as transitions of one store each.

One front-end and one engine over a table, both of which can be killed between any two stores. Values are tokens:
(stream, chunk, step of the chunk, whether another step follows, the stream whose state the step used).
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

from tests.model.explorer import Violation
from tests.model.slot_state import BUSY, CONSUMED, EXPIRED, PRODUCED, Rules, State

LAST, CANCELS, EXTRA, EXPIRY, FRONTEND_KILLS, ENGINE_KILLS = range(6)


def successors(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    """Yield every next store of either side, every new request, and every death."""
    if state.frontend_alive:
        if state.frontend:
            yield f"f:{state.frontend[0][0]}", frontend_step(rules, state.copy())
        else:
            yield from _client_actions(rules, state)
            if state.visible:
                made = state.copy()
                made.frontend = _collect(made)
                yield "collect", made
            if not state.engine_alive:
                yield "drop-engine", _drop_engine(rules, state.copy())
        if state.budget[FRONTEND_KILLS]:
            yield "kill-front-end", _killed_frontend(state.copy())
    else:
        yield "restart-front-end", restarted_frontend(rules, state.copy())
    if state.engine_alive:
        if state.engine:
            yield f"e:{state.engine[0][0]}", engine_step(rules, state.copy())
        elif state.asleep:
            if state.wakes:
                made = state.copy()
                made.asleep = made.wakes = False
                yield "woken", made
        elif any(ready(rules, state, slot) for slot in range(rules.slots)):
            yield from _batches(rules, state)
        else:
            made = state.copy()
            made.asleep = True
            yield "rest", made
        if state.budget[ENGINE_KILLS]:
            made = state.copy()
            made.budget[ENGINE_KILLS] -= 1
            made.engine_alive, made.engine = False, ()
            yield "kill-engine", made


def check_end(rules: Rules, state: State) -> None:
    """Check a state in which nothing more happens: everybody has an answer, and every slot is free.

    Raises:
        Violation: It is a deadlock.
    """
    for index, (chunks, _, ended, owned) in enumerate(state.streams):
        if owned and not ended:
            raise Violation("every accepted chunk is answered", f"stream {index} of {chunks} chunks waits for ever")
    if sorted(state.free) != list(range(rules.slots)):
        raise Violation("every slot becomes free", f"{state.free} of {rules.slots}")


def ready(rules: Rules, state: State, slot: int) -> bool:
    """Whether the engine may run a slot."""
    work = state.submitted[slot] != state.consumed[slot] or state.busy[slot]
    room = state.produced[slot] - state.taken[slot] < rules.chunks or not rules.waits_for_room_of_results
    return bool(work and room)


# The front-end.


def _client_actions(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    if state.budget[LAST] and state.free:
        made = state.copy()
        made.budget[LAST] -= 1
        open_stream(rules, made, ended=rules.stream_chunks == 1)
        yield "open", made
    for slot, handle in enumerate(state.handles):
        if handle is None or handle[2]:
            continue
        stream, ended, _ = handle
        if not ended and room(rules, state, slot):
            made = state.copy()
            push(rules, made, slot, last=made.streams[stream][0] + 1 == rules.stream_chunks)
            yield "push", made
        if state.budget[CANCELS]:
            made = state.copy()
            made.budget[CANCELS] -= 1
            cancel(rules, made, slot)
            yield "cancel", made


def room(rules: Rules, state: State, slot: int) -> bool:
    """Whether a stream's ring has room."""
    busy = state.busy[slot] if rules.room_counts_busy else 0
    return state.submitted[slot] - state.consumed[slot] + busy < rules.chunks


def open_stream(rules: Rules, state: State, *, ended: bool) -> int:
    """Take a free slot, and for a request of one chunk put it in; returns the slot."""
    slot = state.free.pop()
    if rules.takeover_frees_only_idle and rules.releases_only_idle:
        _check_idle(state, slot)
    stream = len(state.streams)
    state.streams.append((0, None, False, True))
    state.tries.append(1)
    state.handles[slot] = (stream, False, False)
    state.frontend = (("generation", slot),)
    if ended:
        push(rules, state, slot, last=True)
    return slot


def push(rules: Rules, state: State, slot: int, *, last: bool) -> None:
    """Put in a stream's next chunk."""
    stream, _, dropped = state.handles[slot]
    chunks, seen, ended, owned = state.streams[stream]
    state.streams[stream] = (chunks + 1, seen, ended, owned)
    state.handles[slot] = (stream, last, dropped)
    stores = (("input", slot, stream, chunks), ("submitted", slot))
    state.frontend += stores if rules.input_before_submitted else stores[::-1]
    if rules.wakes_after_submitted:
        state.frontend += (("wake",),)


def cancel(rules: Rules, state: State, slot: int) -> None:
    """Drop a stream's further results, and its chunks that have not started."""
    stream, _, _ = state.handles[slot]
    _end(state, stream)
    state.handles[slot] = (stream, True, True)
    state.frontend = (("cancelled", slot), ("check-last", slot, stream, "release", (), rules.last_reads), ("wake",))


def frontend_step(rules: Rules, state: State) -> State:
    """Do the front-end's next store or read."""
    (name, *values), state.frontend = state.frontend[0], state.frontend[1:]
    match name, values:
        case "generation", [slot]:
            state.gen[slot] += 1
        case "input", [slot, stream, chunk]:
            entry = (
                slot * rules.chunks
                + (state.submitted[slot] - (0 if rules.input_before_submitted else 1)) % rules.chunks
            )
            state.input[entry] = (stream, chunk)
            # The entry's own deadline, which replaces the one of a cancelled row.
            state.cancelled[slot] = 0
        case "submitted", [slot]:
            state.submitted[slot] += 1
        case "wake", []:
            state.wakes = True
        case "wake-if-full", [slot, taken]:
            state.wakes |= state.produced[slot] - taken >= rules.chunks
        case "cancelled", [slot]:
            state.cancelled[slot] = 1
        case "entry", []:
            _entry(rules, state)
        case "taken", [slot, stream]:
            if rules.wakes_after_full_results:
                state.frontend = (("wake-if-full", slot, state.taken[slot]), *state.frontend)
            state.taken[slot] += 1
            if state.handles[slot] is not None and state.handles[slot][1]:
                state.frontend = (
                    ("check-last", slot, stream, "release", (), rules.last_reads),
                    *state.frontend,
                )
        case "check-last", [slot, stream, then, seen, reads]:
            _check_last(rules, state, slot, stream, then, seen, reads)
        case "take-over", [slot]:
            _take_over(rules, state, slot)
        case "collect", []:
            state.frontend = _collect(state)
        case "settle", [listed, produced, slot]:
            _settle(state, listed, produced + state.produced[slot], slot + 1)
        case _:
            raise AssertionError((name, values))
    return state


def _collect(state: State) -> tuple[Any, ...]:
    settle = (("settle", state.count, 0, 0),) if state.settling else ()
    return (("entry",),) * state.visible + settle


def _settle(state: State, listed: int, produced: int, slot: int) -> None:
    """Read one more slot's results; where all of them were listed, no entry for a killed front-end is to come."""
    if slot < len(state.produced):
        state.frontend = (("settle", listed, produced, slot), *state.frontend)
    elif listed == produced:
        state.free += state.held_back
        state.held_back, state.settling = [], False


def _entry(rules: Rules, state: State) -> None:
    slot, _ = state.done.pop(0)
    state.visible -= 1
    handle = state.handles[slot]
    if handle is None:
        return
    stream, ended, _ = handle
    taken = state.taken[slot]
    if state.produced[slot] != taken:
        last = (("check-last", slot, stream, "take", (), rules.last_reads),)
        state.frontend = (last if ended else (("check-last", slot, stream, "take", (), ()),)) + state.frontend
    elif ended:
        state.frontend = (("check-last", slot, stream, "release", (), rules.last_reads), *state.frontend)


def _check_last(
    rules: Rules, state: State, slot: int, stream: int, then: str, seen: tuple[int, ...], reads: tuple[str, ...]
) -> None:
    """Read one more counter; with all of them, take a result or release the slot."""
    if reads:
        seen = (*seen, getattr(state, reads[0])[slot])
        state.frontend = (("check-last", slot, stream, then, seen, reads[1:]), *state.frontend)
        if reads[1:]:
            return
        state.frontend = state.frontend[1:]
    counters = dict(zip(rules.last_reads, seen, strict=False))
    taken = state.taken[slot] + (then == "take")
    idle = counters.get("submitted") == counters.get(CONSUMED) and not counters.get(BUSY)
    last = bool(seen) and counters[PRODUCED] == taken and (idle or not rules.releases_only_idle)
    if then == "take":
        _deliver(rules, state, slot, stream, last)
        state.frontend = (("taken", slot, stream), *state.frontend)
    elif last and state.handles[slot] is not None and state.handles[slot][0] == stream:
        state.handles[slot] = None
        (state.held_back if state.settling else state.free).append(slot)


def _deliver(rules: Rules, state: State, slot: int, stream: int, last: bool) -> None:
    _, _, dropped = state.handles[slot]
    token = state.output[slot * rules.chunks + state.taken[slot] % rules.chunks]
    if dropped:
        return
    if token is None or token[0] != stream:
        raise Violation("no result reaches another generation", (token, stream))
    chunks, seen, ended, owned = state.streams[stream]
    if ended:
        raise Violation("no chunk is answered twice", (token, stream))
    _, chunk, step, more, used = token
    expected = (0, 0) if seen is None else (seen[1], seen[2] + 1) if seen[3] else (seen[1] + 1, 0)
    if (chunk, step) != expected:
        raise Violation("each chunk is answered exactly once, in order", (token, seen))
    if used not in (stream, EXPIRED):
        raise Violation("no state reaches another generation", token)
    is_last = state.handles[slot][1] and chunk + 1 == chunks and not more
    if last != is_last:
        raise Violation("the last result is marked as the last", (token, last))
    state.streams[stream] = (chunks, token, last, owned)


def _end(state: State, stream: int) -> None:
    chunks, seen, _, owned = state.streams[stream]
    state.streams[stream] = (chunks, seen, True, owned)


def _check_idle(state: State, slot: int) -> None:
    idle = state.submitted[slot] == state.consumed[slot] and not state.busy[slot]
    if not idle or state.produced[slot] != state.taken[slot]:
        raise Violation("only an idle slot is used again", slot)


def _killed_frontend(state: State) -> State:
    state.budget[FRONTEND_KILLS] -= 1
    state.frontend_alive, state.frontend, state.free, state.held_back = False, (), [], []
    state.handles = [None] * len(state.handles)
    state.streams = [(chunks, seen, ended, False) for chunks, seen, ended, _ in state.streams]
    return state


def restarted_frontend(rules: Rules, state: State) -> State:
    """Start the next front-end: it reads the ring's end, and then takes over slot by slot."""
    state.frontend_alive = True
    state.settling = rules.frees_after_publication
    del state.done[: state.visible]
    state.visible = 0
    state.frontend = tuple(("take-over", slot) for slot in reversed(range(rules.slots)))
    state.frontend += (("collect",),)
    return state


def _take_over(rules: Rules, state: State, slot: int) -> None:
    idle = state.submitted[slot] == state.consumed[slot] and not state.busy[slot]
    if rules.takeover_drops_results:
        state.taken[slot] = state.produced[slot]
    if idle or not rules.takeover_frees_only_idle:
        (state.held_back if state.settling else state.free).append(slot)
        return
    # Of a stream that nobody waits for.
    state.streams.append((0, None, True, False))
    state.tries.append(2)
    state.handles[slot] = (len(state.streams) - 1, True, True)
    state.cancelled[slot] = 1
    state.wakes |= rules.wakes_after_takeover


def _drop_engine(rules: Rules, state: State) -> State:
    """Tell everybody that the engine is lost, or try their rows again, and use the table of the next one."""
    again: list[int] = []
    for handle in state.handles:
        if handle is None or handle[2]:
            continue
        if rules.second_tries and _gets_second_try(rules, state, handle[0]):
            again.append(handle[0])
        else:
            _end(state, handle[0])
    state.handles = [None] * rules.slots
    state.free, state.held_back, state.settling = list(range(rules.slots))[::-1], [], False
    state.engine_alive, state.asleep = True, False
    if rules.new_table_after_engine:
        state.empty_table(rules)
    for stream in again:
        _try_again(state, stream)
    return state


def _gets_second_try(rules: Rules, state: State, stream: int) -> bool:
    """Whether a row is a whole request without a result, and in its first table."""
    _, seen, _, _ = state.streams[stream]
    whole = rules.stream_chunks == 1 and (seen is None or not rules.retries_unanswered_only)
    return whole and (state.tries[stream] < 2 or not rules.retries_once)


def _try_again(state: State, stream: int) -> None:
    """Put the row of a stream into the next table, under the handle that it has."""
    state.tries[stream] += 1
    if state.tries[stream] > 2:
        raise Violation("a row is tried twice at most", stream)
    slot = state.free.pop()
    state.handles[slot] = (stream, True, False)
    state.frontend += (("generation", slot), ("input", slot, stream, 0), ("submitted", slot), ("wake",))


# The engine.


def _batches(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    """Every non-empty set of ready rows, each run, run with another step to follow, or expired."""
    choices: list[list[tuple[str, int] | None]] = []
    for slot in range(rules.slots):
        if not ready(rules, state, slot):
            choices.append([None])
            continue
        ways: list[tuple[str, int] | None] = [None]
        if state.cancelled[slot]:
            ways += [("expire", 0)]
        else:
            ways += [("run", 0)]
            ways += [("run", 1)] if state.budget[EXTRA] and not state.busy[slot] else []
            ways += [("expire", 0)] if state.budget[EXPIRY] and rules.stream_chunks == 1 else []
        choices.append(ways)
    for chosen in product(*choices):
        rows = [(slot, *way) for slot, way in enumerate(chosen) if way is not None]
        extra = sum(row[2] for row in rows)
        late = sum(row[1] == "expire" and not state.cancelled[row[0]] for row in rows)
        if not rows or extra > state.budget[EXTRA] or late > state.budget[EXPIRY]:
            continue
        made = state.copy()
        made.budget[EXTRA] -= extra
        made.budget[EXPIRY] -= late
        begin(rules, made, rows)
        yield "batch", made


def begin(rules: Rules, state: State, rows: list[tuple[int, str, int]]) -> None:
    """Begin a batch.

    Args:
        rules: The rules.
        state: The state.
        rows: Slots; `"run"` or `"expire"`; 1 if the row is busy afterwards.
    """
    took = {slot: 1 - state.busy[slot] for slot, _, _ in rows}
    outputs: list[tuple[Any, ...]] = []
    for slot, way, more in rows:
        first, busy = slot * rules.chunks, state.busy[slot]
        given = first + (state.consumed[slot] - busy) % rules.chunks
        outputs.append(("output", slot, way, more, busy, given, first + state.produced[slot] % rules.chunks))
    counters: list[tuple[Any, ...]] = []
    for column in rules.publish_order:
        for slot, _, more in rows:
            value = {PRODUCED: 1, BUSY: more, CONSUMED: took[slot]}[column]
            counters.append((column, slot, value))
    rings: list[tuple[Any, ...]] = [("ring", slot) for slot, _, _ in rows] + [("visible", len(rows))]
    parts = (outputs, counters) if rules.output_before_produced else (counters, outputs)
    stores = [*parts[0], *parts[1]]
    state.engine = tuple(stores + rings if rules.rings_after_counters else rings + stores)


def engine_step(rules: Rules, state: State) -> State:
    """Do the engine's next store."""
    (name, *values), state.engine = state.engine[0], state.engine[1:]
    match name, values:
        case "output", [slot, way, more, busy, given, to]:
            _run_row(rules, state, slot, way, more, busy, state.input[given], to)
        case "produced", [slot, value]:
            state.produced[slot] += value
            if state.produced[slot] - state.taken[slot] > rules.chunks and state.handles[slot] is not None:
                raise Violation("a ring of results is not overrun", slot)
        case "busy", [slot, value]:
            state.busy[slot] = value
        case "consumed", [slot, value]:
            state.consumed[slot] += value
        case "ring", [slot]:
            _list(rules, state, slot)
        case "visible", [count]:
            state.visible += count
            state.count += count
        case _:
            raise AssertionError((name, values))
    return state


def _list(rules: Rules, state: State, slot: int) -> None:
    """Write the next entry of the ring, over the oldest where it is full."""
    entry = (slot, state.produced[slot])
    state.done.append(entry)
    oldest = len(state.done) - 1 - rules.slots * rules.chunks
    if oldest >= 0:
        lost, number = state.done[oldest]
        taking_over = any(step[0] == "take-over" for step in state.frontend)
        # An entry for a killed front-end may be lost; nobody waits for it.
        if state.frontend_alive and not taking_over and number > state.taken[lost]:
            raise Violation("no entry is lost", state.done)
        state.done[oldest] = entry


def _run_row(rules: Rules, state: State, slot: int, way: str, more: int, busy: int, given: Any, to: int) -> None:
    stream, chunk = (None, None) if given is None else given
    before = state.engine_state[slot]
    step = before[2] + 1 if busy and before is not None else 0
    if way == "expire":
        state.output[to] = (stream, chunk, step, 0, EXPIRED)
        return
    if state.gen[slot] != state.engine_gen[slot] and rules.clears_new_generation:
        before = None
    state.engine_gen[slot] = state.gen[slot]
    # The state begins with the first chunk of a stream, and only a stream's own chunks have entered it since.
    used = stream if before is None else before[0]
    state.engine_state[slot] = (used, chunk, step)
    state.output[to] = (stream, chunk, step, more, used)

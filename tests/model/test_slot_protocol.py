"""The slot protocol in every interleaving, at small sizes; and that each of its rules is needed."""

from dataclasses import replace
from typing import Any

import pytest

from tests.model.explorer import Explored, Violation, explore
from tests.model.slot_protocol import check_end, successors
from tests.model.slot_state import Rules, State
from tests.support.thorough import thorough

# Every transition is taken in one of them.
SIZES = {
    "two slots": Rules(slots=2, streams=2, cancels=1, expiries=1),
    "requests": Rules(streams=3, cancels=1, expiries=1),
    "streams": Rules(chunks=2, streams=2, stream_chunks=3, cancels=1),
    "streams with steps": Rules(slots=2, chunks=1, streams=2, stream_chunks=2, extra_steps=1),
    "steps": Rules(chunks=2, streams=2, stream_chunks=2, extra_steps=2),
    "front-end killed": Rules(slots=1, streams=3, frontend_kills=1, extra_steps=1),
    "front-end of streams killed": Rules(chunks=2, streams=2, stream_chunks=2, frontend_kills=1),
    "engine killed": Rules(slots=1, chunks=2, streams=2, stream_chunks=2, engine_kills=1, cancels=1),
    "both killed": Rules(slots=1, streams=3, engine_kills=1, frontend_kills=1),
    "engines killed, second tries": Rules(
        slots=1, streams=2, engine_kills=2, cancels=1, extra_steps=1, second_tries=True
    ),
    "second tries of both killed": Rules(streams=2, engine_kills=2, frontend_kills=1, second_tries=True),
}

LARGE = {
    *("streams", "streams with steps", "steps", "front-end of streams killed", "engine killed", "both killed"),
    *("engines killed, second tries", "second tries of both killed"),
}


def explored(rules: Rules) -> Explored:
    return explore(
        State(rules), State.key, lambda state: successors(rules, state), lambda state: check_end(rules, state)
    )


@pytest.mark.parametrize("name", [thorough(name) if name in LARGE else name for name in SIZES])
def test_no_interleaving_breaks_an_invariant(name: str) -> None:
    found = explored(SIZES[name])
    assert found.states > 500
    assert found.ends > 0
    kills = {"kill-front-end": "front-end", "kill-engine": "engine"}
    assert {label for label in kills if label in found.labels} == {
        label for label, side in kills.items() if side in name or "both killed" in name
    }


# A rule that is broken, the size at which that is seen, and the invariant that notices.
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "consumed is stored first": (
        "steps",
        {"publish_order": ("consumed", "busy", "produced")},
        "the last result is marked as the last",
    ),
    "busy is stored last": (
        "streams with steps",
        {"publish_order": ("produced", "consumed", "busy")},
        "each chunk is answered exactly once, in order",
    ),
    "the ring is written before the counters": (
        "requests",
        {"rings_after_counters": False},
        "the last result is marked as the last",
    ),
    "a chunk is submitted before it is written": (
        "requests",
        {"input_before_submitted": False},
        "no result reaches another generation",
    ),
    "a result is published before it is written": (
        "streams",
        {"output_before_produced": False},
        "each chunk is answered exactly once, in order",
    ),
    "the front-end reads in the engine's order": (
        "front-end killed",
        {"last_reads": ("produced", "busy", "consumed", "submitted")},
        "only an idle slot is used again",
    ),
    "a slot is released with its last result": (
        "streams",
        {"releases_only_idle": False},
        "no result reaches another generation",
    ),
    "the state stays under a new generation": (
        "requests",
        {"clears_new_generation": False},
        "no state reaches another generation",
    ),
    "room does not count the busy chunk": (
        "streams with steps",
        {"room_counts_busy": False},
        "each chunk is answered exactly once, in order",
    ),
    "a row runs without room for its result": (
        "streams",
        {"waits_for_room_of_results": False},
        "a ring of results is not overrun",
    ),
    "no wake-up for a chunk": (
        "requests",
        {"wakes_after_submitted": False},
        "every accepted chunk is answered",
    ),
    "no wake-up for room for a result": (
        "streams",
        {"wakes_after_full_results": False},
        "every slot becomes free",
    ),
    "no wake-up for a take-over": (
        "front-end killed",
        {"wakes_after_takeover": False},
        "every slot becomes free",
    ),
    "a take-over frees every slot": (
        "front-end killed",
        {"takeover_frees_only_idle": False},
        "every accepted chunk is answered",
    ),
    "a take-over keeps the results": (
        "front-end killed",
        {"takeover_drops_results": False},
        "only an idle slot is used again",
    ),
    "a take-over frees while a result is published": (
        "front-end killed",
        {"frees_after_publication": False},
        "the last result is marked as the last",
    ),
    "the table outlives its engine": (
        "engine killed",
        {"new_table_after_engine": False},
        "only an idle slot is used again",
    ),
    "a row is tried again and again": (
        "engines killed, second tries",
        {"retries_once": False},
        "a row is tried twice at most",
    ),
    "a row that was answered in part is tried again": (
        "engines killed, second tries",
        {"retries_unanswered_only": False},
        "each chunk is answered exactly once, in order",
    ),
    "rows are tried again in the table of their engine": (
        "engines killed, second tries",
        {"new_table_after_engine": False},
        "only an idle slot is used again",
    ),
}


# Rules whose violation comes after many states.
LATE = {
    "busy is stored last",
    "room does not count the busy chunk",
    "no wake-up for room for a result",
    "a row that was answered in part is tried again",
}


@pytest.mark.parametrize("name", [thorough(name) if name in LATE else name for name in BROKEN])
def test_a_broken_rule_is_noticed(name: str) -> None:
    size, change, invariant = BROKEN[name]
    with pytest.raises(Violation) as noticed:
        explored(replace(SIZES[size], **change))
    assert noticed.value.invariant == invariant
    assert noticed.value.__notes__[0].startswith("after open")

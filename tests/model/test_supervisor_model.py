"""The supervisor's state machine in every interleaving, at small sizes; and that each of its rules is needed."""

from dataclasses import fields, replace
from typing import Any

import pytest

from tests.model.explorer import Explored, Violation, explore
from tests.model.supervisor_processes import successors
from tests.model.supervisor_state import Rules, State
from tests.support.thorough import thorough

# Every transition is taken in one of them.
SIZES = {
    "start": Rules(boot=True, engine_kills=1, frontend_kills=1),
    "start and stop": Rules(boot=True, frontend_kills=1, signals=1),
    "load": Rules(loads=1, load_failures=1, late_loads=1),
    "load that cannot be attached": Rules(loads=1, attach_failures=2),
    "load and unload": Rules(loads=1, unloads=1),
    "unload, front-end killed": Rules(unloads=1, frontend_kills=1),
    "unload, engine killed": Rules(unloads=1, engine_kills=1),
    "load, front-end killed": Rules(loads=1, frontend_kills=1),
    "load, engine killed": Rules(loads=1, engine_kills=1),
    "front-ends killed": Rules(frontend_kills=2),
    "engine killed twice": Rules(engine_kills=2),
    "engine killed with a message": Rules(engine_kills=1, heartbeats=1, load_failures=1),
    "engine and front-end killed": Rules(engine_kills=1, frontend_kills=1),
    "no descriptor left": Rules(engine_kills=1, start_failures=1),
    "hang": Rules(hangs=1),
    "hang and stop": Rules(hangs=1, signals=1),
    "export for a load": Rules(loads=1, unloads=1, steps=1, find_failures=1),
    "export for a restarted engine": Rules(unloads=1, engine_kills=1, exports=1),
}
SLOW = {
    "load that hangs": Rules(loads=1, hangs=1, heartbeats=1),
    "two loads": Rules(loads=2, late_loads=1, load_failures=1),
    "late load, engine killed": Rules(loads=1, late_loads=1, engine_kills=1),
    "load that cannot be attached, engine killed": Rules(loads=1, attach_failures=1, engine_kills=1),
    "load that cannot be attached, front-end killed": Rules(loads=1, attach_failures=2, frontend_kills=1),
    "load that cannot be attached, nor what was served": Rules(loads=1, attach_failures=3, frontend_kills=1),
    "unload of what was not attached": Rules(unloads=1, attach_failures=1, frontend_kills=1),
    "restore that cannot be attached": Rules(engine_kills=1, attach_failures=2, frontend_kills=1),
    "load and stop": Rules(loads=1, frontend_kills=1, signals=1),
    "all killed": Rules(engine_kills=2, frontend_kills=1),
    "all killed while it loads": Rules(loads=1, engine_kills=1, frontend_kills=1),
    "exports for a load that fails": Rules(loads=1, unloads=1, steps=2, load_failures=1, find_failures=1),
    "export for a load, front-end killed": Rules(loads=1, unloads=1, steps=1, frontend_kills=1),
    "export for a restarted engine, front-end killed": Rules(engine_kills=1, frontend_kills=1, exports=1),
    "exports for a restarted engine that is killed": Rules(engine_kills=2, exports=2),
}

# Of those that are not slow.
LARGE = {
    *("start", "load and unload", "load, front-end killed", "load, engine killed", "engine killed twice"),
    *("engine and front-end killed", "export for a load"),
}


def explored(rules: Rules) -> Explored:
    return explore(State(rules), State.key, lambda state: successors(rules, state), lambda state: None)


@pytest.mark.parametrize(
    "name",
    [
        *(thorough(name) if name in LARGE else name for name in SIZES),
        *(pytest.param(name, marks=(pytest.mark.slow, pytest.mark.timeout(600))) for name in SLOW),
    ],
)
def test_no_interleaving_breaks_an_invariant(name: str) -> None:
    rules = (SIZES | SLOW)[name]
    found = explored(rules)
    assert found.states > 50
    assert found.ends > 0
    sizes = {"signals": "signal", "hangs": "hang", "heartbeats": "heartbeat", "start_failures": "fail-start"}
    sizes |= {"engine_kills": "kill-engine", "frontend_kills": "kill-front-end", "late_loads": "late"}
    sizes |= {"exports": "export", "steps": "step", "find_failures": "fail-find"}
    sizes |= {"loads": "load", "unloads": "unload", "load_failures": "fail-load", "attach_failures": "fail-attach"}
    assert {label for label in sizes.values() if label in found.labels} == {
        label for size, label in sizes.items() if getattr(rules, size)
    }


READY_404 = "a front-end that is ready answers for every model that is said to be ready"
TAKES = "a front-end takes connections once it is attached"
LEFT_OVER = "no table is left over"
ENDS = "a state ends with what it is of"
# By the rule that is broken: the size at which that is seen, and the invariant that notices.
BROKEN: dict[str, tuple[Rules, str]] = {
    "exit_fails_loads": (Rules(engine_kills=2), "the lock becomes free"),
    "exit_ends_waits_for_a_front_end": (SIZES["unload, front-end killed"], "each change is answered exactly once"),
    "forgets_readiness_at_exit": (
        SIZES["engine killed with a message"],
        "a restarted engine gets its models back",
    ),
    "exit_drops_tables": (Rules(engine_kills=1), LEFT_OVER),
    "state_before_drop": (SIZES["engine and front-end killed"], TAKES),
    "restores_after_restart": (Rules(engine_kills=1), "a restarted engine gets its models back"),
    "retries_restore": (Rules(engine_kills=1, load_failures=1), "a restarted engine gets its models back"),
    "checks_engine_after_load": (Rules(engine_kills=2), "an attached table belongs to the engine that runs"),
    "checks_table_after_attach": (Rules(engine_kills=2), LEFT_OVER),
    "lists_table_before_attach": (SIZES["engine and front-end killed"], TAKES),
    "ready_after_attach": (SIZES["load and unload"], READY_404),
    "attaches_in_order": (Rules(loads=1, frontend_kills=1, attach_failures=1), TAKES),
    "gives_name_back": (SIZES["load that cannot be attached"], READY_404),
    "undoes_whatever_fails": (SLOW["load that cannot be attached, front-end killed"], LEFT_OVER),
    "unloading_before_retire": (Rules(unloads=1), READY_404),
    "retires_replaced": (Rules(loads=1), LEFT_OVER),
    "unloads_late_loads": (SIZES["load"], LEFT_OVER),
    "answers_the_same_process": (SIZES["unload, front-end killed"], "each change is answered exactly once"),
    "releases_lock_on_failure": (SIZES["load"], "the lock becomes free"),
    "watchdog_kills": (SIZES["hang"], "what ends is started again"),
    "retries_starts": (SIZES["no descriptor left"], "what ends is started again"),
    "ends_half_starts": (SIZES["no descriptor left"], "only one engine runs"),
    "hands_over_when_attached": (SIZES["front-ends killed"], "every socket has a front-end that accepts"),
    "replaces_acting_front_end": (SIZES["front-ends killed"], "every socket has a front-end that accepts"),
    "listens_in_order": (SIZES["front-ends killed"], TAKES),
    "lost_while_importing": (
        SIZES["engine and front-end killed"],
        "an attached table belongs to the engine that runs",
    ),
    "says_not_attached": (Rules(engine_kills=1, frontend_kills=1, attach_failures=1), TAKES),
    "remembers_refused": (SLOW["load that cannot be attached, nor what was served"], READY_404),
    "looks_again_with_the_lock": (SIZES["load, engine killed"], LEFT_OVER),
    "says_only_what_is_served": (Rules(unloads=1, engine_kills=1, exports=1, steps=1), ENDS),
    "ends_what_was_exported": (SIZES["export for a load"], ENDS),
    "kills_at_the_end": (SIZES["start"], "nothing outlives the server"),
}

# Rules whose violation comes after many states.
LATE = {
    *("attaches_in_order", "says_not_attached", "looks_again_with_the_lock", "ends_what_was_exported"),
    *("answers_the_same_process", "lists_table_before_attach", "says_only_what_is_served", "checks_table_after_attach"),
}


def parameter(rule: str) -> Any:
    if BROKEN[rule][0] in SLOW.values():
        return pytest.param(rule, marks=pytest.mark.slow)
    return thorough(rule) if rule in LATE else rule


@pytest.mark.parametrize("rule", [parameter(rule) for rule in BROKEN])
def test_a_broken_rule_is_noticed(rule: str) -> None:
    size, invariant = BROKEN[rule]
    broken: dict[str, Any] = {rule: False}
    with pytest.raises(Violation) as noticed:
        explored(replace(size, **broken))
    assert noticed.value.invariant == invariant
    assert noticed.value.__notes__[0].startswith("after ")


def test_every_rule_is_broken_once() -> None:
    assert set(BROKEN) == {field.name for field in fields(Rules) if field.default is True}

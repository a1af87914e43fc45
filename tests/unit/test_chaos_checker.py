"""The checker finds each kind of violation that is planted, and none in a history without one."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.bench.chaos.chaos_history import ChaosHistory, Event, Operation, Readiness, RequestEnd
from penstock.bench.chaos.checker import (
    FALSE_READY,
    HUNG,
    LOST,
    MIXED,
    NOT_ADMITTED,
    NOT_BACK,
    STUCK,
    TWICE,
    UNACCOUNTED,
    WRONG,
    check,
    failures,
    recoveries,
)
from penstock.bench.chaos.numbered_input import doubles_of

Change = Callable[[ChaosHistory], None]


def answered(number: int, at_s: float, version: int = 1, status: int = 200, model: str = "m") -> RequestEnd:
    return RequestEnd(
        number=number,
        model=model,
        due_s=at_s,
        sent_s=at_s,
        ended_s=at_s + 0.01,
        end="answer",
        status=status,
        port=5000 + number,
        doubles=doubles_of(number) if status == 200 else (),
        weights=version if status == 200 else 0,
        source=version if status == 200 else 0,
    )


def load(version: int, sent_s: float, ended_s: float, status: int = 200) -> Operation:
    return Operation(model="m", kind="load", version=version, sent_s=sent_s, ended_s=ended_s, status=status)


def good() -> ChaosHistory:
    """Version 1 answers, is replaced by 2 between 5 s and 6 s, and a front-end is killed at 8 s."""
    history = ChaosHistory(started={"m": 1}, began_s=0.0, over_s=10.0, load_s=0.5)
    history.answers = [answered(n, 0.1 + n * 0.1, 1 if n < 52 else 2) for n in range(100)]
    history.operations = [load(2, 5.0, 6.0)]
    history.events = [
        Event(number=0, kind="kill front-end", detail="", begun_s=8.0, over_s=8.0, ports=frozenset({5080})),
    ]
    history.answers[80] = replace(history.answers[80], end="reset", status=0)
    history.readiness = [Readiness(model="m", sent_s=t / 10, ended_s=t / 10 + 0.01, ready=True) for t in range(100)]
    return history


def change(history: ChaosHistory, number: int, **fields: object) -> None:
    history.answers[number] = replace(history.answers[number], **fields)  # pyright: ignore[reportArgumentType]


def mix(history: ChaosHistory) -> None:
    change(history, 70, source=1)


def swap_results(history: ChaosHistory) -> None:
    change(history, 10, doubles=doubles_of(11))


def answer_with_old(history: ChaosHistory) -> None:
    change(history, 70, weights=1, source=1)


def answer_with_next(history: ChaosHistory) -> None:
    change(history, 40, weights=2, source=2)


def answer_with_refused(history: ChaosHistory) -> None:
    history.operations.append(load(3, 7.0, 7.1, status=400))
    change(history, 90, weights=3, source=3)


def answer_unloaded(history: ChaosHistory) -> None:
    history.operations.append(replace(load(0, 9.0, 9.1), kind="unload"))


def lose(history: ChaosHistory) -> None:
    change(history, 20, end="reset", status=0)


def lose_late(history: ChaosHistory) -> None:
    # The port was held by the killed front-end, but the connection ended long before.
    change(history, 79, end="reset", status=0, port=5080, ended_s=7.9)


def lose_beside(history: ChaosHistory) -> None:
    # While a front-end was killed, but on a connection of another one.
    change(history, 81, end="reset", status=0)


def hang(history: ChaosHistory) -> None:
    change(history, 20, end="hung", status=0, ended_s=7.0)


def answer_twice(history: ChaosHistory) -> None:
    history.answers.append(replace(history.answers[30], ended_s=9.0))


def say_more(history: ChaosHistory) -> None:
    history.answers.append(replace(history.answers[30], end="unasked"))


def forget(history: ChaosHistory) -> None:
    del history.answers[30]


def stick(history: ChaosHistory) -> None:
    history.operations.append(load(3, 9.0, 24.0, status=0))


def miss(history: ChaosHistory) -> None:
    change(history, 70, status=404)


def stay_away(history: ChaosHistory) -> None:
    for number in range(90, 100):
        change(history, number, status=503)


def go_away(history: ChaosHistory) -> None:
    for number in range(90, 100):
        change(history, number, end="unsent", status=0)


PLANTED: list[tuple[Change, str]] = [
    (mix, MIXED),
    (swap_results, WRONG),
    (answer_with_old, NOT_ADMITTED),
    (answer_with_next, NOT_ADMITTED),
    (answer_with_refused, NOT_ADMITTED),
    (answer_unloaded, NOT_ADMITTED),
    (lose, LOST),
    (lose_late, LOST),
    (lose_beside, LOST),
    (hang, HUNG),
    (answer_twice, TWICE),
    (say_more, TWICE),
    (forget, UNACCOUNTED),
    (stick, STUCK),
    (miss, FALSE_READY),
    (stay_away, NOT_BACK),
    (go_away, NOT_BACK),
]


def test_a_good_history_has_no_violation() -> None:
    assert check(good()) == []


@pytest.mark.parametrize(("plant", "kind"), PLANTED)
def test_a_planted_violation_is_found(plant: Change, kind: str) -> None:
    history = good()
    plant(history)
    assert {violation.kind for violation in check(history)} == {kind}


def test_while_a_load_is_under_way_both_versions_may_answer() -> None:
    history = good()
    for number in range(50, 60):
        change(history, number, weights=1 + number % 2, source=1 + number % 2)
    assert check(history) == []


def test_a_load_without_an_answer_may_have_succeeded_or_not() -> None:
    history = good()
    history.operations.append(load(3, 8.5, 8.9, status=0))
    change(history, 90, weights=3, source=3)
    assert {violation.kind for violation in check(history)} == {STUCK}


def test_a_404_where_readiness_was_false_is_none() -> None:
    history = good()
    history.readiness = [replace(look, ready=not 7.0 < look.sent_s < 7.3) for look in history.readiness]
    change(history, 70, status=404)
    assert check(history) == []


def test_a_404_of_an_unloaded_model_is_none() -> None:
    history = good()
    history.operations.append(replace(load(0, 8.9, 9.0), kind="unload"))
    for number in range(89, 100):
        change(history, number, status=404)
    assert check(history) == []
    assert [answer.number for answer in failures(history)] == [80]


def test_a_replacement_may_leave_no_gap() -> None:
    history = good()
    change(history, 54, status=503)
    assert 54 in [answer.number for answer in failures(history)]


def test_recovery_lasts_from_the_fault_to_the_last_failure() -> None:
    history = good()
    for number in range(80, 86):
        change(history, number, status=503, end="answer")
    ((event, seconds),) = recoveries(history, failures(history))
    assert event.number == 0
    assert seconds == pytest.approx(0.1 + 85 * 0.1 - 8.0)
    assert recoveries(replace(good(), events=[]), failures(good())) == []
    assert recoveries(good(), failures(good()))[0][1] == pytest.approx(0.1)

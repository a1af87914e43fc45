"""Lateness beside faults and without: every request belongs to one of them, and faults answer for what they leave."""

import pytest

from penstock.bench.chaos.chaos_history import Event, QuietTime, RequestEnd
from penstock.bench.chaos.chaos_result import ChaosResult, ChaosSettings
from penstock.bench.chaos.lateness import Lateness, drained, is_within, lateness, sustained_rate
from penstock.core.errors import BenchError

BUDGET_S = 0.05


def answered(due_s: float, late_s: float = 0.002, status: int = 200) -> RequestEnd:
    return RequestEnd(
        number=round(due_s * 1e3),
        model="m",
        due_s=due_s,
        sent_s=due_s,
        ended_s=due_s + late_s,
        end="answer",
        status=status,
    )


def times(*spans: tuple[float, float], after_faults: bool = True) -> list[QuietTime]:
    return [QuietTime(begin_s=begin_s, end_s=end_s, after_faults=after_faults) for begin_s, end_s in spans]


def split(*answers: RequestEnd, quiet: tuple[tuple[float, float], ...] = ((20.0, 30.0),)) -> tuple[Lateness, Lateness]:
    events = [
        Event(number=0, kind="load", detail="", begun_s=5.0, over_s=6.0),
        Event(number=1, kind="kill front-end", detail="", begun_s=10.0, over_s=10.0),
    ]
    return lateness(answers, drained(answers, times(*quiet), BUDGET_S), events, BUDGET_S, ())


def test_each_request_counts_on_one_side() -> None:
    answers = [answered(at_s / 2) for at_s in range(80)]
    beside, without = split(*answers)
    # Due at 20.0 to 29.5 s.
    assert (beside.requests, without.requests) == (60, 20)
    assert (beside.over_ms, without.over_ms, beside.event) == (0.0, 0.0, None)


def test_the_worst_of_each_side_is_found_and_the_fault_before_it() -> None:
    answers = [answered(6.0, 0.08), answered(11.0, 0.25), answered(21.0), answered(22.0, 0.09), answered(35.0, 0.1)]
    beside, without = split(*answers)
    assert beside.over_ms == pytest.approx(200)
    assert beside.event is not None
    assert beside.event.kind == "kill front-end"
    assert (beside.requests, beside.late) == (3, 3)
    assert without == Lateness(over_ms=without.over_ms, requests=2, late=1)
    assert without.over_ms == pytest.approx(40)


def test_what_piled_up_before_a_time_without_faults_is_the_faults() -> None:
    late = [answered(20.0, 0.3), answered(20.1, 0.2), answered(20.2, 0.04)]
    beside, without = split(*late, answered(20.3), answered(21.0, 0.06))
    assert beside.over_ms == pytest.approx(250)
    assert beside.requests == 3
    assert without.over_ms == pytest.approx(10)


def test_a_moment_is_within_a_time_from_its_begin_to_before_its_end() -> None:
    spans = [(1.0, 2.0), (2.0, 3.0), (5.0, 6.0)]
    within = [at / 2 for at in range(14) if is_within(spans, at / 2)]
    assert within == [1.0, 1.5, 2.0, 2.5, 5.0, 5.5]
    assert not is_within([], 1.0)


def test_a_refusal_does_not_show_that_a_backlog_is_served() -> None:
    answers = [answered(20.0, 0.001, status=503), answered(20.1, 0.2), answered(20.2)]
    assert drained(answers, times((20.0, 30.0)), BUDGET_S) == [(20.2, 30.0)]


def test_what_piles_up_at_a_new_rate_is_not_the_faults() -> None:
    answers = [answered(20.0, 0.2), answered(20.1)]
    first = times((20.0, 30.0), after_faults=False)
    assert drained(answers, first, BUDGET_S) == [(20.0, 30.0)]
    assert drained(answers, [*first, *times((30.0, 40.0))], BUDGET_S) == [(20.0, 30.0)]


def test_a_time_in_which_the_backlog_never_ends_does_not_count() -> None:
    answers = [answered(at_s / 2, 0.5) for at_s in range(70)] + [answered(35.0), answered(36.0)]
    quiet = ((20.0, 30.0), (34.0, 36.0))
    assert drained(answers, times(*quiet), BUDGET_S) == [(35.0, 36.0)]
    beside, without = split(*answers, quiet=quiet)
    assert (beside.requests, without.requests) == (71, 1)
    assert beside.over_ms == pytest.approx(450)


def test_answers_may_have_ended_in_any_order() -> None:
    answers = [answered(25.0, 0.1), answered(3.0, 0.2), answered(20.5), answered(10.0)]
    beside, without = split(*answers)
    assert (beside.requests, without.requests) == (2, 2)
    assert (round(beside.over_ms), round(without.over_ms)) == (150, 50)


def test_the_figure_is_what_faults_add() -> None:
    result = ChaosResult(settings=ChaosSettings())
    assert result.over_budget_ms is None
    result.beside_faults, result.without_faults = Lateness(over_ms=30.0), Lateness(over_ms=10.0)
    assert result.over_budget_ms == 20.0
    result.without_faults = Lateness(over_ms=40.0)
    assert result.over_budget_ms == 0.0


def test_two_histories_are_joined() -> None:
    joined = Lateness(over_ms=3.0, requests=5, late=2).joined(Lateness(over_ms=7.0, requests=1, late=1))
    assert joined == Lateness(over_ms=7.0, requests=6, late=3)


def test_a_server_carries_what_it_answers_in_its_worst_second() -> None:
    ended_s = [10 + at / 100 for at in range(100)] + [11 + at / 50 for at in range(50)] + [9.99, 12.0]
    assert sustained_rate(ended_s, 10.0, 2) == (50, 75)


def test_a_second_without_an_answer_is_no_rate() -> None:
    with pytest.raises(BenchError, match=r"\[1, 0\]"):
        sustained_rate([10.5], 10.0, 2)

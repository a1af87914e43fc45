"""Lateness beside faults and without: every request belongs to one of them, and faults answer for what they leave."""

import pytest

from penstock.bench.chaos.chaos_history import Event, QuietTime, RequestEnd
from penstock.bench.chaos.chaos_result import ChaosResult, ChaosSettings
from penstock.bench.chaos.lateness import Judged, Lateness, drained, is_within, lateness, sustained_rate
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


def quiet_time(begin_s: float, end_s: float, pair: tuple[float, float], *, after_faults: bool = True) -> QuietTime:
    return QuietTime(begin_s=begin_s, end_s=end_s, after_faults=after_faults, pair_begin_s=pair[0], pair_end_s=pair[1])


EVENTS = [
    Event(number=0, kind="load", detail="", begun_s=5.0, over_s=6.0),
    Event(number=1, kind="kill front-end", detail="", begun_s=10.0, over_s=10.0),
]


def judge(*answers: RequestEnd, quiet: QuietTime | None = None) -> Judged:
    times = [quiet or quiet_time(20.0, 30.0, (0.0, 40.0))]
    return lateness(answers, times, EVENTS, BUDGET_S, ())


def test_each_request_of_a_pair_counts_on_one_side() -> None:
    judged = judge(*(answered(at_s / 2) for at_s in range(90)))
    # Due at 20.0 to 29.5 s, and until the end of the pair.
    assert (judged.beside.requests, judged.without.requests, judged.left_out) == (60, 20, 0)
    assert (judged.beside.over_ms, judged.without.over_ms, judged.beside.event) == (0.0, 0.0, None)


def test_the_worst_of_each_side_is_found_and_the_fault_before_it() -> None:
    judged = judge(
        answered(6.0, 0.08), answered(11.0, 0.25), answered(21.0), answered(22.0, 0.054), answered(35.0, 0.1)
    )
    assert judged.beside.over_ms == pytest.approx(200)
    assert judged.beside.event is not None
    assert judged.beside.event.kind == "kill front-end"
    assert (judged.beside.requests, judged.beside.late) == (3, 3)
    assert (judged.without.requests, judged.without.late) == (2, 1)
    assert judged.without.over_ms == pytest.approx(4)


def test_a_pair_in_which_the_server_is_late_without_faults_says_nothing() -> None:
    answers = [answered(11.0, 0.25), answered(21.0), answered(22.0, 0.056), answered(51.0, 0.09), answered(65.0)]
    second = quiet_time(60.0, 70.0, (40.0, 70.0))
    judged = lateness(answers, [quiet_time(20.0, 30.0, (0.0, 40.0)), second], EVENTS, BUDGET_S, ())
    assert (judged.left_out, judged.beside.requests, judged.without.requests) == (1, 1, 1)
    assert judged.beside.over_ms == pytest.approx(40)
    assert judged.beside_left_out.over_ms == pytest.approx(200)
    # Failed answers are counted by the times of both pairs.
    assert judged.spans == [(21.0, 30.0), (65.0, 70.0)]


def test_what_piled_up_before_a_time_without_faults_is_the_faults() -> None:
    late = [answered(20.0, 0.3), answered(20.1, 0.2), answered(20.2, 0.04)]
    judged = judge(*late, answered(20.3), answered(21.0, 0.052))
    assert judged.beside.over_ms == pytest.approx(250)
    assert judged.beside.requests == 3
    assert judged.without.over_ms == pytest.approx(2)


def test_a_moment_is_within_a_time_from_its_begin_to_before_its_end() -> None:
    spans = [(1.0, 2.0), (2.0, 3.0), (5.0, 6.0)]
    within = [at / 2 for at in range(14) if is_within(spans, at / 2)]
    assert within == [1.0, 1.5, 2.0, 2.5, 5.0, 5.5]
    assert not is_within([], 1.0)


def test_a_refusal_does_not_show_that_a_backlog_is_served() -> None:
    answers = [answered(20.0, 0.001, status=503), answered(20.1, 0.2), answered(20.2)]
    assert drained(answers, quiet_time(20.0, 30.0, (0.0, 30.0)), BUDGET_S) == [(20.2, 30.0)]


def test_what_piles_up_at_a_new_rate_is_not_the_faults() -> None:
    answers = [answered(20.0, 0.2), answered(20.1)]
    first = quiet_time(20.0, 30.0, (20.0, 40.0), after_faults=False)
    assert drained(answers, first, BUDGET_S) == [(20.0, 30.0)]


def test_the_faults_are_blamed_where_the_backlog_never_ends() -> None:
    judged = judge(*(answered(at_s / 2, 0.5) for at_s in range(60)))
    assert (judged.beside.requests, judged.without.requests, judged.left_out) == (60, 0, 0)
    assert judged.beside.over_ms == pytest.approx(450)
    assert judged.spans == []


def test_answers_may_have_ended_in_any_order() -> None:
    judged = judge(answered(25.0, 0.053), answered(3.0, 0.2), answered(20.5), answered(10.0))
    assert (judged.beside.requests, judged.without.requests) == (2, 2)
    assert (round(judged.beside.over_ms), round(judged.without.over_ms)) == (150, 3)


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

"""Pauses before the restart of a process that died early."""

from penstock.serve.control.backoff import EARLY_DEATH_S, MAX_BACKOFF_S, REPLACED_AT_ONCE, RestartPauses

LONG_LIFE_S = 10 * EARLY_DEATH_S


def test_a_process_that_dies_early_each_time_is_restarted_with_growing_pauses() -> None:
    pauses = RestartPauses()
    pauses_s = [pauses.pause_s(1.0, ready=True) for _ in range(12)]
    assert pauses_s[0] == 0.0
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == MAX_BACKOFF_S
    # A process that lived for long is restarted at once.
    assert pauses.pause_s(LONG_LIFE_S, ready=True) == 0.0


def test_a_process_that_dies_before_it_is_ready_is_restarted_with_growing_pauses() -> None:
    pauses = RestartPauses()
    assert [pauses.pause_s(LONG_LIFE_S, ready=False) for _ in range(12)][-1] == MAX_BACKOFF_S


def test_a_front_end_that_served_is_replaced_at_once_however_short_it_lived() -> None:
    pauses = RestartPauses(REPLACED_AT_ONCE)
    assert [pauses.pause_s(1.0, ready=True, served=True) for _ in range(REPLACED_AT_ONCE)] == [0.0] * REPLACED_AT_ONCE


def test_a_front_end_that_dies_of_its_first_requests_each_time_is_slowed_down() -> None:
    pauses = RestartPauses(REPLACED_AT_ONCE)
    pauses_s = [pauses.pause_s(0.2, ready=True, served=True) for _ in range(REPLACED_AT_ONCE + 8)]
    slowed_s = pauses_s[REPLACED_AT_ONCE:]
    assert slowed_s[0] > 0
    assert slowed_s == sorted(slowed_s)
    assert slowed_s[-1] == MAX_BACKOFF_S
    # One that lived for long ends the count.
    assert pauses.pause_s(LONG_LIFE_S, ready=True, served=True) == 0.0
    assert pauses.pause_s(0.2, ready=True, served=True) == 0.0


def test_a_front_end_that_dies_before_it_serves_is_slowed_down_from_the_second_death_on() -> None:
    pauses = RestartPauses(REPLACED_AT_ONCE)
    assert pauses.pause_s(0.2, ready=True, served=True) == 0.0
    assert pauses.pause_s(0.2, ready=True, served=False) == 0.0
    first_s = pauses.pause_s(0.2, ready=True, served=False)
    assert first_s > 0
    # One that served in between is replaced at once, and is no proof of a start that works.
    assert pauses.pause_s(0.2, ready=True, served=True) == 0.0
    assert pauses.pause_s(0.2, ready=True, served=False) > first_s


def test_a_loop_of_deaths_that_lasts_for_days_goes_on() -> None:
    pauses = RestartPauses()
    # Half an hour more than three days at the longest pause.
    assert [pauses.pause_s(0.2, ready=False) for _ in range(26_100)][-1] == MAX_BACKOFF_S

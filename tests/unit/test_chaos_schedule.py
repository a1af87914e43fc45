"""The faults of a seed."""

from penstock.bench.chaos.fault_schedule import HITLESS, KINDS, LONGEST_STOP_S, schedule
from penstock.bench.chaos.numbered_input import doubles_of, input_of


def test_the_same_seed_gives_the_same_faults() -> None:
    assert schedule(3, 200) == schedule(3, 200)
    assert schedule(3, 200) != schedule(4, 200)


def test_a_longer_schedule_begins_with_the_shorter_one() -> None:
    assert schedule(3, 200)[:50] == schedule(3, 50)


def test_every_kind_is_chosen() -> None:
    planned = schedule(0, 1_000)
    assert {each.kind for each in planned} == set(KINDS)
    assert {each.kind for each in schedule(0, 100, HITLESS)} == set(HITLESS)
    assert all(0 <= each.choice < 1 and each.stop_s <= LONGEST_STOP_S for each in planned)


def test_no_two_requests_have_the_same_input() -> None:
    numbers = [*range(10_000), 1 << 24, (1 << 24) + 1]
    assert len({input_of(number) for number in numbers}) == len(numbers)
    assert doubles_of(5) == tuple(2 * value for value in input_of(5))

"""Who has the time of an event loop: with a clock of the test and a loop that it runs by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from penstock.serve.fair_turns import (
    CONNECTING_NS,
    CONNECTING_SHARE,
    HEAVY,
    IDLE_NS,
    LONG_SHARE,
    MAX_NS,
    ORDINARY,
    SHORT_SHARE,
    WINDOW_BITS,
    FairTurns,
    Usage,
    stream_read_ns,
)

MS = 1_000_000
WINDOW_NS = 1 << 27


@dataclass
class Loop:
    """A loop whose iterations the test begins; each takes 10 us of its own."""

    now_ns: int = WINDOW_NS * 100
    cpu_ns: int = 0
    soon: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list[tuple[float, Callable[[], None]]])

    def __post_init__(self) -> None:
        self.turns = FairTurns(lambda: self.now_ns, lambda: self.cpu_ns, lambda: self)

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.later.append((self.now_ns + seconds * 1e9, call))

    def work(self, ns: int) -> None:
        self.now_ns += ns
        self.cpu_ns += ns

    def iterate(self, others_ns: int = 0) -> None:
        self.work(10_000 + others_ns)
        due = [call for at_ns, call in self.later if at_ns <= self.now_ns]
        self.later = [entry for entry in self.later if entry[0] > self.now_ns]
        calls, self.soon = self.soon + due, []
        for call in calls:
            call()

    def greedy(self) -> Usage:
        """A connection that others precede."""
        usage = self.old(50)[0]
        self.turns.charge_ns(usage, HEAVY * MS)
        assert usage.waits
        return usage

    def old(self, count: int) -> list[Usage]:
        """Connections that each had 0.2 ms in each of some windows."""
        usages = [Usage(self.turns) for _ in range(count)]
        for _ in range(5):
            for usage in usages:
                self.turns.charge_ns(usage, MS // 5)
            self.work(WINDOW_NS)
        for usage in usages:
            self.turns.charge_ns(usage, MS // 5)
        return usages


def test_who_takes_several_times_the_average_waits_until_it_does_not() -> None:
    loop = Loop()
    usages = loop.old(50)
    greedy = usages[0]
    assert not any(usage.waits for usage in usages)
    loop.turns.charge_ns(greedy, HEAVY * MS)
    assert greedy.waits
    assert not any(usage.waits for usage in usages[1:])
    for _ in range(8):
        loop.work(WINDOW_NS)
        for usage in usages:
            loop.turns.charge_ns(usage, MS // 5)
    assert not greedy.waits


def test_where_all_cost_much_or_one_is_alone_none_waits() -> None:
    loop = Loop()
    alone = Usage(loop.turns)
    for _ in range(20):
        loop.turns.charge_ns(alone, 100 * MS)
        assert not alone.waits
        loop.work(WINDOW_NS)
    loop = Loop()
    equals = [Usage(loop.turns) for _ in range(8)]
    for _ in range(20):
        for usage in equals:
            loop.turns.charge_ns(usage, 15 * MS)
            assert not usage.waits
        loop.work(WINDOW_NS)


def test_new_connections_are_compared_together() -> None:
    loop = Loop()
    loop.old(50)
    new = [Usage(loop.turns) for _ in range(100)]
    for usage in new:
        loop.turns.charge_ns(usage, MS // 20)
    # Each has had little, and all of them more than one should.
    assert all(usage.waits for usage in new)


@pytest.mark.parametrize("in_thread", [False, True])
def test_new_connections_whose_requests_are_ordinary_do_not_wait(in_thread: bool) -> None:
    loop = Loop()
    usages = [Usage(loop.turns) for _ in range(50)]
    for _ in range(6):
        loop.work(WINDOW_NS)
        for usage in usages:
            _request(loop, usage, 2 * MS, in_thread=in_thread)
    ordinary = [Usage(loop.turns) for _ in range(20)]
    for usage in ordinary:
        _request(loop, usage, 2 * MS, in_thread=in_thread)
    assert not any(usage.waits for usage in ordinary)
    for usage in ordinary[:2]:
        _request(loop, usage, 3 * ORDINARY * 2 * MS, in_thread=in_thread)
    assert all(usage.waits for usage in ordinary)


def _request(loop: Loop, usage: Usage, ns: int, *, in_thread: bool) -> None:
    if in_thread:
        charged_ns = usage.begin_thread()
        loop.now_ns += ns
        usage.end_thread(ns, charged_ns)
        return
    begin_cpu_ns = usage.begin() or loop.cpu_ns
    loop.work(ns)
    usage.end(begin_cpu_ns)


def test_ordinary_requests_of_many_new_connections_do_not_wait_because_some_took_long() -> None:
    loop = Loop()
    usages = [Usage(loop.turns) for _ in range(100)]
    new = [Usage(loop.turns) for _ in range(300)]
    for _ in range(6):
        loop.work(WINDOW_NS)
        for usage in usages * 10:
            _request(loop, usage, MS // 10, in_thread=False)
    for place, usage in enumerate(new * 2):
        _request(loop, usage, MS if place % 40 == 0 else MS // 10, in_thread=False)
        assert not usage.waits
    # But where most of what they take is beyond that, they do.
    for usage in new[:100]:
        _request(loop, usage, MS, in_thread=False)
    assert all(usage.waits for usage in new)


def test_connections_that_come_after_half_of_a_start_do_not_wait() -> None:
    """What those took that came first, when nothing was known of ordinary requests, is not held against others."""
    loop = Loop()
    first = [Usage(loop.turns) for _ in range(100)]
    later = [Usage(loop.turns) for _ in range(90)]
    for _ in range(4):
        loop.work(WINDOW_NS)
        for usage in first * 10:
            _request(loop, usage, MS // 20, in_thread=False)
        for usage in later * 3:
            _request(loop, usage, MS // 20, in_thread=False)
            assert not usage.waits


def test_connecting_counts_against_new_connections_beyond_a_share_of_the_time() -> None:
    loop = Loop()
    loop.old(50)
    share = int(CONNECTING_SHARE * WINDOW_NS / CONNECTING_NS)
    for count in (1, share - 1):
        # Another process has the core meanwhile.
        begin_cpu_ns, loop.now_ns = loop.cpu_ns, loop.now_ns + 10 * MS
        loop.turns.charge_connecting(begin_cpu_ns, count)
        assert not loop.turns.newcomers.heavy
    loop.turns.charge_connecting(loop.cpu_ns, share)
    assert loop.turns.newcomers.heavy


def test_a_flood_of_connections_is_held_until_it_ends() -> None:
    loop = Loop()
    usages = loop.old(50)
    loop.turns.charge_connecting(loop.cpu_ns, int(3 * CONNECTING_SHARE * WINDOW_NS / CONNECTING_NS))
    for _ in range(20):
        # What a flood that is held gets of a busy loop: four connections at a time.
        loop.work(WINDOW_NS // 4)
        for usage in usages:
            loop.turns.charge_ns(usage, MS // 5)
        for _ in range(4):
            loop.turns.charge_connecting(loop.cpu_ns, 4)
        assert loop.turns.newcomers.heavy
    for _ in range(8):
        loop.work(WINDOW_NS)
        for usage in usages:
            loop.turns.charge_ns(usage, MS // 5)
        loop.turns.charge_connecting(loop.cpu_ns, 1)
    assert not loop.turns.newcomers.heavy


def test_clients_that_use_a_connection_for_few_requests_do_not_wait() -> None:
    loop = Loop()
    old = loop.old(16)
    for turn in range(4000):
        if turn % 40 == 0:
            # By the clock it takes 10 ms.
            begin_cpu_ns, loop.now_ns = loop.cpu_ns, loop.now_ns + 10 * MS
            loop.turns.charge_connecting(begin_cpu_ns, 1)
            assert not loop.turns.newcomers.heavy
        _request(loop, old[turn % 16], MS // 10, in_thread=False)
        loop.work(MS // 5)


def test_after_a_start_all_are_new_and_none_waits() -> None:
    loop = Loop()
    new = [Usage(loop.turns) for _ in range(100)]
    for usage in new * 3:
        loop.turns.charge_ns(usage, MS)
    assert not any(usage.waits for usage in new)


def test_heavy_turns_run_while_the_loop_is_idle_and_have_their_share_beside_a_busy_one() -> None:
    loop = Loop()
    ran = 0
    greedy = loop.greedy()

    def turn() -> None:
        nonlocal ran
        ran += 1
        loop.work(MS // 5)
        loop.turns.add(turn, greedy)

    loop.turns.add(turn, greedy)
    loop.iterate()
    for _ in range(100):
        loop.iterate()
    idle = ran
    assert idle >= 100
    for _ in range(100):
        loop.iterate(others_ns=max(MS, 2 * IDLE_NS))
    # Their share of some 100 ms, of 0.2 ms each.
    share = 100 * SHORT_SHARE / 0.2
    assert 0.5 * share <= ran - idle <= 3 * share


def test_a_turn_ends_after_its_time_and_the_light_ones_are_not_held_up() -> None:
    loop = Loop()
    ran: list[str] = []
    greedy = loop.greedy()
    modest = Usage(loop.turns)

    def turn(name: str) -> Callable[[], None]:
        def run() -> None:
            ran.append(name)
            loop.work(MS // 5)

        return run

    for _ in range(20):
        loop.turns.add(turn("heavy"), greedy)
    loop.turns.add(turn("light"), modest)
    before_ns = loop.now_ns
    loop.iterate()
    assert ran[0] == "light"
    assert loop.now_ns - before_ns <= 2 * (MAX_NS + MS // 5) + MS
    for _ in range(20):
        loop.iterate()
    assert ran.count("heavy") == 20


def test_what_took_long_is_paid_back_beside_a_busy_loop_and_holds_up_no_short_turn() -> None:
    loop = Loop()
    others = loop.old(50)
    greedy, short = loop.greedy(), loop.greedy()
    begun: list[int] = []
    waited_ns: list[int] = []

    def turn() -> None:
        begun.append(loop.now_ns)
        charged_ns = greedy.begin_thread()
        added_ns = loop.now_ns
        loop.turns.add(lambda: waited_ns.append(loop.now_ns - added_ns), short)
        loop.iterate(others_ns=MS)
        greedy.end_thread(5 * MS, charged_ns)

    greedy.end_thread(5 * MS, 0)
    for _ in range(4):
        loop.turns.add(turn, greedy)
    for _ in range(6_000):
        # It stays heavy: what others take is charged too.
        for usage in others:
            loop.turns.charge_ns(usage, MS // len(others))
        loop.turns.charge_ns(greedy, MS // 3, in_loop=False)
        loop.iterate(others_ns=MS)
    assert len(begun) == 4
    # The load is known after two measurements of it.
    _, *gaps_ns = [later - earlier for earlier, later in pairwise(begun)]
    assert min(gaps_ns) >= 0.5 * 5 * MS / LONG_SHARE
    assert max(waited_ns) < 10 * MS


def test_a_connection_of_many_streams_counts_as_as_many_connections() -> None:
    loop = Loop()
    others = loop.old(50)
    shared = Usage(loop.turns)
    shared.weight = 5
    for _ in range(5):
        for usage in others:
            loop.turns.charge_ns(usage, MS // 5)
        loop.turns.charge_ns(shared, MS)
        loop.work(WINDOW_NS)
    assert shared.used_ns <= max(usage.used_ns for usage in others)
    assert not shared.waits
    # What each of its streams takes is what is compared.
    for usage in others:
        loop.turns.charge_ns(usage, MS // 5)
    loop.turns.charge_ns(shared, 5 * HEAVY * MS)
    assert shared.waits
    assert not any(usage.waits for usage in others)


def test_what_was_used_many_windows_ago_is_forgotten() -> None:
    for passed in (62, 63, 64, 65, 128, 1_000):
        now_ns = [0]
        turns = FairTurns(lambda now_ns=now_ns: now_ns[0], lambda: 0)
        usage = Usage(turns)
        turns.charge_ns(usage, 1_000_000)
        now_ns[0] += passed << WINDOW_BITS
        turns.charge_ns(usage, 1_000)
        assert usage.used_ns == 1_000, passed


def test_a_pause_of_the_machine_makes_no_stream_heavy() -> None:
    loop = Loop()
    usage = loop.old(50)[0]
    begin_cpu_ns = usage.begin() or loop.cpu_ns
    loop.work(15 * MS)
    usage.end(begin_cpu_ns, stream_read_ns(2_560))
    assert not usage.waits
    # A turn in which many of its bytes were taken is another thing.
    begin_cpu_ns = loop.cpu_ns
    loop.work(15 * MS)
    loop.turns.charge_turn(usage, begin_cpu_ns, most_ns=stream_read_ns(65_536))
    assert usage.waits

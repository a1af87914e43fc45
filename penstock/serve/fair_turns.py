"""Turns in an event loop, when one connection costs more than the others.

Each connection has a `Usage`: the time that its bytes and requests took lately. One that took several times what a
connection takes on average is heavy: its requests wait until the loop has nothing else to do. What took long for it, in
the loop or in a thread, is paid back before the next: of the time that the others leave, and a small share of all where
they leave none. All new connections together are compared likewise, so that a client whose requests cost more than
ordinary ones gains nothing by opening more. Connecting counts against them where it takes more than a share of the
loop's time. Others are served as they come.

The comparison is with the average: where all connections cost much, or one is alone, none is heavy.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

# Time that is given away in one iteration of the event loop, beside what comes from sockets.
MAX_NS = 500_000
# Usage is halved after so many nanoseconds, 2**27 of them. A connection is young in its first windows.
WINDOW_BITS, YOUNG = 27, 2
# A connection is heavy above so many times the average, and above this time, until it is below so many times.
HEAVY, LEAST_NS, LIGHT = 3, 1_000_000, 1.5
# One that took more of all is not heavy: there is hardly another.
MOST_OF_ALL = 0.8
# An iteration of the loop in which nothing else happened takes less.
IDLE_NS = 50_000
# Share of the time that heavy connections have at least, together: for what is short, for what is long, and for what is
# long of new ones, which have more, since one that behaves well waits among them. Larger ones are felt by the others:
# what waits behind a loop that is 90% busy waits for ten times what is taken.
SHORT_SHARE, LONG_SHARE, NEW_SHARE = 1 / 64, 1 / 512, 1 / 64
MOST_OWED_NS = 30_000_000
# The load of the loop's thread is measured over so many nanoseconds at least. At this load nothing is left for what
# takes long.
LOAD_NS, FULL_LOAD = 20_000_000, 0.5
# What the bytes of a live stream take at most: what goes beyond that is a pause of the machine, or a collection of
# garbage, which met this read by chance.
STREAM_READ_NS, STREAM_BYTE_NS = 200_000, 200
# Time that each row of a request of several takes beside the reading of its body: its slot, its result, its reply.
ROW_NS = 40_000
# Likewise a chunk of a stream; and its batch, of the network.
CHUNK_NS, CHUNK_BATCH_NS = 100_000, 250_000
# Of the requests that cost what most do, one in so many is measured; all of those that cost more than this.
SAMPLED, SAMPLED_MAX_NS = 8, 100_000
# Least time that is expected of a job in a thread.
JOB_NS = 1_000_000
# A request of a new connection that takes up to so many times what others take is as theirs are.
ORDINARY = 3
# New connections are heavy only if what they took beyond ordinary requests is more than this share of all they took:
# among thousands of ordinary requests some take long, because the machine had a pause.
UNUSUAL_SHARE = 0.25
# Connecting is ordinary up to this share of the time: clients that use a connection for few requests are not held up.
CONNECTING_SHARE = 1 / 16
# Time that each connection takes after it was accepted.
CONNECTING_NS = 100_000
# Weight of the newest read or job in the averages of what is usual.
FOLLOW = 1 / 32
# Longer than anything takes.
UNBOUNDED_NS = 1 << 62


def stream_read_ns(nbytes: int) -> int:
    """Return the time that bytes of a live stream take at most, in nanoseconds."""
    return STREAM_READ_NS + STREAM_BYTE_NS * nbytes


def _faded_ns(used_ns: int, windows: int) -> int:
    """Return what a use counts some windows later: half in the next one, a quarter in the one after it."""
    # Numbers in C are shifted by 63 bits at most; nothing is left of them then.
    return used_ns >> min(63, max(0, windows))


@final
@dataclass(slots=True, eq=False)
class Usage:
    """Recent use of the loop by one connection.

    Args:
        turns: The loop's turns.

    Attributes:
        weight: Number of connections that it counts as: its live streams, of one that carries several.
        used_ns: Time in the loop and in threads for each of these, where that of earlier windows counts half, a
            quarter, and so on.
        window: The window of `used_ns`.
        heavy: Whether it is several times the average.
        long: Whether it is heavy by what took long at once.
        young: Whether it is new; it is heavy too, then, where all new ones together are.
        unusual: Whether it is heavy or young.
        stays: Whether the connection has to stay in this process, which keeps something for it.
    """

    turns: "FairTurns"
    weight: int = field(init=False, default=1)
    used_ns: int = field(init=False, default=0)
    window: int = field(init=False, default=0)
    heavy: bool = field(init=False, default=False)
    long: bool = field(init=False, default=False)
    young: bool = field(init=False, default=True)
    unusual: bool = field(init=False, default=True)
    stays: bool = field(init=False, default=False)
    _until_charged: int = field(init=False, default=0)
    _windows: int = field(init=False, default=0)
    _counted: int = field(init=False, default=0)

    @property
    def waits(self) -> bool:
        """True if others come first."""
        return self.heavy or (self.young and self.turns.newcomers.heavy)

    def begin_window(self, window: int) -> None:
        """Go on to another window."""
        self.used_ns = _faded_ns(self.used_ns, window - self.window)
        self.window = window
        self._windows += 1
        if self._windows > YOUNG:
            self.young = False
            self.unusual = self.heavy

    def settle(self) -> None:
        """Take the connection for one that is not new: it was not, and ordinary, in another process."""
        self._windows = YOUNG
        self.young = self.unusual = False

    def begin(self) -> int:
        """Begin with bytes of the connection; return the processor time, or 0 where they are not measured.

        Of connections that cost what most do, one cheap read in `SAMPLED` is. It is the time of the processor, because
        another thread may have the core meanwhile.
        """
        if not self.unusual and self._until_charged:
            self._until_charged -= 1
            return 0
        return self.turns.cpu_ns()

    def end(self, begin_cpu_ns: int, most_ns: int = UNBOUNDED_NS) -> None:
        """Charge the time since `begin`, up to what such bytes can take."""
        turns = self.turns
        spent_ns = min(turns.cpu_ns() - begin_cpu_ns, most_ns)
        if self.unusual:
            turns.charge_ns(self, spent_ns)
            return
        reads = 1 if spent_ns > SAMPLED_MAX_NS else SAMPLED
        self._until_charged = reads - 1
        turns.charge_ns(self, reads * spent_ns)
        # One that made it heavy is not what others take.
        if not self.unusual:
            turns.usual_ns += reads * FOLLOW * (spent_ns - turns.usual_ns)

    def add_rows(self, rows: int) -> None:
        """Note that a request of several rows is submitted."""
        if rows > 1:
            self.turns.charge_ns(self, rows * ROW_NS)
            self.turns.judge_long(self, rows * ROW_NS)

    def add_chunks(self, count: int) -> None:
        """Note that chunks of a stream are submitted."""
        self.turns.charge_ns(self, count * CHUNK_NS)

    def begin_thread(self, expected_ns: float = 0.0) -> int:
        """Note that a thread begins to work for it; return the time that is charged now."""
        if self.waits:
            self._counted += 1
            self.turns.threads += 1
        charged_ns = max(JOB_NS, int(expected_ns))
        self.turns.charge_ns(self, charged_ns, in_loop=False, ordinary_ns=ORDINARY * self.turns.usual_job_ns)
        self.turns.judge_long(self, charged_ns)
        return charged_ns

    def end_thread(self, own_ns: int, charged_ns: int) -> None:
        """Note that a thread has worked for it, how long, and what `begin_thread` charged."""
        ordinary_ns = max(0.0, ORDINARY * self.turns.usual_job_ns - charged_ns)
        self.turns.charge_ns(self, max(0, own_ns - charged_ns), in_loop=False, ordinary_ns=ordinary_ns)
        self.turns.judge_long(self, own_ns - charged_ns)
        if not self.unusual:
            self.turns.usual_job_ns += FOLLOW * (own_ns - self.turns.usual_job_ns)
        if self._counted:
            self._counted -= 1
            self.turns.thread_ended()


@final
@dataclass(slots=True, eq=False)
class _LongTurns:
    """Turns that may take long: the next comes when the time of the last is paid back.

    Args:
        least_share: Share of the clock's time that pays, at least.
        paid_ns: Until when it was paid.
    """

    least_share: float
    paid_ns: int
    waiting: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]], init=False)
    owed_ns: float = field(default=0.0, init=False)

    def owe(self, spent_ns: int) -> None:
        """Note what was long."""
        # At most: several may have begun before it was known that they take long.
        self.owed_ns = min(self.owed_ns + spent_ns, MOST_OWED_NS)

    def wait_ns(self, now_ns: int, share: float) -> int:
        """Pay from the time that has passed; return the time until all is paid, 0 if it is."""
        share = max(share, self.least_share)
        self.owed_ns = max(0.0, self.owed_ns - (now_ns - self.paid_ns) * share)
        self.paid_ns = now_ns
        return min(max(int(self.owed_ns / share), MAX_NS), LOAD_NS) if self.owed_ns else 0


@final
@dataclass(slots=True, eq=False)
class FairTurns:
    """The turns of one event loop.

    Args:
        clock_ns: A monotonic clock.
        cpu_ns: Processor time of the loop's thread.
        loop: Returns the loop.

    Attributes:
        threads: Jobs in threads for heavy connections.
        newcomers: Use of all new connections, beyond that of ordinary requests.
        usual_ns: Usual time of a read of connections that are neither heavy nor new.
        usual_job_ns: Usual time of a job in a thread for them.
    """

    clock_ns: Callable[[], int] = time.monotonic_ns
    cpu_ns: Callable[[], int] = time.thread_time_ns
    loop: Callable[[], Any] = asyncio.get_running_loop
    threads: int = field(default=0, init=False)
    newcomers: Usage = field(init=False)
    _all_new: Usage = field(init=False)  # use of all new connections, with that of ordinary requests
    usual_ns: float = field(default=0.0, init=False)
    usual_job_ns: float = field(default=0.0, init=False)
    _light: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]], init=False)
    _heavy: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]], init=False)
    _long: _LongTurns = field(init=False)
    _new: _LongTurns = field(init=False)
    _scheduled: bool = field(default=False, init=False)
    _timed: bool = field(default=False, init=False)
    # Use of all connections, in the present window and before; those that had any.
    _used_ns: int = field(default=0, init=False)
    _window: int = field(default=0, init=False)
    _active: int = field(default=0, init=False)
    _average_ns: int = field(default=0, init=False)
    _limit_ns: int = field(default=LEAST_NS, init=False)
    # What connecting may still take in the present window.
    _connecting_left_ns: int = field(default=0, init=False)
    # When the last turn ended, and what heavy connections have had by then of what is short, beyond their share; an
    # idle loop forgives that.
    _ended_ns: int = field(default=0, init=False)
    _owed_ns: float = field(default=0.0, init=False)
    # Load by the others: clock and processor time when it was measured last, and the heavy ones' time since then.
    _load: float = field(default=0.0, init=False)
    _load_at_ns: int = field(default=0, init=False)
    _load_cpu_ns: int = field(default=0, init=False)
    _heavy_ns: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.newcomers = Usage(self)
        self.newcomers.young = self.newcomers.unusual = False
        self._all_new = Usage(self)
        now_ns = self._load_at_ns = self.clock_ns()
        self._long, self._new = _LongTurns(LONG_SHARE, now_ns), _LongTurns(NEW_SHARE, now_ns)
        self._load_cpu_ns = self.cpu_ns()

    def charge_ns(self, usage: Usage, spent_ns: int, *, in_loop: bool = True, ordinary_ns: float | None = None) -> None:
        """Charge a time to a connection.

        Args:
            usage: Of the connection.
            spent_ns: The time.
            in_loop: Whether it is of the loop's thread, or of another.
            ordinary_ns: So much of it does not count against new connections; by default that of a read.
        """
        window = self.clock_ns() >> WINDOW_BITS
        if window != self._window:
            self._begin_window(window)
        if window != usage.window:
            usage.begin_window(window)
            self._active += usage.weight
        used_ns = usage.used_ns = usage.used_ns + spent_ns // usage.weight
        self._used_ns += spent_ns
        if usage.unusual:
            if ordinary_ns is None:
                ordinary_ns = ORDINARY * self.usual_ns
            self._charge_unusual(usage, spent_ns, int(ordinary_ns), window, in_loop=in_loop)
        elif used_ns > self._limit_ns:
            self._judge(usage)

    def _charge_unusual(self, usage: Usage, spent_ns: int, ordinary_ns: int, window: int, *, in_loop: bool) -> None:
        newcomers = self.newcomers
        if usage.young:
            all_new = self._all_new
            if window != newcomers.window:
                newcomers.begin_window(window)
            if window != all_new.window:
                all_new.begin_window(window)
            all_new.used_ns += spent_ns
            # Where most are new, as after a start, they are the others.
            most_are_new = 2 * all_new.used_ns >= self._used_ns
            if not most_are_new:
                # Where ordinary requests take long, as pictures do, a new connection's picture is one of them.
                newcomers.used_ns += max(0, spent_ns - ordinary_ns)
            self._judge(newcomers)
            newcomers.heavy &= not most_are_new and newcomers.used_ns > UNUSUAL_SHARE * all_new.used_ns
        if usage.waits:
            self._heavy_ns += spent_ns if in_loop else 0
        self._judge(usage)

    def charge_connecting(self, begin_cpu_ns: int, count: int) -> None:
        """Charge connections that were accepted, with what each takes afterwards.

        Args:
            begin_cpu_ns: Processor time before: another process may have the core meanwhile.
            count: How many.
        """
        window = self.clock_ns() >> WINDOW_BITS
        if window != self._window:
            self._begin_window(window)
        spent_ns = self.cpu_ns() - begin_cpu_ns + count * CONNECTING_NS
        # Where new connections wait, all of it counts, so that they wait until the flood ends.
        ordinary_ns = 0 if self.newcomers.heavy else min(spent_ns, self._connecting_left_ns)
        self._connecting_left_ns -= ordinary_ns
        self._used_ns += ordinary_ns
        if spent_ns > ordinary_ns:
            self.charge_ns(self.newcomers, spent_ns - ordinary_ns)

    def charge_turn(self, usage: Usage, begin_cpu_ns: int, later_ns: int = 0, most_ns: int = UNBOUNDED_NS) -> None:
        """Charge a turn.

        Args:
            usage: Of its connection.
            begin_cpu_ns: Processor time when it began.
            later_ns: Time that will be spent on what it has submitted.
            most_ns: What the turn can have taken by itself at most.
        """
        spent_ns = min(self.cpu_ns() - begin_cpu_ns, most_ns)
        self.charge_ns(usage, spent_ns)
        self.judge_long(usage, spent_ns + later_ns)

    def judge_long(self, usage: Usage, spent_ns: int) -> None:
        """Note what a connection took at once, if others come before it."""
        if spent_ns > MAX_NS and usage.waits:
            usage.long = True
            if usage.young:
                self.newcomers.long = True
                self._new.owe(spent_ns)
            else:
                self._long.owe(spent_ns)

    def _judge(self, usage: Usage) -> None:
        used_ns = usage.used_ns
        # In the first window it is the average so far.
        average_ns = self._average_ns or self._used_ns // max(1, self._active)
        if used_ns < LIGHT * average_ns or used_ns * usage.weight > MOST_OF_ALL * self._used_ns:
            usage.heavy = usage.long = False
        elif used_ns > max(LEAST_NS, HEAVY * average_ns):
            usage.heavy = True
        usage.unusual = usage.heavy or usage.young

    def add(self, function: Callable[[], None], usage: Usage) -> None:
        """Call a function of a connection in a later iteration of the running loop; its time must be bounded."""
        waiting = self._light
        if usage.waits:
            waiting = self._heavy
            if usage.young and (usage.long or self.newcomers.long):
                waiting = self._new.waiting
            elif usage.long:
                waiting = self._long.waiting
        waiting.append(function)
        self._schedule()

    def add_new(self, function: Callable[[], None]) -> None:
        """Call a function that accepts new connections likewise; it is short."""
        (self._heavy if self.newcomers.heavy else self._light).append(function)
        self._schedule()

    def thread_ended(self) -> None:
        """Note that a job of a heavy connection has left its thread."""
        self.threads -= 1
        if self._long.waiting or self._new.waiting:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop().call_soon(self._run)

    def _begin_window(self, window: int) -> None:
        self._average_ns = self._used_ns // max(1, self._active)
        self._limit_ns = max(LEAST_NS, HEAVY * self._average_ns)
        self._used_ns = _faded_ns(self._used_ns, window - self._window)
        self._window, self._active = window, 0
        self._connecting_left_ns = int(CONNECTING_SHARE * (1 << WINDOW_BITS))

    def _run(self) -> None:
        self._scheduled = False
        begin_ns = self.clock_ns()
        gap_ns = begin_ns - self._ended_ns
        self._call(self._light)
        self._owed_ns = 0.0 if gap_ns <= IDLE_NS else max(0.0, self._owed_ns - gap_ns * SHORT_SHARE)
        if self._heavy and not self._owed_ns:
            self._owed_ns += self._call(self._heavy)
        wait_ns = -1
        for turns in (self._new, self._long):
            if turns.waiting and not self.threads:
                turn_ns = self._run_long(turns, begin_ns)
                wait_ns = turn_ns if wait_ns < 0 else min(wait_ns, turn_ns)
        self._ended_ns = self.clock_ns()
        if self._light or self._heavy or (wait_ns == 0 and not self.threads):
            self._schedule()
        elif wait_ns > 0 and not self._timed:
            self._timed = True
            self.loop().call_later(wait_ns / 1e9, self._in_time)

    def _in_time(self) -> None:
        self._timed = False
        self._schedule()

    def _run_long(self, turns: _LongTurns, now_ns: int) -> int:
        """Call what may take long, if nothing is owed; return the time until the next attempt, 0 for an iteration."""
        if wait_ns := turns.wait_ns(now_ns, self._share(now_ns)):
            return wait_ns
        if not self._owed_ns:
            self._owed_ns += self._call(turns.waiting)
        return 0

    def _share(self, now_ns: int) -> float:
        """Return the share of the time for what takes long, beside a loop of this load."""
        passed_ns = now_ns - self._load_at_ns
        if passed_ns > LOAD_NS:
            cpu_ns = self.cpu_ns()
            self._load = (cpu_ns - self._load_cpu_ns - self._heavy_ns) / passed_ns
            self._load_at_ns, self._load_cpu_ns, self._heavy_ns = now_ns, cpu_ns, 0
        return min(1.0, 1 - self._load / FULL_LOAD)

    def _call(self, waiting: deque[Callable[[], None]]) -> int:
        """Call what waits, but not what is added meanwhile, until something took long; return the time."""
        begin_ns = now_ns = self.clock_ns()
        owed_ns, threads = self._new.owed_ns + self._long.owed_ns, self.threads
        for _ in range(len(waiting)):
            waiting.popleft()()
            now_ns = self.clock_ns()
            took_long = self.threads > threads or self._new.owed_ns + self._long.owed_ns > owed_ns
            if now_ns - begin_ns >= MAX_NS or took_long:
                break
        return now_ns - begin_ns

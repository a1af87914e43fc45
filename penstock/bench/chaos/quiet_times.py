"""Times without faults, which alternate with faults during a run: the control of what is measured beside faults."""

import time
from typing import final

from penstock.bench.chaos.chaos_history import QuietTime
from penstock.bench.chaos.run_load import RunLoad
from penstock.bench.chaos.subject import Subject
from penstock.bench.core_load import CoreLoad
from penstock.serve.control.fork_server import GATHER_S

# Faults between two times without. More would put the times further apart than the changes of a machine's speed.
FAULTS_TOGETHER = 6
# The server postpones work of a load or a kill, such as imports for later restarts. It belongs to the faults.
SETTLED_LIMIT_S = 30.0
LOOK_S = 1.5


@final
class QuietTimes:
    """Times without faults, as long as those with some, before and after them in turn.

    Args:
        subject: The server.
        load: Its load, whose rate is adapted before each pair of times.
        times: Gets each time, at the end of its pair.
        server_cpus: The server's cores; None for all.
    """

    def __init__(
        self,
        subject: Subject,
        load: RunLoad,
        times: list[QuietTime],
        server_cpus: frozenset[int] | None,
    ) -> None:
        self._subject = subject
        self._load = load
        self._times = times
        self._server_cpus = server_cpus
        self._pair_begun_s = self._begun_s = time.monotonic()
        # Begin and end of the time without faults of a pair in which it comes first.
        self._first: tuple[float, float] | None = None
        self._is_open = False
        # How long the last faults took, with the work that was postponed.
        self._faults_s = 0.0
        self._busy_s = self._waited_s = 0.0

    @property
    def busy(self) -> float:
        """Share of these times in which the server's cores were busy; NaN without any."""
        return self._busy_s / self._waited_s if self._waited_s else float("nan")

    def before(self, done: int, left: int, end_s: float) -> bool:
        """Return whether the next fault may come, after a time without if that comes first.

        Args:
            done: Faults that were brought about.
            left: Faults that are planned.
            end_s: Faults that would come later, with a time without, are left out.
        """
        if done % FAULTS_TOGETHER:
            return True
        if done and time.monotonic() + 2 * self._faults_s > end_s:
            return False
        if done:
            # The first requests after it belong to what comes next, in every second pair a time without faults.
            self._load.adapt()
        self._pair_begun_s, self._is_open = time.monotonic(), True
        if _comes_first(done):
            self._first = self._wait(min(1.0, left / FAULTS_TOGETHER))
        self._begun_s = time.monotonic()
        return True

    def after(self, done: int, *, is_last: bool) -> None:
        """Wait after the last of some faults until postponed work is done, then a time without faults if that is next.

        Args:
            done: Faults that were brought about.
            is_last: Whether no other comes.
        """
        if done % FAULTS_TOGETHER and not is_last:
            return
        time.sleep(GATHER_S)
        self._subject.wait_settled(SETTLED_LIMIT_S, serves=True)
        self._faults_s = time.monotonic() - self._begun_s
        self._add(*(self._first or self._wait()))

    def end(self) -> None:
        """End a pair whose faults the server did not survive, so that they count: it has no time without faults."""
        if self._is_open:
            now_s = time.monotonic()
            begin_s, end_s = self._first or (now_s, now_s)
            self._add(begin_s, end_s)

    def _add(self, begin_s: float, end_s: float) -> None:
        self._times.append(
            QuietTime(
                begin_s=begin_s,
                end_s=end_s,
                after_faults=self._first is None,
                pair_begin_s=self._pair_begun_s,
                pair_end_s=time.monotonic(),
            )
        )
        self._first, self._is_open = None, False

    def _wait(self, share: float = 1.0) -> tuple[float, float]:
        begin_s = time.monotonic()
        end_s = begin_s + share * self._faults_s
        cores, took_s = CoreLoad(self._server_cpus), 0.0
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
            looked_s = time.monotonic()
            if looked_s + took_s < end_s:
                # As after a fault, so that the server has the same requests; but not beyond the end.
                self._subject.wait_back(LOOK_S, whole=True)
                took_s = time.monotonic() - looked_s
        end_s = time.monotonic()
        self._busy_s += (1.0 - cores.idle_share()) * (end_s - begin_s)
        self._waited_s += end_s - begin_s
        return begin_s, end_s


def _comes_first(done: int) -> bool:
    """True if the time without faults comes before these: in every second pair of them."""
    return done // FAULTS_TOGETHER % 2 == 1

"""An event loop that polls for some time instead of sleeping."""

from collections import deque
from collections.abc import Callable

from penstock.serve.idle_polling import IdlePolling


class Loop:
    """The queue of an event loop, whose polls take a microsecond each."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.soon: deque[Callable[[], None]] = deque()
        self.looks = 0

    def look(self) -> None:
        self.looks += 1

    def run(self) -> int:
        """Poll until nothing is to be called; returns the nanoseconds it took."""
        start_ns = self.now_ns
        while self.soon:
            for _ in range(len(self.soon)):
                self.soon.popleft()()
            self.now_ns += 1_000
        return self.now_ns - start_ns

    def polling(self, stay_ns: int) -> IdlePolling:
        return IdlePolling(self.soon.append, lambda: self.now_ns, stay_ns, self.look)


def test_the_loop_polls_for_the_time_and_looks_each_time() -> None:
    loop = Loop()
    polling = loop.polling(50_000)
    polling.extend()
    assert loop.run() == 51_000
    assert loop.looks == 50
    assert loop.run() == 0
    polling.extend()
    assert loop.run() == 51_000


def test_more_calls_extend_the_time_and_are_one_poll_each() -> None:
    loop = Loop()
    polling = loop.polling(50_000)
    polling.extend()
    polling.extend()
    loop.soon.popleft()()
    loop.now_ns = 40_000
    polling.extend()
    assert len(loop.soon) == 1
    assert loop.run() == 51_000


def test_a_time_of_0_never_polls() -> None:
    loop = Loop()
    loop.polling(0).extend()
    assert not loop.soon

"""The header `Date` of responses (RFC 9110, section 6.6.1): its line is made once a second, not once a response."""

import time
from collections.abc import Callable
from email.utils import formatdate
from typing import final

# So that a timer that fires a little early does not find the same second again.
AFTER_S = 0.001


@final
class ResponseDate:
    """The line of this second; a timer calls `renew` once a second, and who knows the time calls `renew_if_due`.

    Args:
        clock_s: The wall clock, in seconds since 1970.
        clock_ns: The monotonic clock of `renew_if_due`.

    Attributes:
        line: The line with its end. Responses of one second share the object, so that it can be compared by identity.
        until_ns: When its second ends, by the monotonic clock.
    """

    __slots__ = ("_clock_ns", "_clock_s", "line", "until_ns")

    def __init__(
        self, clock_s: Callable[[], float] = time.time, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._clock_s, self._clock_ns = clock_s, clock_ns
        self.line = b""
        self.renew()

    def renew(self) -> float:
        """Make the line anew if the second is another; return the seconds until the next one."""
        now_s = self._clock_s()
        line = f"Date: {formatdate(now_s, usegmt=True)}\r\n".encode()
        if line != self.line:
            self.line = line
        left_s = 1 - now_s % 1 + AFTER_S
        self.until_ns = self._clock_ns() + int(left_s * 1e9)
        return left_s

    def renew_if_due(self, now_ns: int) -> None:
        """Renew the line if its second is over: the timer is late where the loop was blocked or the process stopped."""
        if now_ns >= self.until_ns:
            self.renew()

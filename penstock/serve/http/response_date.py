"""The header `Date` of responses (RFC 9110, section 6.6.1): its line is made once a second, not once a response."""

import time
from collections.abc import Callable
from email.utils import formatdate
from typing import final

# So that a timer that fires a little early does not find the same second again.
AFTER_S = 0.001


@final
class ResponseDate:
    """The line of this second; `renew` it once a second.

    Args:
        clock_s: The wall clock, in seconds since 1970.

    Attributes:
        line: The line with its end. Responses of one second share the object, so that it can be compared by identity.
    """

    __slots__ = ("_clock_s", "line")

    def __init__(self, clock_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self.line = b""
        self.renew()

    def renew(self) -> float:
        """Make the line anew if the second is another; return the seconds until the next one."""
        now_s = self._clock_s()
        line = f"Date: {formatdate(now_s, usegmt=True)}\r\n".encode()
        if line != self.line:
            self.line = line
        return 1 - now_s % 1 + AFTER_S

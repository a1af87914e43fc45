"""Bytes that single reads left over: parsed a little in each iteration of the event loop, in turn for all."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

# Parsing of all connections together in one iteration of the event loop, beside the first step of each read.
MAX_NS = 500_000


@final
@dataclass(slots=True, eq=False)
class LeftoverQueue:
    """The connections of one listener that have bytes to parse on.

    Args:
        clock_ns: A monotonic clock.
    """

    clock_ns: Callable[[], int] = time.monotonic_ns
    _waiting: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]], init=False)
    _scheduled: bool = field(default=False, init=False)

    def add(self, parse: Callable[[], None]) -> None:
        """Call a function in a later iteration of the running loop; it parses a bounded number of bytes."""
        self._waiting.append(parse)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end_ns = self.clock_ns() + MAX_NS
        # Not those that are added meanwhile.
        for _ in range(len(self._waiting)):
            self._waiting.popleft()()
            if self.clock_ns() >= end_ns:
                break
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

"""Watchdog that ends a process that hangs in a collective or whose launcher is gone."""

import os
import sys
import threading
import time
from typing import Self, final

from penstock.train.parallel.world import POLL_S, World, longest_timeout_s

EXIT_HANGS = 3


@final
class Watchdog:
    """Ends this process when it makes no progress for too long, or when its launcher is gone.

    A NCCL collective whose peer is gone blocks the host, and nothing else watches a captured one.

    Args:
        world: The processes; names the current activity of this one.
        parent: The process id of the launcher, if this process must end with it.
    """

    def __init__(self, world: World, parent: int | None = None) -> None:
        self._world = world
        self._parent = parent
        # Gloo raises after the timeout, and its error says more than an exit here. NCCL aborts the process without
        # naming the operation, and does not abort a captured step at all.
        self._limit_s = world.timeout_s if world.device.type == "cuda" else longest_timeout_s(world.timeout_s)
        self._is_paused = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._world.size > 1 or self._parent is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def beat(self, activity: str) -> None:
        """Record progress and name the next activity."""
        self._world.mark_progress()
        self._world.activity = activity
        self._is_paused = False

    def pause(self, activity: str) -> None:
        """Set no limit on an activity that involves no other process, until the next beat."""
        self._world.activity = activity
        self._is_paused = True

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            self.check()

    def check(self) -> None:
        """End this process if the launcher is gone or the limit has passed."""
        if self._parent is not None and os.getppid() != self._parent:
            os._exit(EXIT_HANGS)
        silent_s = time.monotonic() - self._world.progress_at_s
        # A process alone waits for nobody.
        if self._world.size > 1 and not self._is_paused and silent_s > self._limit_s:
            sys.stderr.write(
                f"penstock: {self._world.label} made no progress for {silent_s:.0f} s in {self._world.activity}; "
                f"it is ended.\n"
            )
            sys.stderr.flush()
            os._exit(EXIT_HANGS)

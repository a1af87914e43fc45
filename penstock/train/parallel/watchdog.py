"""Watchdog that ends a process that hangs in a collective, whose launcher is gone, or whose run was taken over."""

import os
import sys
import threading
import time
from contextlib import suppress
from typing import Self, final

from penstock.train.parallel.world import POLL_S, World, longest_timeout_s
from penstock.train.run_owner import FENCE_POLL_S, RunAttempt, RunTakenOver

EXIT_HANGS = 3
EXIT_TAKEN_OVER = 2


@final
class Watchdog:
    """Ends this process when it makes no progress for too long, or when its launcher or its run is gone.

    A NCCL collective whose peer is gone blocks the host, and nothing else watches a captured one.

    Args:
        world: The processes; names the current activity of this one.
        parent: The process id of the launcher, if this process must end with it.
        attempt: This attempt of the run, if this process must end soon after a newer one has begun, whatever it does.
    """

    def __init__(self, world: World, parent: int | None = None, attempt: RunAttempt | None = None) -> None:
        self._world = world
        self._parent = parent
        self._attempt, self._checked_s = attempt, time.monotonic()
        # Gloo raises after the timeout, and its error says more than an exit here. NCCL aborts the process without
        # naming the operation, and does not abort a captured step at all.
        self._limit_s = world.timeout_s if world.device.type == "cuda" else longest_timeout_s(world.timeout_s)
        self._is_paused = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._world.size > 1 or self._parent is not None or self._attempt is not None:
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
        """End this process if the launcher is gone, a newer attempt has begun or the limit has passed."""
        if self._parent is not None and os.getppid() != self._parent:
            os._exit(EXIT_HANGS)
        self._check_attempt()
        silent_s = time.monotonic() - self._world.progress_at_s
        # A process alone waits for nobody.
        if self._world.size > 1 and not self._is_paused and silent_s > self._limit_s:
            _end(
                f"{self._world.label} made no progress for {silent_s:.0f} s in {self._world.activity}; it is ended.",
                EXIT_HANGS,
            )

    def _check_attempt(self) -> None:
        if self._attempt is None or time.monotonic() - self._checked_s < FENCE_POLL_S:
            return
        self._checked_s = time.monotonic()
        try:
            # A folder that cannot be read now is a matter of the next checkpoint.
            with suppress(OSError):
                self._attempt.check()
        except RunTakenOver as error:
            _end(str(error), EXIT_TAKEN_OVER)


def _end(sentence: str, status: int) -> None:
    sys.stderr.write(f"penstock: {sentence}\n")
    sys.stderr.flush()
    os._exit(status)

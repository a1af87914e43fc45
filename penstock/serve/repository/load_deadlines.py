"""Deadlines of loads in an engine: for each step, so that a large model that makes progress is not refused."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar, final

from penstock.core.errors import LoadGivenUp
from penstock.runtime.loading_steps import AWAITING_EXPORT, EXPORTING
from penstock.runtime.onnx.exporter_process import EXPORT_TIMEOUT_S

T = TypeVar("T")


@final
class LoadDeadlines:
    """Ends loads of which a step takes too long.

    Args:
        timeout_s: Time for one step. An export, which ends itself, may take longer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # By key of the load: when its present step must have ended, and what it is.
        self._steps: dict[int, tuple[float, str]] = {}

    def begin_step(self, key: int, activity: str) -> None:
        """Begin the time of a step.

        Args:
            key: Key of the load.
            activity: The step.
        """
        if key in self._steps:
            self._steps[key] = self._step(activity)

    async def wait(self, key: int, load: Awaitable[T]) -> T:
        """Wait for a load.

        Args:
            key: Its key.
            load: Its result; cancelled if a step takes too long.

        Raises:
            LoadGivenUp: A step took too long.
        """
        loop = asyncio.get_running_loop()
        self._steps[key] = self._step("beginning")
        task = asyncio.ensure_future(load)
        try:
            while not task.done():
                left_s = self._steps[key][0] - loop.time()
                if left_s <= 0:
                    activity = self._steps[key][1]
                    raise LoadGivenUp(
                        f"it was given up after {self._timeout_s:g} s in one step ({activity}); mend the application, "
                        f"or raise --load-timeout-s."
                    )
                try:
                    await asyncio.wait((task,), timeout=left_s)
                except asyncio.CancelledError:
                    # A table that has come already must reach the caller, who frees it.
                    if not task.done():
                        raise
            return task.result()
        finally:
            del self._steps[key]
            task.cancel()

    def _step(self, activity: str) -> tuple[float, str]:
        exports = activity.startswith((EXPORTING, AWAITING_EXPORT))
        timeout_s = self._timeout_s + (EXPORT_TIMEOUT_S if exports else 0.0)
        return asyncio.get_running_loop().time() + timeout_s, activity

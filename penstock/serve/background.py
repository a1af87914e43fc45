"""Tasks that nothing awaits, and threads that may never end."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, final

T = TypeVar("T")


@final
class BackgroundTasks:
    """Starts tasks and keeps references to them: the event loop itself holds only weak ones."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task on the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def in_daemon_thread(work: Callable[[], object]) -> asyncio.Future[None]:
    """Run a function in a thread that delays no end of the process; returns a future that is done when it returns.

    Args:
        work: The function; it raises nothing.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def run() -> None:
        work()
        # The loop may be closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(end)

    threading.Thread(target=run, daemon=True).start()
    return ended

"""Tasks that nothing awaits."""

import asyncio
from collections.abc import Coroutine
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

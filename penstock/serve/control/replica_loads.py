"""Loads of one model in several engines at once, which end with the first engine that cannot load it."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from penstock.core.errors import EngineLost

T = TypeVar("T")


async def wait_for_replicas(loads: Iterable[Awaitable[T]]) -> list[T | BaseException]:
    """Wait until every engine has loaded a model or ended, or one of them cannot load it.

    The other engines are not waited for then, since no engine serves the model: one may export it for a minute.

    Args:
        loads: The loads, one for each engine. Those that are left are cancelled.

    Returns:
        The result or the error of each load, in their order; CancelledError for those that are left.
    """
    tasks = [asyncio.ensure_future(load) for load in loads]
    left = set(tasks)
    try:
        while left and not any(_cannot_load(task) for task in tasks):
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in left:
            task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


def _cannot_load(task: "asyncio.Future[T]") -> bool:
    """Tell whether a load failed for another reason than the end of its engine."""
    error = task.exception() if task.done() and not task.cancelled() else None
    return error is not None and not isinstance(error, EngineLost)

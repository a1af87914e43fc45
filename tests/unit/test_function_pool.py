"""Threads of a chain: the usual time of its functions, functions that exit, calls that nobody waits for."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ComputeFailed
from penstock.serve.frontend.decode_pool import DecodeJob, DecodePool
from penstock.serve.frontend.function_pool import FunctionJob, FunctionPool

MS = 1_000_000


class Scene:
    """A pool whose clock a function of the test moves on."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.found: list[Any] = []
        self.pool = FunctionPool("both", lambda: self.now_ns)

    def call(self, function: Callable[[], Any], *, cancel: bool = False, limit_ms: int = 1000) -> None:
        cancelled = threading.Event()

        def work() -> Any:
            if cancel:
                cancelled.wait(20)
            return function()

        async def settle() -> None:
            job = FunctionJob("look", work, lambda found, own_ns: self.found.append(found), limit_ms * MS)
            self.pool.submit(job)
            if cancel:
                while not job.begun:
                    await asyncio.sleep(0)
                job.cancel()
                cancelled.set()
            async with asyncio.timeout(5):
                while self.pool.waiting:
                    await asyncio.sleep(0.001)

        asyncio.run(settle())

    def take(self, ms: int) -> Callable[[], None]:
        def function() -> None:
            self.now_ns += ms * MS

        return function


def test_the_first_call_of_a_function_does_not_count() -> None:
    scene = Scene()
    scene.call(scene.take(900))
    assert scene.pool.usual_ns("look") == 0
    scene.call(scene.take(10))
    assert scene.pool.usual_ns("look") == 10 * MS
    scene.call(scene.take(20))
    assert scene.pool.usual_ns("look") == 11 * MS


def test_an_abandoned_call_counts_up_to_its_limit_and_answers_nobody() -> None:
    scene = Scene()
    scene.call(scene.take(10))
    scene.call(scene.take(10))
    scene.call(scene.take(20_000), cancel=True, limit_ms=50)
    assert scene.pool.usual_ns("look") == 14 * MS
    assert scene.found == [None, None]


def test_a_function_that_exits_fails_alone_and_leaves_its_place(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.call(lambda: sys.exit(3))
    assert isinstance(scene.found[0], ComputeFailed)
    assert scene.pool.waiting == 0
    assert "that request alone fails" in caplog.text


def test_a_decode_that_exits_fails_alone_and_leaves_its_place() -> None:
    found: list[Any] = []

    async def settle() -> None:
        pool = DecodePool("pictures", lambda body, kind: sys.exit(3), np.asarray, lambda: 0)
        pool.submit(DecodeJob(b"", "image/png", 0, MS, lambda chunk, own_ns: found.append(chunk)))
        async with asyncio.timeout(5):
            while pool.waiting:
                await asyncio.sleep(0.001)

    asyncio.run(settle())
    assert isinstance(found[0], ComputeFailed)

"""Bodies decoded and prepared beside the loop: results, refusals, clients that go."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ComputeFailed, InvalidInput, Overloaded, RequestError, TooLate
from penstock.core.spec import Array
from penstock.serve.frontend.decode_pool import (
    MAX_WAITING,
    THREADS,
    DecodeJob,
    DecodePool,
    is_no_large_picture,
    is_small_picture,
)

MS = 1_000_000
BUDGET_NS = 50 * MS


class Scene:
    """A `DecodePool` whose work waits until it is let go, and whose clock is the test's."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[bytes] = []
        self.decoded: list[bytes] = []
        self.found: list[tuple[Array | RequestError, int]] = []
        self.pool = DecodePool("pictures", self.decode, self.prepare, lambda: self.now_ns)

    def decode(self, body: bytes, content_type: str) -> Array:
        self.begun.append(body)
        self.gate.wait(10)
        self.decoded.append(body)
        if body == b"crash":
            raise RuntimeError("decode crashed")
        if body == b"wrong":
            raise InvalidInput("wrong")
        return np.frombuffer(body, np.uint8)

    def prepare(self, raw: Array) -> Array:
        self.now_ns += 30 * MS
        return raw.astype(np.float32)

    def job(self, body: bytes = b"a", budget_ns: int = BUDGET_NS) -> DecodeJob:
        return DecodeJob(
            body, "image/png", self.now_ns, budget_ns, lambda chunk, own_ns: self.found.append((chunk, own_ns))
        )

    async def settle(self) -> None:
        while self.pool.waiting:
            await asyncio.sleep(0.001)


def played(scenario: Callable[[Scene], Any]) -> Scene:
    async def play() -> Scene:
        scene = Scene()
        try:
            await scenario(scene)
            await scene.settle()
        finally:
            scene.gate.set()
            scene.pool.close()
        return scene

    return asyncio.run(asyncio.wait_for(play(), 20))


def test_a_chunk_is_made_in_another_thread_and_given_in_the_loop() -> None:
    async def one(scene: Scene) -> None:
        scene.pool.submit(scene.job(b"\x07"))
        assert scene.found == []

    ((chunk, own_ns),) = played(one).found
    assert isinstance(chunk, np.ndarray)
    assert (chunk.tolist(), own_ns) == ([7.0], 30 * MS)


@pytest.mark.parametrize(("body", "error"), [(b"wrong", InvalidInput), (b"crash", ComputeFailed)])
def test_what_decode_raises_is_given_and_its_own_faults_are_logged(
    body: bytes, error: type[RequestError], caplog: pytest.LogCaptureFixture
) -> None:
    async def one(scene: Scene) -> None:
        scene.pool.submit(scene.job(body))

    with caplog.at_level(logging.ERROR):
        ((found, _),) = played(one).found
    assert type(found) is error
    assert ("decode crashed" in caplog.text) == (error is ComputeFailed)


def test_who_would_wait_for_longer_than_the_budget_is_refused_at_once() -> None:
    async def many(scene: Scene) -> None:
        # What was not measured yet is taken for quick.
        scene.pool.submit(scene.job())
        await scene.settle()
        scene.gate.clear()
        for _ in range(THREADS):
            scene.pool.submit(scene.job())
        # Each takes 30 ms: one waits for half of that, as there are two threads, four for 60 ms.
        for _ in range(3):
            scene.pool.submit(scene.job())
        with pytest.raises(
            Overloaded, match="5 requests are queued for decoding, about 60 ms; come back later"
        ) as refused:
            scene.pool.submit(scene.job())
        assert refused.value.retry_after_s == 0.1
        scene.pool.submit(scene.job(budget_ns=100 * MS))
        scene.gate.set()

    scene = played(many)
    assert len(scene.found) == 7


def test_no_more_than_so_many_wait_however_patient_they_are() -> None:
    async def many(scene: Scene) -> None:
        scene.gate.clear()
        for _ in range(MAX_WAITING):
            scene.pool.submit(scene.job(budget_ns=10**15))
        with pytest.raises(Overloaded, match=f"{MAX_WAITING} requests are queued"):
            scene.pool.submit(scene.job(budget_ns=10**15))
        scene.gate.set()

    assert len(played(many).found) == MAX_WAITING


def test_who_has_waited_for_too_long_is_not_prepared_any_more() -> None:
    async def late(scene: Scene) -> None:
        scene.now_ns = 10 * MS
        job = scene.job(b"late", budget_ns=5 * MS)
        scene.now_ns = 16 * MS
        scene.pool.submit(job)

    scene = played(late)
    assert isinstance(scene.found[0][0], TooLate)
    assert scene.decoded == []


def test_for_a_client_that_is_gone_nothing_is_begun_and_nothing_told() -> None:
    async def gone(scene: Scene) -> None:
        scene.gate.clear()
        jobs = [scene.job(bytes([index])) for index in range(THREADS + 1)]
        for job in jobs:
            scene.pool.submit(job)
        while len(scene.begun) < THREADS:
            await asyncio.sleep(0.001)
        for job in jobs:
            job.cancel()
        scene.gate.set()

    scene = played(gone)
    assert scene.found == []
    assert sorted(scene.decoded) == [bytes([index]) for index in range(THREADS)]


def test_what_was_begun_is_done_though_nothing_more_is() -> None:
    async def closing(scene: Scene) -> None:
        scene.gate.clear()
        for _ in range(THREADS + 1):
            scene.pool.submit(scene.job())
        scene.pool.close()
        scene.gate.set()

    assert len(played(closing).found) == THREADS + 1


def png(side: int, more: bytes = b"") -> bytes:
    return b"\x89PNG\r\n\x1a\n" + bytes(4) + b"IHDR" + side.to_bytes(4) * 2 + more


def test_a_picture_with_thousands_of_chunks_is_no_small_one() -> None:
    assert is_small_picture(png(256))
    # 512 pixels in a file of 45 KB: chunks of texts, each an object of the decoder.
    assert not is_small_picture(png(16, bytes(45_000)))
    assert is_small_picture(png(256, bytes(200_000)))


def test_an_own_decode_is_called_in_the_loop_for_all_but_large_pictures() -> None:
    assert is_no_large_picture(b"some text")
    assert is_no_large_picture(png(256))
    assert not is_no_large_picture(png(2000))
    assert not is_no_large_picture(png(16, bytes(45_000)))

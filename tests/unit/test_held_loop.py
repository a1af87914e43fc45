"""A `decode` that holds the event loop is logged, and no engine is blamed for the time."""

import asyncio
import logging
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import InvalidInput
from penstock.serve.frontend.held_loop import LOGGED_EACH_NS, SLOW_NS, SlowDecodes, held_ns
from penstock.serve.http.plain_body import decoded
from tests.unit.test_late_bodies import KIND, MS, Server

SAID = "the decode of 'slow' held the front-end for 3.0 s: other requests waited (see how-to/prepare.md)"


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_decode_that_holds_the_loop_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    body_ns = 3_000 * MS

    def decode(body: bytes, content_type: str) -> Any:
        server.now_ns += body_ns
        if body == b"wrong":
            raise InvalidInput("wrong")
        return np.ones(1, np.float32)

    object.__setattr__(server.served.application, "decode", decode)

    async def scene() -> None:
        nonlocal body_ns
        with pytest.raises(InvalidInput):
            decoded(server.served, b"wrong", KIND)
        decoded(server.served, b"1", KIND)
        assert _messages(caplog) == [SAID]
        server.now_ns += LOGGED_EACH_NS
        decoded(server.served, b"1", KIND)
        assert _messages(caplog) == [SAID, SAID]
        server.now_ns += LOGGED_EACH_NS
        body_ns = SLOW_NS - 1
        decoded(server.served, b"1", KIND)
        await asyncio.to_thread(SlowDecodes("in a thread").add, 0, SLOW_NS)
        assert len(_messages(caplog)) == 2

    asyncio.run(scene())


def test_held_time_is_what_a_wake_is_late() -> None:
    assert held_ns(10_000 * MS, 10_500 * MS, 500 * MS) == 0
    assert held_ns(10_000 * MS, 13_500 * MS, 500 * MS) == 3_000 * MS
    assert held_ns(10_000 * MS, 10_400 * MS, 500 * MS) == 0

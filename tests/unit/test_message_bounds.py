"""Messages of gRPC that have not come whole: deadlines, how many are read at once, and whose turn is next."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, final

import pytest

from penstock.core.errors import InvalidInput, Overloaded, TooSlow
from penstock.serve.grpc.message_bounds import MIN_READING, MessageBounds
from penstock.serve.settings import LimitSettings
from tests.support.clock import ClockLoop

LARGE = 1 << 20


@final
class Call:
    """The side of a call that gives its message."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.begun = False

    def peer(self) -> str:
        return self._peer

    async def read(self) -> Any:
        self.begun = True
        return await self.message


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=ClockLoop) as runner:
        runner.run(asyncio.wait_for(scene(), 20))


def bounds(body_timeout_s: float = 60.0) -> MessageBounds:
    return MessageBounds(LimitSettings(body_timeout_s=body_timeout_s, max_unfinished_mib=1), LARGE)


def reading(made: MessageBounds, peer: str = "it") -> tuple[Call, "asyncio.Task[bytes]"]:
    call: Any = Call(peer)
    return call, asyncio.create_task(made.read(call))


def test_a_message_has_a_deadline_and_must_come() -> None:
    async def scene() -> None:
        made = bounds(0.3)
        _, slow = reading(made)
        whole, good = reading(made)
        none, empty = reading(made)
        await asyncio.sleep(0)
        whole.message.set_result(b"it")
        none.message.set_result(object())
        assert await good == b"it"
        with pytest.raises(InvalidInput, match="no message"):
            await empty
        with pytest.raises(TooSlow, match=r"not whole after 0.3 s"):
            await slow
        assert slow.cancelling() == 0

    run(scene)


def test_the_newest_of_those_that_wait_is_read_next_and_old_ones_make_room() -> None:
    async def scene() -> None:
        made = bounds()
        begun = [reading(made) for _ in range(MIN_READING)]
        await asyncio.sleep(0)
        waits = [reading(made) for _ in range(3)]
        await asyncio.sleep(0)
        assert [call.begun for call, _ in waits] == [False] * 3
        begun[-1][0].message.set_result(b"whole")
        assert await begun[-1][1] == b"whole"
        await asyncio.sleep(0)
        assert [call.begun for call, _ in waits] == [False, False, True]
        # Who waits and is gone takes no turn.
        waits[1][1].cancel()
        with pytest.raises(Overloaded, match="come back later"):
            await begun[0][1]
        await asyncio.sleep(0.01)
        assert waits[0][0].begun
        assert not begun[1][1].done()

    run(scene)


def test_no_more_wait_than_the_windows_of_their_streams_fill_the_budget() -> None:
    async def scene() -> None:
        made = bounds(0.5)
        begun = [reading(made) for _ in range(MIN_READING + 16)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await reading(made)[1]
        # At the end nobody is left, and a turn is free again.
        results = await asyncio.gather(*(task for _, task in begun), return_exceptions=True)
        assert {type(result) for result in results} <= {TooSlow, Overloaded}
        call, task = reading(made)
        await asyncio.sleep(0)
        call.message.set_result(b"it")
        assert await task == b"it"

    run(scene)


def test_a_call_that_is_cancelled_by_its_client_is_not_answered_and_gives_its_turn_back() -> None:
    async def scene() -> None:
        made = bounds()
        begun = [reading(made) for _ in range(MIN_READING)]
        await asyncio.sleep(0)
        call, waits = reading(made)
        await asyncio.sleep(0)
        begun[3][1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun[3][1]
        await asyncio.sleep(0)
        assert call.begun
        waits.cancel()

    run(scene)


def test_connections_take_turns_whatever_each_of_them_keeps_waiting() -> None:
    async def scene() -> None:
        made = bounds()
        begun = [reading(made) for _ in range(MIN_READING)]
        await asyncio.sleep(0)
        # As many as may wait.
        greedy = [reading(made, "greedy") for _ in range(8)]
        await asyncio.sleep(0)
        modest, answer = reading(made, "modest")
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="come back later"):
            await greedy[0][1]
        with pytest.raises(Overloaded, match="come back later"):
            await reading(made, "greedy")[1]
        for call, task in begun[:2]:
            call.message.set_result(b"whole")
            await task
        await asyncio.sleep(0)
        assert [call.begun for call, _ in greedy[-2:]] == [False, True]
        assert modest.begun
        modest.message.set_result(b"it")
        assert await answer == b"it"

    run(scene)

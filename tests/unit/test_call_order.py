"""The order in which the calls of a connection submit their requests."""

import asyncio

import pytest

from penstock.core.errors import Overloaded
from penstock.serve.grpc.call_order import PATIENCE_S, CallOrder


def test_requests_are_submitted_in_the_order_in_which_their_calls_began() -> None:
    asyncio.run(_in_order())


async def _in_order() -> None:
    order, submitted = CallOrder(), list[int]()
    places = [order.enter("a") for _ in range(4)]

    async def call(number: int) -> None:
        await places[number].wait()
        submitted.append(number)
        places[number].end()

    calls = [asyncio.create_task(call(number)) for number in (3, 1, 2)]
    await asyncio.sleep(0)
    assert submitted == []
    # Another connection does not wait.
    await order.enter("b").wait()
    await call(0)
    await asyncio.gather(*calls)
    assert submitted == [0, 1, 2, 3]


def test_a_call_that_fails_holds_up_no_other() -> None:
    asyncio.run(_after_a_failure())


async def _after_a_failure() -> None:
    order = CallOrder()
    failed, later, last = (order.enter("a") for _ in range(3))
    waiting = asyncio.create_task(last.wait())
    later.end()
    await asyncio.sleep(0)
    assert not waiting.done()
    failed.end()
    failed.end()
    await waiting
    last.end()
    await order.enter("a").wait()


def test_calls_whose_message_does_not_come_lose_their_places() -> None:
    asyncio.run(_late())


async def _late() -> None:
    order = CallOrder()
    late = [order.enter("a") for _ in range(3)]
    later = [order.enter("a") for _ in range(2)]
    began_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(10):
        for each in later:
            await each.wait()
            each.end()
    assert asyncio.get_running_loop().time() - began_s >= PATIENCE_S / 2
    with pytest.raises(Overloaded, match="later calls of the connection went first"):
        await late[1].wait()
    for each in late:
        each.end()
    # Nothing is left of the connection, nor of its timer.
    await asyncio.sleep(PATIENCE_S)
    await order.enter("a").wait()


def test_a_call_that_is_cancelled_while_it_waits_holds_up_no_other() -> None:
    asyncio.run(_cancelled())


async def _cancelled() -> None:
    order = CallOrder()
    first, cancelled, last = (order.enter("a") for _ in range(3))

    async def call() -> None:
        try:
            await cancelled.wait()
        finally:
            cancelled.end()

    waiting = asyncio.create_task(call())
    await asyncio.sleep(0)
    waiting.cancel()
    first.end()
    async with asyncio.timeout(10):
        await last.wait()

"""The order in which the calls of a connection submit their requests."""

import asyncio

from penstock.serve.grpc.call_order import CallOrder


def test_requests_are_submitted_in_the_order_in_which_their_calls_began() -> None:
    asyncio.run(_in_order())


async def _in_order() -> None:
    order, submitted = CallOrder(), list[int]()
    turns = [order.enter("a") for _ in range(4)]

    async def call(number: int) -> None:
        await turns[number].wait()
        submitted.append(number)
        turns[number].end()

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

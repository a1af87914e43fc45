"""What the supervisor and its processes say to each other, over a real pair of sockets."""

import asyncio
import os
from collections.abc import Callable

import pytest

from penstock.serve.messages import (
    Alive,
    Channel,
    Done,
    Failed,
    Loaded,
    Lose,
    Message,
    Order,
    Retired,
    decoded,
    encoded,
    pair,
)

LOADED = Loaded(
    order=Order(key=3, model=1, name="digits", version="1", bundle="run/bundle"),
    engine=1,
    device="cuda:1",
    slots=8,
    frontends=2,
    bundle_hash="ab",
    application="digits",
)


@pytest.mark.parametrize(
    "message", [LOADED, Done(key=3), Retired(key=3), Failed(key=3, error="no", status=404), Lose(engine=1), Alive()]
)
def test_a_message_comes_as_it_went(message: Message) -> None:
    assert decoded(encoded(message)) == message


def test_what_a_stopped_process_has_no_room_for_is_sent_when_it_reads_again() -> None:
    async def scene() -> None:
        ours, theirs = pair()
        sender = Channel(ours, lambda message, given: None, lambda: None)
        descriptor = os.memfd_create("test")
        count = 2000
        for key in range(count):
            sender.send(Done(key=key))
            sender.send(Alive())
        sender.send(LOADED, (descriptor,))
        os.close(descriptor)
        heard: list[Message] = []
        given: list[int] = []

        def hear(message: Message, descriptors: list[int]) -> None:
            heard.append(message)
            given.extend(descriptors)

        Channel(theirs, hear, lambda: None)
        await until(lambda: LOADED in heard)
        assert [message for message in heard if message != Alive()] == [
            *(Done(key=key) for key in range(count)),
            LOADED,
        ]
        assert os.readlink(f"/proc/self/fd/{given[0]}").startswith("/memfd:test")
        assert len(heard) < 2 * count, "signs of life wait for nobody"
        os.close(given[0])
        sender.close()
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_the_last_words_of_a_process_are_heard_before_its_end_is() -> None:
    async def scene() -> None:
        ours, theirs = pair()
        heard: list[Message] = []
        channel = Channel(ours, lambda message, given: heard.append(message), lambda: None)
        theirs.send(encoded(Done(key=1)))
        theirs.send(encoded(Failed(key=2, error="why")))
        theirs.close()
        channel.hear_out()
        assert heard == [Done(key=1), Failed(key=2, error="why")]

    asyncio.run(scene())


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.001)

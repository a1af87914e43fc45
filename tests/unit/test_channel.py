"""Control messages over a real socket pair."""

import asyncio
import os
from collections.abc import Callable

import pytest

from penstock.serve.channel import MAX_MESSAGE_BYTES, Channel, channel_pair
from penstock.serve.messages import (
    MAX_TEXT,
    ChangeModel,
    CommandDone,
    CommandFailed,
    DropEngine,
    Heartbeat,
    LoadModel,
    Message,
    ModelLoaded,
    ModelState,
    StartFailed,
    TableRetired,
    decode_message,
    encode_message,
)

LOADED = ModelLoaded(
    command=LoadModel(key=3, model=1, name="digits", version="1", bundle="run/bundle"),
    engine=1,
    device="cuda:1",
    slots=8,
    frontends=2,
    bundle_hash="ab",
    application="digits",
)


@pytest.mark.parametrize(
    "message",
    [
        LOADED,
        CommandDone(key=3),
        TableRetired(key=3),
        CommandFailed(key=3, error="no", status=404),
        DropEngine(engine=1),
        Heartbeat(),
    ],
)
def test_a_message_is_decoded_as_it_was_encoded(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


def test_the_longest_error_of_an_application_fits_into_a_message() -> None:
    error = "\U0001f525" * 1_000_000
    for message in (
        CommandFailed(key=3, error=error),
        StartFailed(error=error),
        ModelState(name="n" * 255, version="9" * 255, state="UNAVAILABLE", reason=error),
        ChangeModel(token=1, name=error, unload=False),
    ):
        assert len(encode_message(message)) < MAX_MESSAGE_BYTES
    received = decode_message(encode_message(CommandFailed(key=3, error=error, status=400)))
    assert received == CommandFailed(key=3, error=error[:MAX_TEXT], status=400)


def test_messages_to_a_stopped_process_are_queued_and_sent_when_it_reads_again() -> None:
    async def scene() -> None:
        ours, theirs = channel_pair()
        sender = Channel(ours, lambda message, given: None, lambda: None)
        descriptor = os.memfd_create("test")
        count = 2000
        for key in range(count):
            sender.send(CommandDone(key=key))
            sender.send(Heartbeat())
        sender.send(LOADED, (descriptor,))
        os.close(descriptor)
        heard: list[Message] = []
        given: list[int] = []

        def hear(message: Message, descriptors: list[int]) -> None:
            heard.append(message)
            given.extend(descriptors)

        Channel(theirs, hear, lambda: None)
        await until(lambda: LOADED in heard)
        assert [message for message in heard if message != Heartbeat()] == [
            *(CommandDone(key=key) for key in range(count)),
            LOADED,
        ]
        assert os.readlink(f"/proc/self/fd/{given[0]}").startswith("/memfd:test")
        assert len(heard) < 2 * count, "a heartbeat is never queued"
        os.close(given[0])
        sender.close()
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_messages_sent_before_the_end_of_a_process_are_received() -> None:
    async def scene() -> None:
        ours, theirs = channel_pair()
        heard: list[Message] = []
        channel = Channel(ours, lambda message, given: heard.append(message), lambda: None)
        theirs.send(encode_message(CommandDone(key=1)))
        theirs.send(encode_message(CommandFailed(key=2, error="why")))
        theirs.close()
        channel.drain()
        assert heard == [CommandDone(key=1), CommandFailed(key=2, error="why")]

    asyncio.run(scene())


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.001)

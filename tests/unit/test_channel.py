"""Control messages over a real socket pair."""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest

from penstock.serve import channel as channel_module
from penstock.serve.channel import PACKET_BYTES, Channel, channel_pair, packets_of
from penstock.serve.messages import (
    MAX_TEXT,
    ChangeModel,
    CommandDone,
    CommandFailed,
    DropEngine,
    EngineUse,
    HandedOver,
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


@pytest.mark.parametrize("kind", [CommandFailed, StartFailed, ModelState])
def test_a_reason_of_any_length_is_cut(kind: type[Message]) -> None:
    error = "\U0001f525" * 1_000_000
    messages = (
        CommandFailed(key=3, error=error),
        StartFailed(error=error),
        ModelState(name="n" * 255, version="9" * 255, state="UNAVAILABLE", reason=error),
    )
    (message,) = (each for each in messages if isinstance(each, kind))
    assert error[:MAX_TEXT] in str(decode_message(encode_message(message)))
    assert error[: MAX_TEXT + 1] not in str(decode_message(encode_message(message)))


def test_a_name_is_not_cut_into_another_one() -> None:
    message = ChangeModel(token=1, name="n" * 300_000, unload=False)
    assert decode_message(encode_message(message)) == message


def use_of(models: int) -> EngineUse:
    return EngineUse(
        key=1,
        tables=tuple(range(models)),
        used_ns=(1 << 60,) * models,
        busy=(True,) * models,
        used_bytes=1,
        total_bytes=2,
    )


def test_messages_of_any_size_come_whole_and_in_order_with_their_descriptors() -> None:
    sent: list[Message] = [
        CommandDone(key=1),
        use_of(models=20_000),
        ChangeModel(token=1, name="n" * 300_000, unload=False),
        LOADED,
        use_of(models=1),
    ]
    assert len(packets_of(sent[1])) > 20

    async def scene(stopped: bool) -> None:
        ours, theirs = channel_pair()
        sender = Channel(ours, lambda message, given: None, lambda: None)
        heard: list[Message] = []
        given: list[int] = []

        def hear(message: Message, descriptors: list[int]) -> None:
            heard.append(message)
            given.extend(descriptors)

        receiver = None if stopped else Channel(theirs, hear, lambda: None)
        descriptor = os.memfd_create("test")
        for message in sent:
            sender.send(message, (descriptor,) if message is LOADED else ())
            if not stopped:
                await asyncio.sleep(0)
        os.close(descriptor)
        receiver = receiver or Channel(theirs, hear, lambda: None)
        await until(lambda: len(heard) == len(sent))
        assert (heard, len(given)) == (sent, 1)
        os.close(given[0])
        sender.close()
        receiver.close()

    for stopped in (False, True):
        asyncio.run(asyncio.wait_for(scene(stopped), 10))


def open_files() -> set[int]:
    """The numbers of the files that this process has open."""
    found: set[int] = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.fstat(int(entry)).st_ino)
    return found


def test_a_process_that_ends_within_a_message_leaves_nothing_open() -> None:
    async def scene() -> None:
        ours, theirs = channel_pair()
        heard: list[Message] = []
        ends: list[bool] = []
        channel = Channel(ours, lambda message, given: heard.append(message), lambda: ends.append(True))
        descriptor = os.memfd_create("test")
        # Files of the same number are the same file, and other threads open and close others.
        own = {os.stat(each).st_ino for each in (ours.fileno(), theirs.fileno(), descriptor)}
        socket.send_fds(theirs, [packets_of(use_of(models=20_000))[0]], [descriptor])
        os.close(descriptor)
        theirs.close()
        channel.drain()
        assert (heard, ends) == ([], [True])
        # The two ends of the pair are closed too.
        assert not own & open_files()

    asyncio.run(scene())


def test_a_message_without_an_end_ends_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 4 * PACKET_BYTES)

    async def scene() -> None:
        ours, theirs = channel_pair()
        ends: list[bool] = []
        Channel(ours, lambda message, given: None, lambda: ends.append(True))
        theirs.setblocking(False)
        for _ in range(4):
            theirs.send(b"\0" + b"x" * PACKET_BYTES)
            await asyncio.sleep(0.01)
        assert ends == [True]
        theirs.close()

    asyncio.run(scene())


def test_a_channel_without_descriptors_left_ends_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def scene() -> None:
        ours, theirs = channel_pair()
        sender = Channel(ours, lambda message, given: None, lambda: None)
        sender.send(use_of(models=50_000))
        monkeypatch.setattr(os, "dup", none_left)
        sender.send(LOADED, (0,))
        sender.send(CommandDone(key=1))
        assert ours.fileno() < 0
        theirs.close()

    asyncio.run(scene())


def test_a_channel_whose_descriptors_were_cut_off_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel cuts them off where the receiver may open no more."""
    received: list[Message] = []
    ended: list[bool] = []

    def cut_off(end: socket.socket, size: int, most: int) -> tuple[bytes, list[int], int, None]:
        return end.recv(size), [], socket.MSG_CTRUNC, None

    async def scene() -> None:
        ours, theirs = channel_pair()
        Channel(ours, lambda message, given: received.append(message), lambda: ended.append(True))
        monkeypatch.setattr(socket, "recv_fds", cut_off)
        sender = Channel(theirs, lambda message, given: None, lambda: None)
        sender.send(LOADED, (0,))
        await asyncio.sleep(0.05)
        assert (received, ended, ours.fileno()) == ([], [True], -1)
        sender.close()

    asyncio.run(scene())


def test_a_connection_that_is_cut_off_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front-end that may open no more files has others to serve."""
    received: list[Message] = []
    receive = socket.recv_fds

    def cut_off(end: socket.socket, size: int, most: int) -> tuple[bytes, list[int], int, None]:
        monkeypatch.setattr(socket, "recv_fds", receive)
        return end.recv(size), [], socket.MSG_CTRUNC, None

    async def scene() -> None:
        ours, theirs = channel_pair()
        receiver = Channel(ours, lambda message, given: received.append(message), lambda: None)
        monkeypatch.setattr(socket, "recv_fds", cut_off)
        sender = Channel(theirs, lambda message, given: None, lambda: None)
        sender.send(HandedOver(target=1), (0,))
        sender.send(CommandDone(key=1))
        await until(lambda: bool(received))
        assert received == [CommandDone(key=1)]
        sender.close()
        receiver.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_a_connection_that_cannot_be_kept_until_there_is_room_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Message] = []

    def none_left(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def scene() -> None:
        ours, theirs = channel_pair()
        sender = Channel(ours, lambda message, given: None, lambda: None)
        sender.send(use_of(models=50_000))
        with monkeypatch.context() as patched:
            patched.setattr(os, "dup", none_left)
            sender.send(HandedOver(target=1), (0,))
        sender.send(CommandDone(key=1))
        receiver = Channel(theirs, lambda message, given: received.append(message), lambda: None)
        await until(lambda: len(received) == 2)
        assert received[1] == CommandDone(key=1)
        sender.close()
        receiver.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


def test_descriptors_are_not_inherited_by_programs_that_the_receiver_starts() -> None:
    async def scene() -> None:
        ours, theirs = channel_pair()
        given: list[int] = []
        receiver = Channel(ours, lambda message, descriptors: given.extend(descriptors), lambda: None)
        sender = Channel(theirs, lambda message, descriptors: None, lambda: None)
        sender.send(HandedOver(target=1), (0,))
        await until(lambda: bool(given))
        assert not os.get_inheritable(given[0])
        os.close(given[0])
        sender.close()
        receiver.close()

    asyncio.run(asyncio.wait_for(scene(), 10))


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
        for message in (CommandDone(key=1), CommandFailed(key=2, error="why")):
            for packet in packets_of(message):
                theirs.send(packet)
        theirs.close()
        channel.drain()
        assert heard == [CommandDone(key=1), CommandFailed(key=2, error="why")]

    asyncio.run(scene())


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.001)


def test_the_last_messages_of_a_process_that_had_not_read_everything_are_received() -> None:
    received: list[Message] = []
    closed: list[bool] = []

    async def scene() -> None:
        ours, theirs = channel_pair()
        channel = Channel(ours, lambda message, _: received.append(message), lambda: closed.append(True))
        channel.send(Heartbeat())
        for packet in packets_of(StartFailed(error="the port is taken")):
            theirs.send(packet)
        theirs.close()
        channel.drain()

    asyncio.run(scene())
    assert received == [StartFailed(error="the port is taken")]
    assert closed == [True]

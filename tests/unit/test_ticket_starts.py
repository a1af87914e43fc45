"""Starts that bring a ticket are longer than others: what they may hold, and for how long it counts."""

import asyncio
from functools import partial
from typing import cast

import numpy as np
import pytest
from websockets.frames import Frame, Opcode

from penstock.core.speech.resumable_resampler import MAX_PERIOD, ResumableResampler
from penstock.core.speech.sound import MAX_RATE_HZ, MIN_RATE_HZ, PcmDecoder, sound_decoder
from penstock.core.streams.segments import SegmentFinder, Segments
from penstock.serve.exchange.request_bounds import CONNECTION_BYTES, RequestBounds
from penstock.serve.streams.events import MAX_MEMORY_BYTES
from penstock.serve.streams.session import Session
from penstock.serve.streams.session_tickets import max_ticket_bytes
from penstock.serve.streams.stream_start import MAX_START_BYTES
from penstock.serve.websocket.stream_connection import StreamConnection
from tests.support.session import SOUND
from tests.support.streams import BUDGET_NS, Caller, Wire, World
from tests.support.tickets import tickets_each

LONG_START = Frame(Opcode.TEXT, b'{"type":"start","tickets":true' + b" " * 60_000 + b"}").serialize(mask=True)


def call(world: World, bounds: RequestBounds) -> Caller:
    wire, now_s = Wire(), [0.0]
    admit = partial(world.streams.admit_stream, budget_ns=BUDGET_NS)
    socket = StreamConnection(admit, lambda: now_s[0], start_bounds=bounds, client="me")
    socket.take_over(cast(asyncio.Transport, wire), b"", world.peers)
    return Caller(socket, wire, now_s)


def test_a_start_that_may_bring_a_ticket_counts_until_it_was_taken() -> None:
    bounds = RequestBounds()
    caller = call(World(tickets=tickets_each(1.0)), bounds)
    caller.feed(LONG_START[:50_000])
    assert bounds.held_bytes >= CONNECTION_BYTES + 49_000
    caller.feed(LONG_START[50_000:])
    caller.read()
    assert caller.said[0]["tickets"]
    assert bounds.held_bytes == 0
    caller.chunk(0, 1, 2)
    assert bounds.held_bytes == 0


def test_a_client_that_is_gone_holds_nothing() -> None:
    bounds = RequestBounds()
    caller = call(World(tickets=tickets_each(1.0)), bounds)
    caller.feed(LONG_START[:50_000])
    caller.socket.connection_lost(None)
    assert bounds.held_bytes == 0


def test_a_start_for_which_there_is_no_room_ends_its_stream() -> None:
    bounds = RequestBounds(max_bytes=CONNECTION_BYTES + 20_000)
    caller = call(World(tickets=tickets_each(1.0)), bounds)
    caller.feed(LONG_START[:50_000])
    assert caller.wire.ended == "abort"
    caller.socket.connection_lost(None)
    assert bounds.held_bytes == 0


def test_a_start_is_short_where_no_ticket_is_taken() -> None:
    bounds = RequestBounds()
    world = World()
    caller = call(world, bounds)
    caller.feed(LONG_START[:50_000])
    caller.read()
    assert caller.closed is not None
    assert caller.closed[0] == 1009
    assert bounds.held_bytes == 0
    chain = Session(
        world.streams.application,
        name="chain",
        stream="s",
        latency_ms=50.0,
        find_segments=SegmentFinder("chain", Segments(find=lambda event, memory, last: ([], memory))),
        tickets=tickets_each(1.0).of_stream("me"),
    )
    assert chain.max_message_bytes == MAX_START_BYTES


@pytest.mark.parametrize("target_hz", [8_000, 16_000, 48_000])
def test_a_ticket_has_room_for_what_the_resampler_keeps(target_hz: int) -> None:
    most = ResumableResampler.max_heard_bytes(MAX_RATE_HZ, target_hz)
    assert max_ticket_bytes(SOUND, target_hz, 25_600) >= 25_600 + MAX_MEMORY_BYTES + SOUND.nbytes + most
    longest = 0
    for rate_hz in (MIN_RATE_HZ, MAX_PERIOD - 1, 44_100, 96_000, MAX_RATE_HZ - target_hz // 100, MAX_RATE_HZ):
        decoder = sound_decoder("mulaw", rate_hz, target_hz, 1.0)
        assert isinstance(decoder, PcmDecoder)
        if rate_hz == target_hz or not decoder.make_resumable():
            continue
        for _ in range(40):
            decoder.feed(np.zeros(rate_hz // 11, np.uint8).tobytes())
            longest = max(longest, len(decoder.heard()[0]))
    assert 0 < longest <= most

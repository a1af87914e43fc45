"""A gRPC call of the load generator without a socket: frames in, messages out, never more than is granted."""

import numpy as np
import pytest

from penstock.bench.streams.grpc_call import (
    ACK,
    CALL,
    CONNECTION,
    DATA,
    END_STREAM,
    FIRST_WINDOW,
    FRAME_HEAD,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MESSAGE_HEAD,
    PADDED,
    PING,
    RST_STREAM,
    SETTING,
    SETTINGS,
    WINDOW_UPDATE,
    GrpcCall,
)
from penstock.core.errors import BenchError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
Frame = tuple[int, int, int, bytes]


def frame(kind: int, payload: bytes = b"", flags: int = 0, of: int = CALL) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + of.to_bytes(4, "big") + payload


def settings(**values: int) -> bytes:
    names = {"window": INITIAL_WINDOW_SIZE, "frame": MAX_FRAME_SIZE}
    return frame(SETTINGS, b"".join(SETTING.pack(names[name], value) for name, value in values.items()), of=CONNECTION)


RESET = frame(RST_STREAM, (8).to_bytes(4, "big"))


def grant(count: int, of: int) -> bytes:
    return frame(WINDOW_UPDATE, count.to_bytes(4, "big"), of=of)


def framed(body: bytes) -> bytes:
    return MESSAGE_HEAD.pack(0, len(body)) + body


def frames_of(data: bytes) -> list[Frame]:
    found: list[Frame] = []
    while data:
        size = int.from_bytes(data[:3], "big")
        found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[FRAME_HEAD : FRAME_HEAD + size]))
        data = data[FRAME_HEAD + size :]
    return found


def opened() -> GrpcCall:
    call = GrpcCall("here:1", "/package.Service/Method")
    assert call.feed(settings()) == ([], frame(SETTINGS, flags=ACK, of=CONNECTION))
    return call


def test_it_begins_as_http_two_does() -> None:
    call = GrpcCall("here:1", "/package.Service/Method")
    assert call.first.startswith(PREFACE)
    first, window, (kind, flags, of, headers) = frames_of(call.first.removeprefix(PREFACE))
    assert (first[0], window[0], window[2], kind, of) == (SETTINGS, WINDOW_UPDATE, CONNECTION, HEADERS, CALL)
    assert flags == 4  # the headers are whole, and the call goes on
    for literal in (b"\x04\x17/package.Service/Method", b"\x01\x06here:1", b"\x10application/grpc", b"te\x08trailers"):
        assert literal in headers


def test_messages_are_whole_however_they_are_cut() -> None:
    bodies = [b"", b"a", bytes(300), b"b" * 70_000]
    said = framed(bodies[0]) + framed(bodies[1]) + framed(bodies[2]) + framed(bodies[3])
    cuts = sorted(np.random.default_rng(1).integers(0, len(said), 5).tolist())
    data = settings() + frame(HEADERS, b"\x88", 4)
    for begin, end in zip([0, *cuts], [*cuts, len(said)], strict=True):
        padded = b"\3" + said[begin:end] + b"\0\0\0"
        data += frame(DATA, padded, PADDED) if begin % 2 else frame(DATA, said[begin:end])
    for step in (1, 7, len(data)):
        call, messages = GrpcCall("here:1", "/p"), list[bytes]()
        for at in range(0, len(data), step):
            messages += call.feed(data[at : at + step])[0]
        assert messages == bodies
        assert call.end_reason is None


def test_what_goes_out_is_cut_into_frames_that_the_server_takes() -> None:
    call = opened()
    assert frames_of(call.message(b"abc")) == [(DATA, 0, CALL, framed(b"abc"))]
    call.feed(settings(frame=20_000))
    whole = framed(bytes(50_000))
    sent = frames_of(call.message(bytes(50_000)))
    assert [len(payload) for *_, payload in sent] == [20_000, 20_000, len(whole) - 40_000]
    assert b"".join(payload for *_, payload in sent) == whole


def test_no_more_goes_out_than_the_server_grants() -> None:
    call = opened()
    whole = framed(bytes(range(256)) * 400)
    sent = b"".join(payload for *_, payload in frames_of(call.message(whole[MESSAGE_HEAD.size :])))
    assert len(sent) == FIRST_WINDOW
    assert call.message(b"later") == b""
    # Of the connection alone, of both, and of the call by another first window.
    assert call.feed(grant(1_000, CONNECTION)) == ([], b"")
    _, out = call.feed(grant(10, CALL))
    sent += frames_of(out)[0][3]
    assert len(sent) == FIRST_WINDOW + 10
    _, out = call.feed(settings(window=FIRST_WINDOW + 100))
    answer, data = frames_of(out)
    assert answer == (SETTINGS, ACK, CONNECTION, b"")
    sent += data[3]
    assert len(sent) == FIRST_WINDOW + 110
    call.feed(grant(1 << 20, CONNECTION))
    _, out = call.feed(grant(1 << 20, CALL))
    sent += b"".join(payload for *_, payload in frames_of(out))
    assert sent == whole + framed(b"later")
    # A window may become less than nothing.
    assert call.feed(settings(window=0))[1] == frame(SETTINGS, flags=ACK, of=CONNECTION)


def test_pings_are_answered_and_acknowledgements_are_not() -> None:
    call = opened()
    assert call.feed(frame(PING, b"12345678", of=CONNECTION)) == ([], frame(PING, b"12345678", ACK, CONNECTION))
    assert call.feed(frame(PING, b"12345678", ACK, CONNECTION)) == ([], b"")
    assert call.feed(frame(SETTINGS, b"", ACK, CONNECTION)) == ([], b"")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (frame(HEADERS, b"\0\x0cgrpc-message\x0fno%20such%20one", END_STREAM | 4) + RESET, "no such one"),
        (frame(HEADERS, b"\x88\0\x0bgrpc-status\x010", END_STREAM | 4), "the server ended the call"),
        (frame(DATA, b"", END_STREAM), "the server ended the call"),
        (RESET, "the server reset the call with code 8"),
        (frame(GOAWAY, bytes(8) + b"max_age", of=CONNECTION), "the server goes away max_age"),
    ],
)
def test_why_a_call_is_over(data: bytes, why: str) -> None:
    call = opened()
    call.feed(frame(DATA, framed(b"the last")) + data)
    assert call.end_reason == why


def test_a_server_of_something_else_is_no_server() -> None:
    with pytest.raises(BenchError, match="name its gRPC port"):
        GrpcCall("here:1", "/p").feed(b"HTTP/1.1 400 Bad Request\r\n\r\n")

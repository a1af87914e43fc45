"""Which calls of an HTTP/2 connection are open, from the heads of frames in both directions."""

from collections.abc import Callable

import pytest

from penstock.serve.grpc.header_blocks import END_HEADERS, HeaderBlocks
from penstock.serve.grpc.open_calls import DATA, END_STREAM, HEADERS, RST_STREAM, AnswerFrames, OpenCalls, goaway
from tests.support.http2 import PREFACE, begun, frame, head

INFER = "/a"
PING, SETTINGS = 6, 4


class Scene:
    """A connection whose bytes come in pieces, and a clock that goes on with each."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.now_ns, self._size = 0, size
        self.calls = OpenCalls(lambda: self.now_ns)
        self._blocks, self.answers = HeaderBlocks(self.calls), AnswerFrames(self.calls)
        self.send(PREFACE, frame(SETTINGS))

    def send(self, *frames: bytes) -> None:
        self._feed(self._blocks.feed, b"".join(frames))

    def answer(self, *frames: bytes) -> None:
        self._feed(self.answers.feed, b"".join(frames))

    def _feed(self, feed: Callable[[bytes], object], data: bytes) -> None:
        for at in range(0, len(data), self._size):
            self.now_ns += 1
            feed(data[at : at + self._size])

    def state(self) -> tuple[bool, bool]:
        return self.calls.in_use, self.calls.partial_since_ns is not None


@pytest.mark.parametrize("size", [1, 3, 9, 10, 1 << 16])
def test_a_call_from_its_head_to_its_answer(size: int) -> None:
    scene = Scene(size)
    assert scene.state() == (False, False)
    scene.send(head(INFER, 1), frame(DATA, begun(50, b"x" * 20), 0, 1))
    assert (scene.state(), scene.calls.last_taken) == ((False, True), 0)
    began_ns = scene.calls.partial_since_ns
    scene.send(frame(PING, bytes(8)), frame(DATA, b"x" * 15, 0, 1))
    assert scene.calls.partial_since_ns == began_ns
    scene.send(frame(DATA, b"x" * 20, END_STREAM, 1))
    assert (scene.state(), scene.calls.last_taken) == ((True, False), 1)
    scene.answer(frame(SETTINGS), frame(HEADERS, b"ok", END_HEADERS, 1), frame(DATA, begun(3, b"yes"), 0, 1))
    assert scene.state() == (True, False)
    scene.answer(frame(HEADERS, b"end", END_HEADERS | END_STREAM, 1))
    assert (scene.state(), scene.calls.last_taken) == ((False, False), 1)
    assert began_ns is not None
    assert began_ns < scene.calls.idle_since_ns <= scene.now_ns
    # Who only pings does nothing.
    scene.send(frame(PING, bytes(8)))
    assert scene.calls.idle_since_ns < scene.now_ns


def test_a_stream_that_was_answered_is_in_use_although_its_client_may_send_more() -> None:
    scene = Scene()
    scene.send(head(INFER, 1), frame(DATA, begun(0), 0, 1))
    scene.answer(frame(HEADERS, b"ok", END_HEADERS, 1))
    assert scene.state() == (True, False)
    scene.send(frame(RST_STREAM, bytes(4), 0, 1))
    assert scene.state() == (False, False)


def test_the_oldest_partial_call_counts_and_what_the_library_resets_is_over() -> None:
    scene = Scene()
    scene.send(head(INFER, 1))
    first_ns = scene.calls.partial_since_ns
    scene.send(head(INFER, 3))
    scene.send(head(INFER, 5), frame(DATA, b"", END_STREAM, 5))
    assert (scene.calls.partial_since_ns, scene.calls.last_taken) == (first_ns, 0)
    scene.answer(frame(RST_STREAM, bytes(4), 0, 1))
    assert scene.calls.last_taken == 2
    assert scene.calls.partial_since_ns != first_ns
    scene.answer(frame(RST_STREAM, bytes(4), 0, 3), frame(HEADERS, b"", END_STREAM, 5))
    assert (scene.state(), scene.calls.last_taken) == ((False, False), 5)


def test_another_frame_may_follow_between_frames_alone() -> None:
    scene = Scene()
    assert not scene.answers.at_boundary
    answered = frame(SETTINGS) + frame(DATA, b"x" * 5, 0, 1)
    boundaries: list[int] = []
    for count, byte in enumerate(answered, 1):
        scene.answer(bytes((byte,)))
        if scene.answers.at_boundary:
            boundaries.append(count)
    assert boundaries == [9, len(answered)]


def test_the_frame_by_which_a_connection_ends() -> None:
    assert goaway(5) == frame(7, (5).to_bytes(4, "big") + bytes(4))

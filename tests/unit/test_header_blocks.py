"""Header blocks of HTTP/2: their size, from the heads of frames that come in any pieces."""

import pytest

from penstock.serve.grpc.header_blocks import (
    CONTINUATION,
    END_HEADERS,
    MAX_BLOCK_BYTES,
    HeaderBlocks,
)
from penstock.serve.grpc.open_calls import FRAME_HEAD_BYTES, HEADERS, OpenCalls
from tests.support.http2 import PREFACE, frame

DATA, SETTINGS = 0, 4
# Payloads of zeros would be heads of empty frames of data: these are heads of frames that would be too large.
EVIL = frame(HEADERS, b"")[:3] + bytes((HEADERS, 0, 0, 0, 0, 1)) + b"\xff" * 100

GOOD = [
    PREFACE,
    frame(SETTINGS, EVIL),
    frame(HEADERS, b"x" * 16_000, 0, 1),
    frame(CONTINUATION, b"x" * 16_000, END_HEADERS, 1),
    frame(DATA, EVIL * 200, 0, 1),
    frame(HEADERS, b"x" * 16_000, END_HEADERS, 1),
    # Another one, whose size has nothing to do with the one before.
    frame(HEADERS, b"x" * 16_000, 0, 3),
    frame(CONTINUATION, b"", 0, 3),
    frame(CONTINUATION, b"x" * 8_000, END_HEADERS, 3),
    frame(DATA, b"", 0, 3),
]


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 10, 1000, 65_536])
def test_pieces_make_no_difference(size: int) -> None:
    sent = b"".join(GOOD)
    blocks, begun = HeaderBlocks(OpenCalls()), 0
    for at in range(0, len(sent), size):
        assert blocks.feed(sent[at : at + size])
        begun += blocks.begun
    assert begun == len(GOOD) - 1
    assert blocks.unfinished_bytes == 0
    for sent in (frame(HEADERS, b"x" * 16_000, 0, 5), frame(CONTINUATION, b"x" * 16_000, 0, 5)):
        assert all(blocks.feed(sent[at : at + size]) for at in range(0, len(sent), size))
    assert blocks.unfinished_bytes == 2 * (FRAME_HEAD_BYTES + 16_000)
    sent = frame(CONTINUATION, b"x" * 1_000, END_HEADERS, 5)
    assert not all(blocks.feed(sent[at : at + size]) for at in range(0, len(sent), size))


def test_a_block_is_unfinished_until_its_last_byte() -> None:
    blocks = HeaderBlocks(OpenCalls())
    sent = PREFACE + frame(HEADERS, b"xyz", END_HEADERS, 1)
    assert blocks.feed(sent[:-1])
    assert blocks.unfinished_bytes == FRAME_HEAD_BYTES + 3
    assert blocks.feed(sent[-1:])
    assert blocks.unfinished_bytes == 0


def test_frames_without_bytes_end_too() -> None:
    blocks = HeaderBlocks(OpenCalls())
    assert blocks.feed(PREFACE + frame(HEADERS, b"", 0, 1))
    assert not blocks.feed(frame(CONTINUATION, b"", 0, 1) * (MAX_BLOCK_BYTES // FRAME_HEAD_BYTES))


def test_a_frame_is_refused_by_the_size_that_it_announces() -> None:
    blocks = HeaderBlocks(OpenCalls())
    assert not blocks.feed(PREFACE + b"\xff\xff\xff" + frame(HEADERS)[3:])

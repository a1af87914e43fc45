"""The samples that a client's stream takes, before they are sent."""

import json
from typing import Any

import numpy as np
import pytest

from penstock.client.retry import ClientConfig
from penstock.client.stream import StreamOptions, StreamProtocol
from penstock.core.errors import InvalidInput
from penstock.core.spec import Array

READY = {"type": "ready", "app": "hand", "rate_hz": 50, "chunk_frames": 4, "chunk_ms": 80.0, "window": 8}
OF_SENSOR = {"encoding": "raw", "dtype": "float32", "frame": [3]}


def stream(**ready: Any) -> StreamProtocol:
    options = StreamOptions(rate_hz=None, encoding=None, events="json", latency_ms=None)
    return StreamProtocol(ClientConfig(url="http://server"), options, json.dumps(READY | ready))


def sent(protocol: StreamProtocol, samples: Any) -> list[bytes]:
    """The samples of each message, without its number."""
    return [message[4:] for message in protocol.messages(samples)]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (np.zeros((6, 3)), r"The samples are float64\[6, 3\]; 'hand' takes float32\[frames, 3\]\."),
        # As many bytes as whole frames have.
        (np.zeros((6, 1), np.float32), r"float32\[6, 1\]; 'hand' takes"),
        (np.zeros(12, np.float32), r"float32\[12\]; 'hand' takes"),
        (np.zeros((6, 3), ">f4"), r">f4\[6, 3\]; 'hand' takes"),
        ("1,2,3", r"The samples are a str; send an array or bytes\."),
        ([[1.0, 2.0, 3.0]], r"The samples are a list; send"),
    ],
)
def test_what_would_be_read_as_other_numbers_is_refused(samples: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        sent(stream(**OF_SENSOR), samples)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (9, 3), (3,)])
def test_frames_of_a_sensor_are_sent_in_chunks(shape: tuple[int, ...]) -> None:
    samples: Array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    messages = sent(stream(**OF_SENSOR), samples)
    assert b"".join(messages) == samples.tobytes()
    assert all(len(message) in (12, 24, 36, 48) for message in messages)
    assert sent(stream(**OF_SENSOR), samples.tobytes()) == ([samples.tobytes()] if samples.size else [])


def test_frames_of_one_byte_are_sent_in_chunks_too() -> None:
    # One message of all would be longer than a second of the signal, which ends the stream.
    messages = sent(stream(encoding="raw", dtype="uint8", frame=[]), np.arange(10, dtype=np.uint8))
    assert [len(message) for message in messages] == [4, 4, 2]
    assert sent(stream(encoding="raw"), np.zeros(10, np.uint8)) == [bytes(10)]


def test_a_server_that_does_not_say_what_a_frame_is_gets_arrays_as_they_are() -> None:
    assert sent(stream(encoding="raw"), np.zeros((2, 5))) == [bytes(80)]


def test_sound_is_taken_in_its_encoding_alone() -> None:
    assert sent(stream(encoding="pcm_s16le"), np.ones(2, np.int16)) == [b"\1\0\1\0"]
    with pytest.raises(InvalidInput, match="The samples are float64; pcm_s16le takes int16"):
        sent(stream(encoding="pcm_s16le"), np.ones(2))


def test_sound_has_one_channel() -> None:
    # As programs that record give it.
    assert sent(stream(encoding="pcm_s16le"), np.ones((2, 1), np.int16)) == [b"\1\0\1\0"]
    for shape in ((2, 2), (1, 4)):
        with pytest.raises(InvalidInput, match=r"send one channel, int16\[frames\]"):
            sent(stream(encoding="pcm_s16le"), np.ones(shape, np.int16))

"""What is said on a live stream: every message in every state, results, the end."""

import json
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ComputeFailed, InvalidInput, RequestError, TooLarge, UnsupportedContent
from penstock.core.spec import Array, TensorSpec
from penstock.core.streams.live import Live
from penstock.serve.streams.session import StreamState
from penstock.serve.websocket.frames import MAX_REASON_BYTES
from tests.support.session import CHUNK, RATE_HZ, talk

ONE = np.arange(CHUNK, dtype=np.int16)
WAV = {"encoding": "wav"}
_EMPTY = [(b"", 0, False)]


def test_a_stream_from_start_to_end() -> None:
    stream = talk()
    stream.start()
    assert stream.sent.pop() == {
        "type": "ready",
        "app": "hark",
        "stream": "s",
        "encoding": "pcm_s16le",
        "rate_hz": RATE_HZ,
        "chunk_frames": CHUNK,
        "chunk_ms": 1.0,
        "latency_ms": 50.0,
        "window": 4,
    }
    stream.send(0, ONE)
    stream.send(1, ONE[:3])
    assert stream.chunks == [(ONE.tobytes(), CHUNK, False), (ONE[:3].tobytes(), 3, False)]
    stream.answer_all()
    stream.end()
    assert stream.chunks[-1] == (b"", 0, True)
    stream.answer_all()
    assert stream.sent == [
        {"type": "result", "seq": 0, "event": [[0, n] for n in range(CHUNK)]},
        {"type": "result", "seq": 1, "event": [[1, n] for n in range(3)]},
        {"type": "result", "seq": 2, "event": None, "last": True},
        {"type": "end", "chunks": 2},
    ]
    assert stream.closed == [(1000, "")]
    assert stream.session.state is StreamState.OVER
    stream.send(7, b"what comes late is dropped")


def test_a_flush_has_a_number_and_a_result_and_the_network_begins_anew() -> None:
    stream = talk()
    stream.start()
    stream.sent.clear()
    stream.send(0, ONE)
    stream.flush()
    stream.send(2, ONE[:3])
    stream.flush()
    stream.flush()
    assert stream.chunks == [(ONE.tobytes(), CHUNK, False), (b"", 0, False), (ONE[:3].tobytes(), 3, False), *_EMPTY * 2]
    assert stream.resets == [1, 3, 4]
    stream.end()
    stream.answer_all()
    assert stream.sent == [
        {"type": "result", "seq": 0, "event": [[0, n] for n in range(CHUNK)]},
        {"type": "result", "seq": 1, "event": None, "flushed": True},
        {"type": "result", "seq": 2, "event": [[2, n] for n in range(3)]},
        {"type": "result", "seq": 3, "event": None, "flushed": True},
        {"type": "result", "seq": 4, "event": None, "flushed": True},
        {"type": "result", "seq": 5, "event": None, "last": True},
        {"type": "end", "chunks": 5},
    ]


def test_a_flush_gives_what_the_resampler_holds_back_and_another_one_follows() -> None:
    heard: list[list[Any]] = []
    high = np.repeat(np.arange(100, dtype=np.int16) * 100, 6)
    for flushes in (False, True):
        stream = talk()
        stream.start(rate_hz=6 * RATE_HZ)
        stream.send(0, high)
        if flushes:
            stream.flush()
            first = stream.samples.size
            stream.send(2, high)
            stream.flush()
            # As a stream of its own.
            np.testing.assert_array_equal(stream.samples[:first], stream.samples[first:])
        else:
            stream.end()
        heard.append(stream.samples[: len(stream.samples) // (1 + flushes)].tolist())
    assert heard[0] == heard[1]


def test_the_memory_of_events_begins_anew_after_a_flush() -> None:
    def count(output_U: Array, memory: int | None, last: bool) -> tuple[Any, int]:
        total = (memory or 0) + len(output_U)
        return (total, last), total

    stream = talk(Live(rate_hz=RATE_HZ, events=count))
    stream.start()
    stream.sent.clear()
    for number in (0, 2):
        stream.send(number, ONE[:3])
        stream.flush()
    stream.answer_all()
    assert [said["event"] for said in stream.sent] == [[3, False], [3, True]] * 2


def test_what_cannot_be_flushed_is_told() -> None:
    stream = talk()
    stream.start(**WAV)
    with pytest.raises(UnsupportedContent, match="A WAV takes no flush"):
        stream.flush()
    stream = talk()
    with pytest.raises(InvalidInput):
        stream.flush()


def test_a_stream_with_an_unanswered_flush_is_not_plain() -> None:
    stream = talk()
    stream.start(events="binary")
    stream.send(0, ONE)
    assert stream.session.plain_counts == (1, 0)
    stream.flush()
    assert stream.session.plain_counts is None
    stream.answer_all()
    assert stream.session.plain_counts == (2, 2)


def test_a_long_message_is_cut_and_answered_once() -> None:
    stream = talk()
    stream.start()
    stream.send(0, np.arange(20, dtype=np.int16))
    stream.send(1, ONE)
    assert [frames for _, frames, _ in stream.chunks] == [8, 8, 4, 8]
    assert stream.samples.tolist() == [*range(20), *range(8)]
    stream.sent.clear()
    stream.answer_all()
    assert [(said["seq"], len(said["event"])) for said in stream.sent] == [(0, 20), (1, 8)]


def test_binary_events() -> None:
    stream = talk()
    stream.start(events="binary")
    stream.send(0, ONE[:2])
    stream.answer_all()
    stream.end()
    stream.answer_all()
    ready, first, last, ended = stream.sent
    assert first[:8] == (0).to_bytes(4, "little") + (2).to_bytes(4, "little")
    assert np.frombuffer(first, "<f4", -1, 8).tolist() == [0, 0, 0, 1]
    assert last == (1).to_bytes(4, "little") + bytes(4)
    assert (ready["type"], ended) == ("ready", {"type": "end", "chunks": 1})


def test_events_remember_and_hear_of_the_end() -> None:
    def events(output_U: Array, memory: Any, last: bool) -> tuple[Any, Any]:
        total = (memory or 0) + len(output_U)
        return {"frames": total, "last": last}, total

    stream = talk(Live(rate_hz=RATE_HZ, events=events))
    stream.start()
    stream.send(0, ONE)
    stream.send(1, ONE[:1])
    stream.answer_all()
    stream.end()
    stream.answer_all()
    assert [said["event"] for said in stream.sent[1:4]] == [
        {"frames": 8, "last": False},
        {"frames": 9, "last": False},
        {"frames": 9, "last": True},
    ]


def test_events_that_raise_or_give_what_json_cannot_carry_end_that_stream(caplog: pytest.LogCaptureFixture) -> None:
    for value in (object(), None):

        def events(output_U: Array, memory: Any, last: bool) -> tuple[Any, Any]:
            if value is None:  # noqa: B023
                raise ValueError("no")
            return value, None  # noqa: B023

        stream = talk(Live(rate_hz=RATE_HZ, events=events))
        stream.start()
        stream.send(0, ONE)
        with pytest.raises(ComputeFailed, match="events failed"):
            stream.answer_all()
    assert len(caplog.records) == 2


def text(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"[" * 5000, "no JSON"),
        (b"[]", "not a start"),
        (text(type="begin"), "not a start"),
        (text(type="start", rate="8000"), "'rate'"),
        (text(type="start", rate_hz="8000"), "rate_hz is '8000'"),
        (b'{"type":"start","rate_hz":' + b"[" * 1000 + b"]" * 1000 + b"}", "rate_hz is"),
        (b'{"type":"start","events":' + b"[" * 1000 + b"]" * 1000 + b"}", "events is"),
        (text(type="start", rate_hz=True), "rate_hz is True"),
        (text(type="start", rate_hz=-1), "rate_hz is -1"),
        (text(type="start", rate_hz=1e9), "rate_hz is 1000000000"),
        (text(type="start", rate_hz=10), "from 1,000"),
        (text(type="start", latency_ms=0), "latency_ms is 0"),
        (text(type="start", latency_ms=[1] * 100), "latency_ms is"),
        (text(type="start", encoding="mp3"), "encoding is 'mp3'"),
        (text(type="start", encoding={}), "encoding is"),
        (text(type="start", events="xml"), "events is 'xml'"),
        (text(type="start", **{"ä" * 500: 1}), "The start has"),
    ],
)
def test_a_start_that_is_none(message: bytes, said: str) -> None:
    stream = talk()
    with pytest.raises(InvalidInput, match=said) as caught:
        stream.text(message)
    assert len(str(caught.value).encode()) <= MAX_REASON_BYTES
    assert stream.chunks == []
    assert stream.session.state is StreamState.STARTING


@pytest.mark.parametrize(
    ("number", "samples", "kind", "said"),
    [
        (0, ONE.tobytes(), InvalidInput, "Message 0 came where 1 belongs"),
        (2, ONE.tobytes(), InvalidInput, "Message 2 came where 1 belongs"),
        (2**32 - 1, ONE.tobytes(), InvalidInput, "Message 4294967295"),
        (1, b"", InvalidInput, "0 bytes of samples"),
        (1, b"abc", InvalidInput, "3 bytes of samples; send whole frames of 2"),
    ],
)
def test_samples_that_are_none(number: int, samples: bytes, kind: type[RequestError], said: str) -> None:
    stream = talk()
    stream.start()
    stream.send(0, ONE)
    with pytest.raises(kind, match=said) as caught:
        stream.send(number, samples)
    assert len(str(caught.value).encode()) <= MAX_REASON_BYTES
    assert len(stream.chunks) == 1


def test_messages_in_the_wrong_place() -> None:
    stream = talk()
    with pytest.raises(UnsupportedContent, match="before the start"):
        stream.send(0, ONE)
    stream.start()
    with pytest.raises(UnsupportedContent, match="Text came"):
        stream.start()
    with pytest.raises(InvalidInput, match="no JSON"):
        stream.text(b"hello")
    with pytest.raises(InvalidInput, match="has 2 bytes"):
        stream.binary(b"\0\0")
    stream.end()
    with pytest.raises(InvalidInput, match="after the end"):
        stream.send(0, ONE)
    with pytest.raises(InvalidInput, match="after the end"):
        stream.end()


def test_more_than_a_second_a_message_is_too_much() -> None:
    stream = talk()
    assert stream.session.max_message_bytes < 1 << 16
    stream.start()
    assert stream.session.max_message_bytes == 4 + RATE_HZ * 2
    stream = talk()
    stream.start(encoding="wav")
    header = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x07\0\x01\0\x40\x1f\0\0\x40\x1f\0\0\x01\0\x08\0data\0\0\0\0"
    stream.send(0, header + bytes(RATE_HZ))
    with pytest.raises(TooLarge, match="8,001 frames"):
        stream.send(1, bytes(RATE_HZ + 1))


def test_a_long_chunk_of_a_wav_is_as_long_at_its_own_rate() -> None:
    long = TensorSpec(dtype="int16", shape=(2 * RATE_HZ,), meaning="sound", name="sound")
    header = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x07\0\x01\0%b\0\0%b\0\0\x01\0\x08\0data\0\0\0\0"
    for rate_hz in (1_000, 2 * RATE_HZ):
        stream = talk(input=long)
        stream.start(encoding="wav")
        wav = header.replace(b"%b", rate_hz.to_bytes(2, "little"))
        stream.send(0, wav + bytes(2 * rate_hz))
        with pytest.raises(TooLarge, match=f"at most {2 * rate_hz:,} are taken"):
            stream.send(1, bytes(2 * rate_hz + 1))
        assert stream.samples.size <= 2 * 2 * RATE_HZ


@pytest.mark.parametrize("fields", [{"encoding": "mulaw"}, {"encoding": "pcm_f32le"}, {"rate_hz": 16_000}, WAV])
def test_a_decoded_message_without_samples_is_refused(fields: dict[str, Any]) -> None:
    stream = talk()
    stream.start(**fields)
    with pytest.raises(InvalidInput, match="Message 0 has no samples"):
        stream.send(0, b"")


def test_what_a_wav_has_after_its_samples_is_answered_but_not_heard() -> None:
    stream = talk()
    stream.start(**WAV)
    head = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x40\x1f\0\0\x80\x3e\0\0\x02\0\x10\0data\x04\0\0\0"
    stream.send(0, head)
    stream.send(1, b"\1\0\2\0")
    assert stream.session.activity == 2
    stream.send(2, b"LIST")
    assert stream.session.activity == 2
    stream.answer_all()
    assert [said["seq"] for said in stream.sent[1:]] == [0, 1, 2]
    assert stream.samples.tolist() == [1, 2]


def test_a_drain_that_cuts_a_wav_within_a_frame_releases_what_is_held_back() -> None:
    head = b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data\0\0\0\0"
    counts: list[int] = []
    for tail in (b"", b"\1"):
        stream = talk()
        stream.start(**WAV)
        stream.send(0, head + bytes(2_000) + tail)
        stream.finish(1001, "down")
        stream.answer_all()
        assert stream.closed == [(1001, "down")]
        counts.append(stream.samples.size)
    assert counts == [500, 500]


def test_a_signal_that_is_no_sound_is_raw_and_checked() -> None:
    points = TensorSpec(dtype="float32", shape=(4, 3), meaning="points", name="points")
    stream = talk(Live(rate_hz=10), points)
    with pytest.raises(InvalidInput, match="no sound"):
        stream.start(encoding="mulaw")
    with pytest.raises(InvalidInput, match="no sound"):
        stream.start(rate_hz=20)
    stream.start(rate_hz=10)
    # The client has no other way to know its frames.
    assert {name: stream.sent[-1][name] for name in ("encoding", "dtype", "frame")} == {
        "encoding": "raw",
        "dtype": "float32",
        "frame": [3],
    }
    assert stream.session.max_message_bytes == 4 + 10 * 12
    stream.send(0, np.ones((2, 3), np.float32))
    with pytest.raises(InvalidInput, match="NaN"):
        stream.send(1, np.full((1, 3), np.nan, np.float32))
    with pytest.raises(InvalidInput, match="whole frames of 12"):
        stream.send(1, b"1234")
    assert [frames for _, frames, _ in stream.chunks] == [2]


def test_the_server_ends_it_as_if_the_client_had_but_for_the_close() -> None:
    stream = talk()
    stream.start(latency_ms=20)
    assert stream.budgets_ms == [20]
    stream.send(0, ONE)
    stream.finish(1001, "down")
    stream.send(1, ONE)
    stream.end()
    stream.answer_all()
    assert [said["seq"] for said in stream.sent[1:]] == [0, 1]
    assert stream.sent[-1]["last"]
    assert stream.closed == [(1001, "down")]
    stream = talk()
    stream.finish(1001, "down")
    assert stream.closed == [(1001, "down")]


def test_what_a_network_says_without_a_chunk_goes_with_the_next_answer() -> None:
    stream = talk()
    stream.start()
    stream.result(np.array([1, 2], np.float32), False)
    stream.send(0, ONE[:1])
    stream.result(np.array([3, 4], np.float32), False)
    stream.end()
    stream.result(np.array([5, 6], np.float32), False)
    stream.result(np.array([7, 8], np.float32), True)
    assert [said.get("event") for said in stream.sent[1:3]] == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


def test_a_slow_signal_can_be_ended() -> None:
    """A second of it has fewer bytes than the text of the end."""
    stream = talk(Live(rate_hz=1), TensorSpec(dtype="uint8", shape=(1,), meaning="a state", name="state"))
    stream.start()
    assert stream.session.max_message_bytes >= len(b'{"type": "end"}')

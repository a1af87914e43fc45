"""Sound however it is cut and encoded: the same samples as of the whole."""

import io
import math
import wave
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.core.speech.resumable_resampler import HELD_BEFORE, HELD_BEHIND, ResumableResampler
from penstock.core.speech.sound import PcmDecoder, SoundDecoder, resampler, sound_decoder
from penstock.serve.streams.session import MAX_MESSAGE_S
from tests.support.session import CHUNK, RATE_HZ, Talk, talk
from tests.support.tickets import tickets_each

CUTS = st.lists(st.integers(0, 1 << 20), max_size=12)


def tone(frames: int, rate_hz: int = RATE_HZ) -> npt.NDArray[np.int16]:
    time_s = np.arange(frames) / rate_hz
    return (8000 * np.sin(2 * np.pi * 440 * time_s) + 4000 * np.sin(2 * np.pi * 90 * time_s)).astype(np.int16)


def wav(
    samples: npt.NDArray[Any], rate_hz: int, kind: int = 1, *, extra: bytes = b"", size: int | None = None
) -> bytes:
    """A file of one or two channels, `[T]` or `[T, 2]`."""
    channels, width = (samples.shape[1] if samples.ndim == 2 else 1), samples.itemsize
    raw = samples.tobytes()
    form = kind.to_bytes(2, "little") + channels.to_bytes(2, "little") + rate_hz.to_bytes(4, "little")
    form += (rate_hz * channels * width).to_bytes(4, "little") + (channels * width).to_bytes(2, "little")
    form += (8 * width).to_bytes(2, "little")
    size = len(raw) if size is None else size
    body = b"WAVEfmt \x10\0\0\0" + form + extra + b"data" + size.to_bytes(4, "little") + raw
    return b"RIFF" + len(body).to_bytes(4, "little") + body


def pieces(data: bytes, cuts: list[int], each: int = 1) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) // each + 1) * each for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


def decoded(decoder: SoundDecoder, parts: list[bytes]) -> npt.NDArray[np.int16]:
    return np.concatenate([*(decoder.feed(part) for part in parts), decoder.flush()])


LIST_CHUNK = b"LIST\x05\0\0\0abcde\0"


@given(
    CUTS,
    st.sampled_from([1, 3, 7]),
    st.sampled_from([8000, 11025, 16000, 44100, 48000]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([b"", LIST_CHUNK]),
    st.sampled_from([None, 0, 0xFFFFFFFF]),
)
@settings(deadline=None)
def test_a_wav_gives_the_same_samples_wherever_it_is_cut(
    cuts: list[int], kind: int, rate_hz: int, stereo: bool, target: bool, extra: bytes, size: int | None
) -> None:
    whole = tone(700, rate_hz)
    samples: npt.NDArray[Any] = {1: whole, 3: (whole / 32768).astype(np.float32), 7: whole.astype(np.uint8)}[kind]
    if stereo:
        samples = np.stack([samples, samples[::-1]], 1)
    data = wav(samples, rate_hz, kind, extra=extra, size=size)
    target_hz = rate_hz if target else RATE_HZ
    expected = decoded(sound_decoder("wav", None, target_hz), [data])
    assert np.array_equal(decoded(sound_decoder("wav", None, target_hz), pieces(data, cuts)), expected)
    if target and kind != 7:
        mono = (samples.astype(np.float64).mean(1) if stereo else samples) * (32768 if kind == 3 else 1)
        assert np.abs(expected - mono).max() <= 1
    else:
        assert abs(len(expected) - 700 * target_hz / rate_hz) < 2


@given(CUTS, st.sampled_from(["pcm_s16le", "pcm_f32le", "mulaw"]), st.sampled_from([8000, 16000, 22050, 48000]))
@settings(deadline=None)
def test_resampling_in_pieces_is_resampling_the_whole(cuts: list[int], encoding: str, rate_hz: int) -> None:
    whole = tone(3000, rate_hz)
    raw = {
        "pcm_s16le": whole.tobytes(),
        "pcm_f32le": (whole / 32768).astype(np.float32).tobytes(),
        "mulaw": (whole >> 8).astype(np.uint8).tobytes(),
    }[encoding]
    each = {"pcm_s16le": 2, "pcm_f32le": 4, "mulaw": 1}[encoding]
    expected = decoded(sound_decoder(encoding, rate_hz, RATE_HZ), [raw])
    assert np.array_equal(decoded(sound_decoder(encoding, rate_hz, RATE_HZ), pieces(raw, cuts, each)), expected)
    assert abs(len(expected) - 3000 * RATE_HZ / rate_hz) < 2


@pytest.mark.thorough
@given(CUTS, st.sampled_from([RATE_HZ, 16000, 44100]), st.randoms())
@settings(deadline=None)
def test_a_stream_puts_in_the_same_samples_however_they_are_sent(cuts: list[int], rate_hz: int, random: Any) -> None:
    whole = tone(2000, rate_hz)
    expected = decoded(sound_decoder("pcm_s16le", rate_hz, RATE_HZ), [whole.tobytes()])
    stream = talk()
    stream.start(rate_hz=rate_hz)
    sent = [part for part in pieces(whole.tobytes(), cuts, 2) if part]
    for number, part in enumerate(sent):
        stream.send(number, part)
        if random.random() < 0.5:
            stream.answer_all()
    stream.end()
    stream.answer_all()
    assert np.array_equal(stream.samples, expected)
    assert all(1 <= frames <= CHUNK for _, frames, last in stream.chunks if not last)
    assert [last for _, _, last in stream.chunks] == [False] * (len(stream.chunks) - 1) + [True]
    results = [said for said in stream.sent if said["type"] == "result"]
    assert [result["seq"] for result in results] == list(range(len(sent) + 1))
    assert sum(len(result["event"] or ()) for result in results) == len(expected)
    assert stream.sent[-1] == {"type": "end", "chunks": len(sent)}


def test_resampled_sound_is_the_sound() -> None:
    for rate_hz in (16000, 44100, 48000):
        found = decoded(sound_decoder("pcm_s16le", rate_hz, RATE_HZ), [tone(rate_hz, rate_hz).tobytes()])
        assert np.abs(found[200:-200] - tone(RATE_HZ)[200 : 200 + len(found) - 400].astype(int)).max() < 16


def test_what_a_resampler_holds_back_does_not_hold_up_real_time() -> None:
    """From the rates of browsers to those of models: a message's samples come out with one of the next few."""
    for rate_hz, target_hz in ((48000, 16000), (44100, 16000), (48000, 8000)):
        decoder = sound_decoder("pcm_s16le", rate_hz, target_hz)
        came = 0
        for number in range(1, 40):
            came += len(decoder.feed(bytes(2 * (rate_hz // 50))))
            assert number * 0.020 - came / target_hz < 0.065


def test_mu_law_is_that_of_the_standard() -> None:
    found = sound_decoder("mulaw", None, RATE_HZ).feed(bytes(range(256)))
    assert found[[0, 127, 128, 255]].tolist() == [-32124, 0, 32124, 0]
    assert np.array_equal(found[:128], -found[128:])
    assert (np.diff(found[:128].astype(int)) > 0).all()


def test_the_writer_of_python_is_understood() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(2)
        writer.setsampwidth(2)
        writer.setframerate(RATE_HZ)
        writer.writeframes(np.stack([tone(100), tone(100)], 1).tobytes())
    assert np.array_equal(decoded(sound_decoder("wav", None, RATE_HZ), [file.getvalue()]), tone(100))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"ID3", "no WAV"),
        (b"RIFF\0\0\0\0AVI ", "no WAV"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", "no 'fmt '"),
        (wav(tone(10), 8000, 2), "format 2 of 16 bits"),
        (wav(np.zeros((10, 3), np.int16), 8000), "3 channels"),
        (wav(tone(10), 0), "The WAV has 0 Hz; send 1,000 to 384,000"),
        (wav(tone(10), 10_000_000), "The WAV has 10,000,000 Hz; send 1,000 to 384,000"),
        (wav(tone(10), 8000, extra=b"LIST\xff\xff\xff\x7f"), "within its first"),
        (wav(tone(10), 8000)[:30], "before its header"),
        (wav(tone(10), 8000)[:-1], "within a frame"),
        (b"", "before its header"),
        (wav(np.array([0.1, np.nan], np.float32), 8000, 3), "NaN"),
        (b"RIFF\0\0\0\0WAVEfmt \x02\0\0\0\1\0data\0\0\0\0", "has 2 bytes"),
    ],
)
def test_what_is_no_wav(data: bytes, said: str) -> None:
    for parts in ([data], [bytes([byte]) for byte in data]):
        with pytest.raises(InvalidInput, match=said) as caught:
            decoded(sound_decoder("wav", None, RATE_HZ), parts)
        assert len(str(caught.value).encode()) <= 123


def test_a_wav_is_of_the_rate_that_was_said_or_refused() -> None:
    with pytest.raises(InvalidInput, match="leave rate_hz out"):
        decoded(sound_decoder("wav", 16000, RATE_HZ), [wav(tone(10), 8000)])
    assert MAX_MESSAGE_S == 1


@given(
    CUTS,
    st.sampled_from([(48_000, 16_000), (44_100, 16_000), (8_000, 16_000), (22_050, 16_000), (11_025, 8_000)]),
    st.sampled_from(["pcm_s16le", "pcm_f32le", "mulaw"]),
    st.lists(st.floats(0, 1), min_size=1, max_size=3),
)
@settings(deadline=None)
def test_another_decoder_goes_on_after_any_piece(
    cuts: list[int], rates_hz: tuple[int, int], encoding: str, moves: list[float]
) -> None:
    rate_hz, target_hz = rates_hz
    sound = np.random.default_rng(3).normal(0, 6_000, rate_hz // 2).astype(np.int16)
    data = {
        "pcm_s16le": sound,
        "pcm_f32le": (sound / 32_768).astype(np.float32),
        "mulaw": (sound % 256).astype(np.uint8),
    }[encoding]
    parts = pieces(data.tobytes(), cuts, data.itemsize)
    moved = {int(move * len(parts)) for move in moves}

    def fresh() -> PcmDecoder:
        decoder = sound_decoder(encoding, rate_hz, target_hz)
        assert isinstance(decoder, PcmDecoder)
        assert decoder.make_resumable()
        return decoder

    whole = fresh()
    # In each piece the same number of samples, since each result is of the samples of one message.
    expected = [whole.feed(part) for part in parts]
    decoder, found = fresh(), []
    for index, part in enumerate(parts):
        if index in moved:
            heard, before = decoder.heard(), decoder
            decoder = fresh()
            decoder.resume(*heard)
            # The rest of the other one is not heard.
            before.flush()
        found.append(decoder.feed(part))
    assert [each.size for each in found] == [each.size for each in expected]
    found_T, expected_T = (np.concatenate([*one, each.flush()]) for one, each in ((found, decoder), (expected, whole)))
    assert found_T.shape == expected_T.shape
    # The rounding of floats may decide that of samples.
    assert np.abs(found_T.astype(np.int32) - expected_T).max(initial=0) <= 1
    assert np.count_nonzero(found_T != expected_T) <= 0.01 * expected_T.size + 1
    # A resampler that cannot be gone on with gives the same.
    assert np.array_equal(expected_T, decoded(sound_decoder(encoding, rate_hz, target_hz), parts))


@pytest.mark.thorough
@given(st.integers(1_000, 384_000), st.sampled_from([8_000, 16_000, 44_100]), st.integers(1, 3_000))
@example(8_013, 44_100, 1)
@example(3_940, 16_000, 1)
@settings(deadline=None, max_examples=60)
def test_samples_come_as_soon_as_they_are_due(rate_hz: int, target_hz: int, each: int) -> None:
    """Of all rates of which streams go on, soxr holds back no more than is held back anyway."""
    made = ResumableResampler.of(resampler(rate_hz, target_hz), rate_hz, target_hz)
    if made is None:
        return
    came = given = 0
    while came < min(rate_hz, 60_000):
        given += made.resample_chunk(np.zeros(each, np.float32), False).size
        came += each
        held = max(HELD_BEHIND, math.ceil(HELD_BEFORE * target_hz / rate_hz))
        assert given == max(0, came * target_hz // rate_hz - held)


def test_of_rates_without_a_short_period_no_decoder_goes_on() -> None:
    decoder = sound_decoder("pcm_s16le", 16_001, 16_000)
    assert isinstance(decoder, PcmDecoder)
    assert not decoder.make_resumable()
    assert decoder.heard() == (b"", 0)
    assert decoder.feed(bytes(16_001)[:16_000]).size


@pytest.mark.thorough
@given(st.lists(st.integers(1, 900), min_size=8, max_size=30), st.sampled_from([16_000, 44_100, 48_000]))
@settings(deadline=None)
def test_a_resampled_stream_goes_on_with_a_ticket_as_if_it_had_not_been_left(sizes: list[int], rate_hz: int) -> None:
    sound = np.random.default_rng(6).normal(0, 6_000, sum(sizes)).astype(np.int16)
    ends = np.cumsum(sizes)
    messages = [sound[end - size : end] for size, end in zip(sizes, ends.tolist(), strict=True)]

    def started(**fields: Any) -> Talk:
        stream = talk(tickets=tickets_each(0.002).of_stream("me"))
        stream.start(rate_hz=rate_hz, tickets=True, **fields)
        return stream

    whole, after = started(), [0]
    tickets: list[tuple[int, str]] = []
    for number, message in enumerate(messages):
        whole.send(number, message)
        whole.answer_all()
        after.append(len(whole.chunks))
        whole.execute(whole.session.receive_state(b"1234"))
        tickets += [(said["seq"], said["ticket"]) for said in whole.sent if said["type"] == "ticket"]
        whole.sent.clear()
    if sum(sizes) > rate_hz // 8:
        assert tickets
    for covered, ticket in tickets:
        again = started(ticket=ticket)
        assert again.restored == [b"1234"]
        assert again.sent[0]["next"] == covered + 1
        for number in range(covered + 1, len(messages)):
            again.send(number, messages[number])
        expected = whole.chunks[after[covered + 1] :]
        assert [chunk[1:] for chunk in again.chunks] == [chunk[1:] for chunk in expected]
        pairs = zip(again.chunks, expected, strict=True)
        for found_T, expected_T in ((np.frombuffer(a[0], np.int16), np.frombuffer(b[0], np.int16)) for a, b in pairs):
            assert np.abs(found_T.astype(np.int32) - expected_T).max(initial=0) <= 1

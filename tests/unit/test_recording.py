"""A whole recording by POST: how it is cut into chunks, and how long it may be."""

import io
import wave
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.core.application import Application, describe
from penstock.core.errors import InvalidInput, Overloaded, UnsupportedContent
from penstock.core.spec import TensorSpec
from penstock.core.speech.sound import sound_decoder
from penstock.core.streams.live import WAV, Live
from penstock.serve.exchange.request import Head, Request
from penstock.serve.http.recording import PIECE_BYTES, RecordingCall, chunks_of
from penstock.serve.streams.actions import PushChunk

RAW = "application/octet-stream"
SOUND = TensorSpec(dtype="int16", shape=(320,), meaning="sound", name="sound")
WIDE = TensorSpec(dtype="float32", shape=(5, 2), meaning="two sensors", labels=("x", "y"), name="wide")


def cut(chunks: Iterator[PushChunk], spec: TensorSpec) -> tuple[bytes, list[int]]:
    found = list(chunks)
    assert [chunk.last for chunk in found] == [False] * (len(found) - 1) + [True]
    size = spec.nbytes // spec.shape[0]
    assert all(len(chunk.samples) == chunk.frames * size for chunk in found)
    return b"".join(chunk.samples for chunk in found), [chunk.frames for chunk in found]


@pytest.mark.parametrize("frames", [0, 1, 319, 320, 321, 640, 3 * PIECE_BYTES // 2, PIECE_BYTES // 2 // 320 * 320])
def test_a_recording_is_cut_into_whole_chunks(frames: int) -> None:
    sound = np.random.default_rng(1).integers(-30_000, 30_000, frames).astype("<i2").tobytes()
    for decoder in (None, sound_decoder("raw", None, 16_000)):
        body, sizes = cut(chunks_of(decoder, sound, SOUND), SOUND)
        assert body == sound
        assert set(sizes[:-1]) <= {320}
        assert 0 < sizes[-1] <= 320 or frames == 0


def test_frames_of_several_numbers_are_cut_between_them() -> None:
    values = np.arange(2 * 20_003, dtype="<f4")
    body, sizes = cut(chunks_of(None, values.tobytes(), WIDE), WIDE)
    assert body == values.tobytes()
    assert sizes == [5] * 4000 + [3]
    with pytest.raises(InvalidInput, match="whole frames of 8"):
        list(chunks_of(None, values.tobytes()[:-4], WIDE))
    values[30_000] = np.nan
    with pytest.raises(InvalidInput, match="NaN"):
        list(chunks_of(None, values.tobytes(), WIDE))


def wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8_000)
        out.writeframes(bytes(640))
    return file.getvalue()


@pytest.mark.parametrize(("spec", "told"), [(SOUND, [*WAV, RAW]), (WIDE, [RAW])])
def test_the_content_types_that_are_told_are_those_that_are_taken(spec: TensorSpec, told: list[str]) -> None:
    live = Live(rate_hz=8_000)
    application = Application(
        name="hark", input=replace(spec, name="sound"), output=WIDE, model=":net", live=live, chunks=4
    )
    assert describe(application)["accepts"] == told

    def admit_stream(make: object, budget_ns: int) -> None:
        raise Overloaded("It would have been heard.")

    streams = SimpleNamespace(admit_stream=admit_stream, budget_ns=1)
    served = SimpleNamespace(name="hark", streams=streams, application=application, reject_lost=lambda: None)
    for content_type in (*WAV, RAW, "application/json", "audio/mpeg"):
        body = wav() if content_type in WAV else bytes(640)
        head = Head("POST", "/", {"content-type": content_type})
        with pytest.raises(Overloaded if content_type in told else UnsupportedContent):
            RecordingCall(cast(Any, served), head).handle(Request(head, body), lambda response: None)

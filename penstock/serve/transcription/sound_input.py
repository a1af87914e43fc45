"""The sound of one client as chunks of the network, for protocols whose messages have no numbers."""

from typing import final

import numpy as np

from penstock.core.application import Application
from penstock.core.errors import TooLarge
from penstock.core.speech.sound import PcmDecoder, Samples, WavDecoder, frame_bytes_of
from penstock.serve.streams.actions import PushChunk

# Of sound that one message may have, in seconds, and of bytes.
MAX_MESSAGE_S = 10.0
MAX_MESSAGE_BYTES = 1 << 20


@final
class SoundInput:
    """Makes chunks of sound that comes in pieces of any size.

    Args:
        application: A live application of sound.
        encoding: One of `penstock.core.speech.sound.ENCODINGS`.
        rate_hz: Of the client's sound; None for that of a WAV's header.
        channels: Channels of the client's sound, which are averaged.

    Attributes:
        frames_in: Frames of the client's sound that came.

    Raises:
        InvalidInput: The rate is out of range.
    """

    def __init__(self, application: Application, encoding: str, rate_hz: float | None, channels: int = 1) -> None:
        live, spec = application.live, application.input_tensor
        assert live is not None, application
        self._chunk_frames = spec.shape[0]
        self._decoder: PcmDecoder | WavDecoder | None = None
        self._frame_bytes = 1
        if encoding == "wav":
            self._decoder = WavDecoder(rate_hz, live.rate_hz, MAX_MESSAGE_S)
        else:
            assert rate_hz is not None, encoding
            self._frame_bytes = frame_bytes_of(encoding) * channels
            if encoding != "pcm_s16le" or rate_hz != live.rate_hz or channels != 1:
                self._decoder = PcmDecoder(encoding, rate_hz, live.rate_hz, MAX_MESSAGE_S, channels)
        self._max_frames = MAX_MESSAGE_S * live.rate_hz
        self._rest = b""  # an incomplete frame
        self._plain_frames = 0
        self._held: Samples = np.zeros(0, np.int16)

    @property
    def frames_in(self) -> int:
        """Frames of the client's sound that came."""
        return self._plain_frames if self._decoder is None else self._decoder.frames_in

    def feed(self, piece: bytes) -> list[PushChunk]:
        """Make the chunks of the next piece.

        Raises:
            InvalidInput: It is not of the encoding.
            TooLarge: It has more sound than one message may have.
        """
        if self._rest:
            piece, self._rest = self._rest + piece, b""
        over = len(piece) % self._frame_bytes
        if over:
            piece, self._rest = piece[:-over], piece[-over:]
        if self._decoder is not None:
            return self._decoded(self._decoder, piece)
        frames = len(piece) // 2
        if frames > self._max_frames:
            raise TooLarge(f"A message has {frames:,} frames; at most {self._max_frames:,.0f} are taken. Split it.")
        self._plain_frames += frames
        return self._chunks(memoryview(piece), frames)

    def flush(self) -> list[PushChunk]:
        """Make the chunks of all that is held back; the network begins anew after the last of them."""
        rest_T = self._with_held(None if self._decoder is None else self._decoder.restart())
        *chunks, last = self._chunks(memoryview(rest_T.tobytes()), rest_T.size, always=True)
        return [*chunks, PushChunk(last.samples, last.frames, last=False, resets=True)]

    def end(self) -> list[PushChunk]:
        """Make the chunks of all that is held back; the stream ends with the last of them."""
        rest_T = self._with_held(None if self._decoder is None else self._decoder.flush(cut_short=True))
        *chunks, last = self._chunks(memoryview(rest_T.tobytes()), rest_T.size, always=True)
        return [*chunks, PushChunk(last.samples, last.frames, last=True)]

    def _with_held(self, decoded_T: Samples | None) -> Samples:
        rest_T, self._held = self._held, self._held[:0]
        return rest_T if decoded_T is None else np.concatenate([rest_T, decoded_T])

    def _decoded(self, decoder: PcmDecoder | WavDecoder, piece: bytes) -> list[PushChunk]:
        sound_T = decoder.feed(piece)
        if self._held.size:
            sound_T, self._held = np.concatenate([self._held, sound_T]), self._held[:0]
        over = sound_T.size % self._chunk_frames
        if decoder.blocks and over and sound_T.size > over:
            # A resampler gives blocks of its own length; the rest of one goes with the next, in one chunk.
            sound_T, self._held = sound_T[:-over], sound_T[-over:]
        return self._chunks(memoryview(sound_T.tobytes()), sound_T.size)

    def _chunks(self, samples: memoryview, frames: int, *, always: bool = False) -> list[PushChunk]:
        longest = self._chunk_frames
        return [
            PushChunk(samples[at * 2 : (at + longest) * 2], min(longest, frames - at), last=False)
            for at in range(0, max(frames, always), longest)
        ]

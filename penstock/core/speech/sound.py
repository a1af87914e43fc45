"""Decode a client's sound piece by piece into 16-bit samples at the application's rate.

The samples do not depend on how the bytes are split into pieces. Samples held back by the resampler follow at the end.
"""

import math
import struct
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import InvalidInput, TooLarge
from penstock.core.speech.resumable_resampler import ResumableResampler

# T frames (samples) of a piece

Samples = npt.NDArray[np.int16]

ENCODINGS = ("pcm_s16le", "pcm_f32le", "mulaw", "wav", "raw")
# The range of microphones and telephones.
MIN_RATE_HZ, MAX_RATE_HZ = 1_000, 384_000
# soxr's low quality keeps aliases below 16 bits, and has the shortest blocks.
QUALITY = "LQ"
_FULL_SCALE = 32_768.0
# Before a WAV's samples; some writers put pictures there.
MAX_HEADER_BYTES = 1 << 16
_UNKNOWN_SIZES = (0, 0xFFFFFFFF)  # written by programs that stream a WAV


def _mulaw_table() -> Samples:
    # ITU-T G.711, as 16-bit samples.
    code = ~np.arange(256, dtype=np.uint8)
    exponent, mantissa = (code >> 4 & 7).astype(np.int32), (code & 15).astype(np.int32)
    magnitude = ((mantissa << 3) + 132 << exponent) - 132
    return np.where(code & 128, -magnitude, magnitude).astype(np.int16)


_MULAW = _mulaw_table()


def sound_decoder(
    encoding: str, rate_hz: float | None, target_hz: float, max_piece_s: float = math.inf
) -> "SoundDecoder":
    """Make a decoder for a client's sound.

    Args:
        encoding: One of `ENCODINGS`.
        rate_hz: Rate of the client's sound; by default the application's, or that of the WAV's header.
        target_hz: The application's rate.
        max_piece_s: Longest piece in seconds of sound.

    Raises:
        InvalidInput: The rate is out of range.
    """
    if encoding == "wav":
        return WavDecoder(rate_hz, target_hz, max_piece_s)
    return PcmDecoder(encoding, rate_hz or target_hz, target_hz, max_piece_s)


def frame_bytes_of(encoding: str) -> int:
    """Bytes of one sample; for a WAV, of the widest format."""
    return {"mulaw": 1, "pcm_s16le": 2, "raw": 2, "pcm_f32le": 4, "wav": 8}[encoding]


@final
class PcmDecoder:
    """Decode one client's samples of a known encoding.

    Attributes:
        rate_hz: Rate of the incoming sound; for a WAV, None until its header is read.
        frames_in: Frames received.
        blocks: Whether frames are returned in other portions than they were received.
    """

    def __init__(self, encoding: str, rate_hz: float, target_hz: float, max_piece_s: float, channels: int = 1) -> None:
        self.rate_hz = rate_hz
        self.frames_in = 0
        self._encoding = encoding
        self._channels = channels
        self._max_frames = math.ceil(rate_hz * max_piece_s) if math.isfinite(max_piece_s) else math.inf
        self._frame_bytes = frame_bytes_of(encoding) * channels
        self._target_hz = target_hz
        self._resampler = None if rate_hz == target_hz else resampler(rate_hz, target_hz)
        self.blocks = self._resampler is not None

    def feed(self, piece: bytes | memoryview) -> Samples:
        """Decode the next piece.

        Raises:
            InvalidInput: It does not match the encoding.
            TooLarge: The piece is too long.
        """
        if len(piece) % self._frame_bytes:
            raise InvalidInput(
                f"A message has {len(piece):,} bytes of samples; {self._encoding} takes {self._frame_bytes} a frame."
            )
        frames = len(piece) // self._frame_bytes
        if frames > self._max_frames:
            raise TooLarge(f"A message has {frames:,} frames; at most {self._max_frames:,} are taken. Split it.")
        self.frames_in += frames
        if self._encoding == "pcm_f32le":
            sound_T = np.frombuffer(piece, "<f4")
            if not np.isfinite(sound_T).all():
                raise InvalidInput("A message holds NaN or infinity; every sample must be finite.")
            sound_T = np.clip(sound_T, -1, 1)
            mono_T = sound_T if self._channels == 1 else sound_T.reshape(-1, 2).mean(1, dtype=np.float32)
            return _samples(mono_T if self._resampler is None else self._resampled(mono_T, False))
        whole = _MULAW[np.frombuffer(piece, np.uint8)] if self._encoding == "mulaw" else np.frombuffer(piece, "<i2")
        if self._channels == 2:
            whole = (whole.reshape(-1, 2).sum(1, dtype=np.int32) >> 1).astype(np.int16)
        if self._resampler is None:
            return whole
        return _samples(self._resampled((whole / np.float32(_FULL_SCALE)).astype(np.float32), False))

    def make_resumable(self) -> bool:
        """Keep what another decoder needs to go on, before any `feed`; False where none can, because of the rates."""
        if self._resampler is None:
            return True
        resumable = ResumableResampler.of(self._resampler, self.rate_hz, self._target_hz)
        self._resampler = resumable or self._resampler
        return resumable is not None

    def heard(self) -> tuple[bytes, int]:
        """Return what another decoder goes on with, see `ResumableResampler`; nothing where nothing is resampled."""
        return self._resampler.heard() if isinstance(self._resampler, ResumableResampler) else (b"", 0)

    def resume(self, heard: bytes, passed: int) -> None:
        """Go on after what another decoder has decoded; both are resumable."""
        if isinstance(self._resampler, ResumableResampler):
            self._resampler.resume(heard, passed)

    def flush(self, *, cut_short: bool = False) -> Samples:
        """End the signal and return the samples held back.

        Args:
            cut_short: Drop an incomplete last frame of a WAV instead of raising.

        Raises:
            InvalidInput: The signal ends within a frame.
        """
        if self._resampler is None:
            return np.zeros(0, np.int16)
        return _samples(self._resampled(np.zeros(0, np.float32), True))

    def restart(self) -> Samples:
        """Return the samples held back, and begin anew with what follows."""
        rest_T = self.flush()
        if self._resampler is not None:
            self._resampler = resampler(self.rate_hz, self._target_hz)
        return rest_T

    def _resampled(self, sound_T: npt.NDArray[np.float32], last: bool) -> npt.NDArray[np.float32]:
        assert self._resampler is not None
        return self._resampler.resample_chunk(sound_T, last)


@final
class WavDecoder:
    """Decode a RIFF file with its header, split anywhere; methods and attributes are those of `PcmDecoder`."""

    def __init__(self, rate_hz: float | None, target_hz: float, max_piece_s: float) -> None:
        self.rate_hz = rate_hz
        self.blocks = False
        self._target_hz = target_hz
        self._max_piece_s = max_piece_s
        self._head = bytearray()
        self._at = 12  # where the header's next chunk begins
        self._form: bytes | None = None
        self._rest = b""  # an incomplete frame
        self._left = 0
        self._frame_bytes = 0
        self._inner: PcmDecoder | None = None

    @property
    def frames_in(self) -> int:
        """Frames received."""
        return 0 if self._inner is None else self._inner.frames_in

    def feed(self, piece: bytes | memoryview) -> Samples:
        """See `PcmDecoder.feed`."""
        if self._inner is None:
            self._head += piece
            begin = self._begin()
            if begin is None:
                return np.zeros(0, np.int16)
            piece = bytes(memoryview(self._head)[begin:])
            self._head = bytearray()
        assert self._inner is not None
        piece = self._rest + bytes(piece[: self._left])
        self._left -= len(piece) - len(self._rest)
        whole = len(piece) - len(piece) % self._frame_bytes
        self._rest = piece[whole:]
        return self._inner.feed(piece[:whole])

    def flush(self, *, cut_short: bool = False) -> Samples:
        """See `PcmDecoder.flush`."""
        if self._inner is None:
            if cut_short:
                return np.zeros(0, np.int16)
            raise InvalidInput("The WAV ended before its header did; send it whole.")
        if self._rest and not cut_short:
            raise InvalidInput("The WAV ends within a frame; send it whole.")
        return self._inner.flush()

    def restart(self) -> Samples:
        """See `PcmDecoder.restart`; the header stays, and so does an incomplete frame."""
        return np.zeros(0, np.int16) if self._inner is None else self._inner.restart()

    def _begin(self) -> int | None:
        """Offset of the samples, once the header is complete."""
        head = self._head
        # Garbage is refused by its first bytes, before a whole header has arrived.
        if not b"RIFF".startswith(bytes(head[:4])) or not b"WAVE".startswith(bytes(head[8:12])):
            raise InvalidInput("The stream is no WAV; it does not begin with RIFF and WAVE.")
        while len(head) >= self._at + 8:
            at = self._at
            name, size = bytes(head[at : at + 4]), int.from_bytes(head[at + 4 : at + 8], "little")
            if name == b"data":
                self._inner = self._of_format()
                self._left = 1 << 62 if size in _UNKNOWN_SIZES else size
                return at + 8
            if at + 8 + size > MAX_HEADER_BYTES:
                raise InvalidInput(f"The WAV has no samples within its first {MAX_HEADER_BYTES:,} bytes.")
            if len(head) < at + 8 + size:
                return None
            if name == b"fmt ":
                self._form = bytes(head[at + 8 : at + 8 + size])
            self._at += 8 + size + size % 2
        return None

    def _of_format(self) -> PcmDecoder:
        form = self._form
        if form is None:
            raise InvalidInput("The WAV has no 'fmt ' chunk before its samples.")
        if len(form) < 16:
            raise InvalidInput(f"The WAV's 'fmt ' chunk has {len(form)} bytes; it takes 16 at least.")
        kind, channels, rate_hz, _, _, bits = struct.unpack_from("<HHIIHH", form)
        if kind == 0xFFFE and len(form) >= 26:
            kind = int.from_bytes(form[24:26], "little")
        encoding = {(1, 16): "pcm_s16le", (3, 32): "pcm_f32le", (7, 8): "mulaw"}.get((kind, bits))
        if encoding is None:
            raise InvalidInput(f"The WAV has format {kind} of {bits} bits; send PCM of 16, floats of 32, or mu-law.")
        if channels not in (1, 2):
            raise InvalidInput(f"The WAV has {channels} channels; send 1 or 2.")
        if self.rate_hz not in (None, rate_hz):
            raise InvalidInput(f"The WAV has {rate_hz:,} Hz, the start message {self.rate_hz:g}; leave rate_hz out.")
        if rate_hz != self._target_hz and not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
            raise InvalidInput(f"The WAV has {rate_hz:,} Hz; send {MIN_RATE_HZ:,} to {MAX_RATE_HZ:,}.")
        inner = PcmDecoder(encoding, rate_hz, self._target_hz, self._max_piece_s, channels)
        self.rate_hz, self.blocks = rate_hz, inner.blocks
        self._frame_bytes = frame_bytes_of(encoding) * channels
        return inner


SoundDecoder: TypeAlias = PcmDecoder | WavDecoder


def resampler(rate_hz: float, target_hz: float) -> Any:
    """Make a soxr resampler.

    Raises:
        InvalidInput: The rate is out of range.
    """
    if not (math.isfinite(rate_hz) and MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ):
        raise InvalidInput(f"rate_hz is {rate_hz:g}; it must be from {MIN_RATE_HZ:,} to {MAX_RATE_HZ:,}.")
    # Imported only where it is needed.
    import soxr

    return soxr.ResampleStream(rate_hz, target_hz, 1, dtype="float32", quality=QUALITY)


def _samples(sound_T: npt.NDArray[np.float32]) -> Samples:
    return np.clip(np.rint(sound_T * np.float32(_FULL_SCALE)), -_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16)

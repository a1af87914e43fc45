"""Chunks of sound for live packs, from a WAV or an ALSA microphone; decoded and resampled as on the server."""

import errno
import math
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import av
import av.error
import av.logging
import numpy as np

from penstock.core.errors import PenstockError, SourceError
from penstock.core.spec import Array
from penstock.core.speech.sound import Samples, sound_decoder
from penstock.device.source import DecodeFailures, Source, SourceItem

# T samples of a chunk

PIECE_BYTES = 1 << 15
# Sound keeps its order; where the network is too slow, the oldest is dropped after so long.
MAX_WAITING_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundChunk(SourceItem):
    """One chunk of a signal, of the network's chunk length; the last one may be shorter, or empty.

    Args:
        samples_T: 16-bit samples at the pack's rate, or the frames `[T, ...]` of another signal.
        last: Whether the signal ends with it.
    """

    samples_T: Array
    last: bool


class SoundSource(Source[SoundChunk]):
    """A source of sound. Damaged sound is a SourceError, so `failures` stays empty.

    Args:
        name: For messages.
        rate_hz: The pack's rate.
        chunk: Samples of a whole chunk.
    """

    def __init__(self, name: str, rate_hz: float, chunk: int) -> None:
        self.name = name
        self.failures = DecodeFailures()
        self._rate_hz = rate_hz
        self._chunk = chunk

    @abstractmethod
    def samples(self) -> Iterator[Samples]:
        """Samples at the pack's rate, in pieces of any length.

        Raises:
            SourceError: The source failed.
        """

    def items(self) -> Iterator[SoundChunk]:
        """Chunks in order; the last one ends the signal."""
        waiting_T = np.zeros(0, np.int16)
        number = 0
        for piece_T in self.samples():
            waiting_T = np.concatenate((waiting_T, piece_T))
            while len(waiting_T) >= self._chunk:
                yield self._cut(number, waiting_T[: self._chunk], last=False)
                waiting_T, number = waiting_T[self._chunk :], number + 1
        yield self._cut(number, waiting_T, last=True)

    def _cut(self, number: int, samples_T: Samples, *, last: bool) -> SoundChunk:
        time_s = (number * self._chunk + len(samples_T)) / self._rate_hz
        return SoundChunk(number=number, time_s=time_s, samples_T=samples_T, last=last)


@final
class WavSource(SoundSource):
    """A WAV file: 16-bit PCM, 32-bit floats or mu-law; two channels are averaged.

    Args:
        file: The file; None for the standard input, written by another program as it records.
        rate_hz: The pack's rate.
        chunk: Samples of a whole chunk.

    Raises:
        SourceError: It cannot be read.
    """

    recorded = True

    def __init__(self, file: Path | None, rate_hz: float, chunk: int) -> None:
        super().__init__("the standard input" if file is None else str(file), rate_hz, chunk)
        self._owned = file is not None
        try:
            self._file: BinaryIO = sys.stdin.buffer if file is None else file.open("rb")
        except OSError as error:
            raise SourceError(f"{file} cannot be read ({error.strerror}).") from None
        # A pipe returns what it holds instead of waiting for a full piece.
        self._read: Callable[[int], bytes] = getattr(self._file, "read1", self._file.read)
        self._decoder = sound_decoder("wav", None, rate_hz)

    def samples(self) -> Iterator[Samples]:
        """Samples at the pack's rate."""
        try:
            while piece := self._read(PIECE_BYTES):
                yield self._decoder.feed(piece)
            yield self._decoder.flush()
        except PenstockError as error:
            raise SourceError(f"{self.name} cannot be decoded: {error}") from None
        except OSError as error:
            raise SourceError(f"{self.name} cannot be read on ({error.strerror}).") from None

    def close(self) -> None:
        """Close the file."""
        if self._owned:
            self._file.close()


@final
class MicrophoneSource(SoundSource):
    """An ALSA microphone.

    Args:
        device: ALSA's device name: `default`, `hw:1`.
        rate_hz: The pack's rate.
        chunk: Samples of a whole chunk.

    Raises:
        SourceError: It does not exist, or is in use.
    """

    recorded = False

    def __init__(self, device: str, rate_hz: float, chunk: int) -> None:
        super().__init__(f"microphone {device}", rate_hz, chunk)
        av.logging.set_level(None)
        try:
            with _stderr_silenced():
                self._container = av.open(device, format="alsa")
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise SourceError(_no_microphone(self.name, error)) from None
        self._decoder = sound_decoder("pcm_s16le", float(self._container.streams.audio[0].rate), rate_hz)

    def samples(self) -> Iterator[Samples]:
        """Samples as they come, until the microphone is unplugged."""
        try:
            for frame in self._container.decode(audio=0):
                yield self._decoder.feed(_mono(frame.to_ndarray(), frame.layout.nb_channels).tobytes())
        except (av.error.FFmpegError, OSError) as error:
            raise SourceError(f"{self.name} stopped ({error.strerror}); is it still plugged in?") from None
        yield self._decoder.flush()

    def close(self) -> None:
        """Release the device."""
        self._container.close()


def max_waiting_chunks(rate_hz: float, chunk: int) -> int:
    """Chunks that may wait for the network."""
    return max(math.ceil(MAX_WAITING_S * rate_hz / chunk), 2)


@contextmanager
def _stderr_silenced() -> Generator[None]:
    # ALSA prints every failure to the terminal, and has no option against it.
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(devnull)


def _mono(packed: Any, channels: int) -> Samples:
    samples_TC = np.asarray(packed, np.int16).reshape(-1, channels)
    # Averaged as on the server.
    return (samples_TC.sum(1, dtype=np.int32) // channels).astype("<i2")


def _no_microphone(name: str, error: Exception) -> str:
    code = getattr(error, "errno", None)
    if code == errno.EBUSY:
        return f"{name} is in use by another program; close that one, or name another: --source mic:hw:1."
    if code == errno.EACCES:
        return f"{name} may not be used by this user; join the group 'audio' and log in again."
    cause = (getattr(error, "strerror", None) or str(error)).rstrip(".")
    return f"there is no {name} ({cause}); plug one in, or name another: --source mic:hw:1 ('arecord -l' lists them)."

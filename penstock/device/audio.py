"""Chunks of sound for live packs: a WAV, or a microphone by ALSA; decoded and resampled as the server does."""

import errno
import math
import os
import sys
from abc import ABC, abstractmethod
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
from penstock.core.sound import Decoder, Samples, decoder_of
from penstock.device.frames import Broken

# T samples of a chunk

PIECE_BYTES = 1 << 15
# Sound keeps its order; what the network does not catch up with is let go after so long.
MOST_WAITING_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of a signal, as long as the network takes; the last one may be shorter, or empty.

    Args:
        number: How many came before it.
        time_s: When its last sample was, in seconds from the first.
        samples_T: 16-bit samples at the pack's rate.
        last: Whether the signal ends with it.
        taken_s: When it came or was due, in seconds on the clock of the run.
    """

    number: int
    time_s: float
    samples_T: Samples
    last: bool
    taken_s: float = 0.0


class Sound(ABC):
    """Where sound comes from.

    Args:
        name: For people.
        rate_hz: The pack's.
        chunk: Samples of a whole chunk.

    Attributes:
        recorded: Whether it is there before its time is, so that it is to be played at its pace.
        broken: Nothing: sound that is damaged ends.
    """

    recorded: bool

    def __init__(self, name: str, rate_hz: float, chunk: int) -> None:
        self.name = name
        self.broken = Broken()
        self._rate_hz = rate_hz
        self._chunk = chunk

    @abstractmethod
    def samples(self) -> Iterator[Samples]:
        """Its samples at the pack's rate, in pieces of any length.

        Raises:
            SourceError: It broke.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the device or file."""

    def chunks(self) -> Iterator[Chunk]:
        """Its chunks; the last one ends the signal.

        Raises:
            SourceError: It broke.
        """
        waiting_T = np.zeros(0, np.int16)
        number = 0
        for piece_T in self.samples():
            waiting_T = np.concatenate((waiting_T, piece_T))
            while len(waiting_T) >= self._chunk:
                yield self._cut(number, waiting_T[: self._chunk], last=False)
                waiting_T, number = waiting_T[self._chunk :], number + 1
        yield self._cut(number, waiting_T, last=True)

    def _cut(self, number: int, samples_T: Samples, *, last: bool) -> Chunk:
        time_s = (number * self._chunk + len(samples_T)) / self._rate_hz
        return Chunk(number=number, time_s=time_s, samples_T=samples_T, last=last)


@final
class Wav(Sound):
    """A WAV: PCM of 16 bits, floats of 32 or mu-law; one channel, or two that are averaged.

    Args:
        file: Of it; None for what another program writes to the standard input as it is heard.
        rate_hz: The pack's.
        chunk: Samples of a whole chunk.

    Raises:
        SourceError: It cannot be read.
    """

    recorded = True

    def __init__(self, file: Path | None, rate_hz: float, chunk: int) -> None:
        super().__init__("the standard input" if file is None else str(file), rate_hz, chunk)
        self._mine = file is not None
        try:
            self._file: BinaryIO = sys.stdin.buffer if file is None else file.open("rb")
        except OSError as error:
            raise SourceError(f"{file} cannot be read ({error.strerror}).") from None
        # A pipe gives what is there instead of waiting for all that was asked for.
        self._read: Callable[[int], bytes] = getattr(self._file, "read1", self._file.read)
        self._decoder: Decoder = decoder_of("wav", None, rate_hz)

    def samples(self) -> Iterator[Samples]:
        """Its samples at the pack's rate."""
        try:
            while piece := self._read(PIECE_BYTES):
                yield self._decoder.feed(piece)
            yield self._decoder.flush()
        except PenstockError as error:
            raise SourceError(f"{self.name} cannot be heard: {error}") from None
        except OSError as error:
            raise SourceError(f"{self.name} cannot be read on ({error.strerror}).") from None

    def close(self) -> None:
        """Close the file."""
        if self._mine:
            self._file.close()


@final
class Microphone(Sound):
    """A microphone, by ALSA.

    Args:
        device: ALSA's name: `default`, `hw:1`.
        rate_hz: The pack's.
        chunk: Samples of a whole chunk.

    Raises:
        SourceError: There is none, or it is in use.
    """

    recorded = False

    def __init__(self, device: str, rate_hz: float, chunk: int) -> None:
        super().__init__(f"microphone {device}", rate_hz, chunk)
        av.logging.set_level(None)
        try:
            with _silent():
                self._container = av.open(device, format="alsa")
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise SourceError(_no_microphone(self.name, error)) from None
        self._decoder = decoder_of("pcm_s16le", float(self._container.streams.audio[0].rate), rate_hz)

    def samples(self) -> Iterator[Samples]:
        """What it hears, as it comes, until it is unplugged."""
        try:
            for frame in self._container.decode(audio=0):
                yield self._decoder.feed(_mono(frame.to_ndarray(), frame.layout.nb_channels).tobytes())
        except (av.error.FFmpegError, OSError) as error:
            raise SourceError(f"{self.name} stopped ({error.strerror}); is it still plugged in?") from None
        yield self._decoder.flush()

    def close(self) -> None:
        """Let go of the device."""
        self._container.close()


def sound_of(source: str, rate_hz: float, chunk: int) -> Sound:
    """A WAV file, the WAV on the standard input (`-`), or a microphone: `mic`, `mic:hw:1`.

    Raises:
        SourceError: It cannot be opened.
    """
    word, _, device = source.partition(":")
    if word == "mic":
        return Microphone(device or "default", rate_hz, chunk)
    return Wav(None if source == "-" else Path(source).expanduser(), rate_hz, chunk)


def waiting_chunks(rate_hz: float, chunk: int) -> int:
    """How many chunks may wait for the network."""
    return max(math.ceil(MOST_WAITING_S * rate_hz / chunk), 2)


@contextmanager
def _silent() -> Generator[None]:
    # ALSA tells the terminal what went wrong, line by line, and offers no way to ask it not to.
    said, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(said, 2)
        os.close(said)
        os.close(nowhere)


def _mono(packed: Any, channels: int) -> Samples:
    samples_TC = np.asarray(packed, np.int16).reshape(-1, channels)
    # As the server makes one channel of two.
    return (samples_TC.sum(1, dtype=np.int32) // channels).astype("<i2")


def _no_microphone(name: str, error: Exception) -> str:
    code = getattr(error, "errno", None)
    if code == errno.EBUSY:
        return f"{name} is in use by another program; close that one, or name another: --source mic:hw:1."
    if code == errno.EACCES:
        return f"{name} may not be used by this user; join the group 'audio' and log in again."
    said = (getattr(error, "strerror", None) or str(error)).rstrip(".")
    return f"there is no {name} ({said}); plug one in, or name another: --source mic:hw:1 ('arecord -l' lists them)."

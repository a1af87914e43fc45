"""The common interface of cameras, videos, pictures and sound."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock.core.spec import Array

# A camera with a bad cable may run for days.
MAX_SENTENCES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceItem:
    """A frame, or a chunk of sound.

    Args:
        number: Index in the source.
        time_s: Time on the source's clock, in seconds from its first frame: of a chunk, that of its last sample.
        captured_s: Time at which it was due or arrived, on the clock of the run.
    """

    number: int
    time_s: float
    captured_s: float = 0.0


T = TypeVar("T", bound=SourceItem)


@dataclass(kw_only=True, slots=True)
class DecodeFailures:
    """Items of a source that could not be decoded.

    Args:
        count: Number of items.
        sentences: The first of them, each with its reason.
    """

    count: int = 0
    sentences: list[str] = field(default_factory=list[str])

    def add(self, sentence: str) -> None:
        """Record one more."""
        self.count += 1
        if len(self.sentences) < MAX_SENTENCES:
            self.sentences.append(sentence)


class Source(ABC, Generic[T]):
    """A device, file or stream that is read item by item.

    Attributes:
        name: For messages.
        recorded: The items exist ahead of their time, so they are played back in real time.
        failures: Items that could not be decoded.
    """

    name: str
    recorded: bool
    failures: DecodeFailures

    @abstractmethod
    def items(self) -> Iterator[T]:
        """Every item in order, once.

        Raises:
            SourceError: The source failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the device or file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame(SourceItem):
    """One picture of a source.

    Args:
        read: Returns the pixels, uint8 RGBA `[H, W, 4]`; frames that are dropped are never converted.
        name: File name, in a folder of pictures.
    """

    read: Callable[[], Array]
    name: str = ""


class FrameSource(Source[Frame]):
    """A source of pictures.

    Attributes:
        independent: Frames are unrelated, as pictures of a folder are; nothing is smoothed over them.
        rate: Frames per second, where known.
    """

    independent: bool
    rate: float | None

"""What every source of pictures gives, and has."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from penstock.core.spec import Array

# A camera with a bad cable is watched for days.
MOST_NAMED = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One picture of a source.

    Args:
        number: How many came before it.
        time_s: When it was, on the source's own clock, in seconds from its first frame.
        read: Gives its pixels, uint8 RGBA `[H, W, 4]`; only frames that are looked at are converted.
        name: Of the file, in a folder of pictures.
        taken_s: When it came or was due, in seconds on the clock of the run.
    """

    number: int
    time_s: float
    read: Callable[[], Array]
    name: str = ""
    taken_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class Broken:
    """What of a source could not be decoded.

    Args:
        count: How much.
        named: The first of it, each with its reason.
    """

    count: int = 0
    named: list[str] = field(default_factory=list[str])

    def add(self, what: str) -> None:
        """One more."""
        self.count += 1
        if len(self.named) < MOST_NAMED:
            self.named.append(what)


class Source(ABC):
    """Where frames come from.

    Attributes:
        name: For people.
        recorded: Whether frames are there before their time is, so that they are to be played at their pace.
        apart: Whether frames have nothing to do with one another: pictures of a folder.
        rate: Frames a second, where it is known.
        broken: What could not be decoded.
    """

    name: str
    recorded: bool
    apart: bool
    rate: float | None
    broken: Broken

    @abstractmethod
    def frames(self) -> Iterator[Frame]:
        """Every frame in its order, once.

        Raises:
            SourceError: The source broke.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the device or file."""

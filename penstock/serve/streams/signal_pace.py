"""Chunks of a live stream that came faster than its signal. No clock."""

from dataclasses import dataclass, field
from typing import final

# What a network between client and server holds up comes at once; so much of the signal may.
AHEAD_NS = 200_000_000


@final
@dataclass(slots=True)
class SignalPace:
    """Counts the chunks of a stream against the time that they last.

    Args:
        chunk_ns: Duration of a chunk, in nanoseconds.
        now_ns: When the stream began.
    """

    chunk_ns: float
    now_ns: int
    _chunks: int = field(default=0, init=False)
    _allowed: float = field(init=False)

    def __post_init__(self) -> None:
        self._allowed = self._most

    @property
    def _most(self) -> float:
        return 1 + AHEAD_NS / self.chunk_ns

    def ahead(self, chunks: int, now_ns: int) -> int:
        """Return how many chunks came faster than the signal since the last call.

        Args:
            chunks: Chunks of the stream so far.
            now_ns: The time.
        """
        self._allowed = min(self._most, self._allowed + (now_ns - self.now_ns) / self.chunk_ns)
        came, self._chunks, self.now_ns = chunks - self._chunks, chunks, now_ns
        counted = min(came, int(self._allowed))
        self._allowed -= counted
        return came - counted

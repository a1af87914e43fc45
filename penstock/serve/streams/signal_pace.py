"""Chunks of a live stream that came faster than its signal. No clock."""

from dataclasses import dataclass, field
from typing import final

# What a network between client and server holds up comes at once; so much of the signal may.
AHEAD_NS = 200_000_000


@final
@dataclass(slots=True)
class SignalPace:
    """Compares the chunks of a stream's turns with the time that they last.

    Args:
        chunk_ns: Duration of a chunk, in nanoseconds.
        now_ns: When the stream began.
    """

    chunk_ns: float
    now_ns: int
    _allowed: float = field(init=False)

    def __post_init__(self) -> None:
        self._allowed = self._most

    @property
    def _most(self) -> float:
        return 1 + AHEAD_NS / self.chunk_ns

    def ahead(self, chunks: int, since_ns: int, now_ns: int) -> int:
        """Return how many chunks of a turn came faster than the signal.

        Chunks that are taken between turns are not counted: nobody had to wait for them.

        Args:
            chunks: Chunks that were taken in the turn.
            since_ns: When the stream began to wait for its turn. What came meanwhile in real time is not ahead, however
                long it had to wait.
            now_ns: The time.
        """
        allowed = min(self._most, self._allowed + max(0, since_ns - self.now_ns) / self.chunk_ns)
        allowed += (now_ns - since_ns) / self.chunk_ns
        counted = min(chunks, int(allowed))
        self._allowed, self.now_ns = min(self._most, allowed - counted), now_ns
        return chunks - counted

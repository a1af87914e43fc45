"""The chunks of a live stream, as the network takes them, kept so that another engine can go on with the stream.

The chunks since the network's state was last clear, or was read, are copied into blocks of a second of the signal. They
are no Python objects of their own, which the garbage collector would visit: a front-end holds thousands of streams.
"""

import math
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, final

from penstock.serve.exchange.request_bounds import RequestBounds

# Of a process's budget for connections and unfinished requests, all rings together take so much at most.
SHARE = 0.5
# Bytes of a block beside each chunk, so that the lengths of tiny chunks, which lie elsewhere, are counted too.
BESIDE = 8


@final
@dataclass(slots=True)
class ReplayMemory:
    """Memory of all rings of one front-end, which counts in the budget of its connections and requests.

    Args:
        bounds: That budget.

    Attributes:
        held_bytes: Bytes of all rings.
    """

    bounds: RequestBounds
    held_bytes: int = field(default=0, init=False)

    def take(self, count: int) -> bool:
        """Take so many bytes; False if there is no room for them."""
        bounds = self.bounds
        if self.held_bytes + count > SHARE * bounds.max_bytes or bounds.held_bytes + count > bounds.max_bytes:
            return False
        self.held_bytes += count
        bounds.held_bytes += count
        return True

    def give(self, count: int) -> None:
        """Give bytes back."""
        self.held_bytes -= count
        self.bounds.held_bytes -= count


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Limits of replays.

    Args:
        memory: Memory of all rings.
        ring_s: Signal that one ring holds, in seconds.
        wait_s: Time that a stream waits for an engine after its own has died, in seconds.
    """

    memory: ReplayMemory
    ring_s: float
    wait_s: float


class KeptChunk(NamedTuple):
    """A chunk in a ring.

    Args:
        samples: Its frames.
        frames: Their number.
        last: Whether the stream ends with it.
        resets: Whether the network's state is clear after it, where more follow.
    """

    samples: memoryview
    frames: int
    last: bool
    resets: bool


class _Segment:
    """The chunks from one state to another, of which both are clear or were wanted.

    Attributes:
        resets: Whether the state is clear after it.
        state: The state before it; None where that is clear, or has not come.
    """

    __slots__ = ("blocks", "frames", "next", "resets", "state")

    def __init__(self) -> None:
        self.blocks: list[memoryview] = []
        self.frames = array("I")
        self.next: _Segment | None = None
        self.resets = False
        self.state: bytes | None = None


@final
class ReplayRing:
    """The chunks of one stream since its state was last clear or read and all results before that were handed out.

    A network of live streams gives one result a chunk where its state is ever cleared.

    Args:
        memory: Memory of all rings.
        frame_bytes: Bytes of a frame.
        block_bytes: Bytes of a block: about a second of the signal, one chunk and `BESIDE` at least.
        max_blocks: Blocks at most.

    Attributes:
        reported: Results that were handed out of the chunks here.
        ended: Whether the last chunk is the stream's last.
        full_memory: Whether a chunk was not taken because `memory` had no room.
    """

    __slots__ = (
        "_add_frames",
        "_at",
        "_block_bytes",
        "_blocks",
        "_current",
        "_dropped",
        "_frame_bytes",
        "_held",
        "_marked",
        "_max_blocks",
        "_memory",
        "_segments",
        "_view",
        "ended",
        "full_memory",
        "reported",
    )

    def __init__(self, memory: ReplayMemory, *, frame_bytes: int, block_bytes: int, max_blocks: int) -> None:
        self._memory, self._frame_bytes, self._block_bytes = memory, frame_bytes, block_bytes
        self._max_blocks = max_blocks
        self._blocks = self._dropped = 0
        self._current = _Segment()
        self._segments = deque([self._current])
        # Begins with a state that was wanted.
        self._marked: _Segment | None = None
        # Of the newest block, and where the next chunk goes.
        self._view, self._at = memoryview(b""), 0
        self._add_frames = self._current.frames.append
        self.reported = 0
        self.ended = self.full_memory = self._held = False

    @classmethod
    def of_signal(cls, limits: ReplayLimits, *, rate_hz: float, frame_bytes: int, chunk_bytes: int) -> "ReplayRing":
        """Make the ring of one stream.

        Args:
            limits: Limits of replays.
            rate_hz: Frames of the signal a second.
            frame_bytes: Bytes of a frame.
            chunk_bytes: Bytes of the longest chunk.
        """
        block_bytes = max(math.ceil(rate_hz) * frame_bytes, chunk_bytes) + BESIDE
        max_blocks = max(1, math.ceil(limits.ring_s * rate_hz * frame_bytes / block_bytes))
        return cls(limits.memory, frame_bytes=frame_bytes, block_bytes=block_bytes, max_blocks=max_blocks)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return sum(len(segment.frames) for segment in self._segments)

    @property
    def total_reported(self) -> int:
        """Results that were handed out since the stream began."""
        return self._dropped + self.reported

    def append(self, samples: bytes | memoryview, frames: int) -> bool:
        """Copy a chunk.

        Args:
            samples: Its frames.
            frames: Their number.

        Returns:
            False if there is no room for it, after which the ring is of no use.
        """
        at, size = self._at, len(samples)
        if at + size + BESIDE > len(self._view):
            if not self._add_block():
                return False
            at = 0
        self._view[at : at + size] = samples
        self._at = at + size + BESIDE
        self._add_frames(frames)
        return True

    def reset(self) -> None:
        """Note that the network's state is clear after the last chunk."""
        self._trim()
        self._current.resets = True
        self._begin_segment()

    def mark(self) -> None:
        """Note that the network's state after the last chunk is wanted: `know` may come."""
        self._begin_segment()
        self._marked = self._current

    def know(self, state: bytes) -> None:
        """Take the state at the last mark: what lies before it is not needed any more once its results are out."""
        marked, self._marked = self._marked, None
        if marked is not None and marked in self._segments and self._memory.take(len(state)):
            marked.state = state
            self._trim()

    def begin_from(self, state: bytes) -> bool:
        """Begin in a state that is not clear, before any chunk; False if there is no room for it."""
        assert not self.chunks, self.chunks
        if not self._memory.take(len(state)):
            self.full_memory = True
            return False
        self._current.state = state
        return True

    @property
    def state(self) -> bytes | None:
        """The state before the first chunk that `begin` reads; None for a clear one."""
        return self._segments[0].state

    def hold(self) -> None:
        """Drop nothing, and take twice as many blocks, until `release`: the chunks will be read, or are being read."""
        self._held = True

    def release(self) -> None:
        """End what `hold` began."""
        self._held = False

    def begin(self) -> Iterator[KeptChunk]:
        """Read the chunks from the first to the last, those that are added meanwhile included; call `hold` before."""
        self._trim_answered()
        return self._read()

    def drop(self) -> None:
        """Give the memory back."""
        for segment in self._segments:
            self._give(segment)
        self._segments.clear()
        self._marked = None

    def _read(self) -> Iterator[KeptChunk]:
        segment: _Segment | None = self._segments[0]
        while segment is not None:
            block = at = index = 0
            # By index, since chunks are added meanwhile.
            while index < len(segment.frames):
                frames = segment.frames[index]
                size = frames * self._frame_bytes
                if at + size + BESIDE > self._block_bytes:
                    block, at = block + 1, 0
                index += 1
                final, newest = index == len(segment.frames), segment.next is None
                samples = segment.blocks[block][at : at + size]
                yield KeptChunk(samples, frames, final and newest and self.ended, final and segment.resets)
                at += size + BESIDE
            segment = segment.next

    def _begin_segment(self) -> None:
        before, self._current = self._current, _Segment()
        before.next = self._current
        self._segments.append(self._current)
        self._view, self._at = memoryview(b""), 0
        self._add_frames = self._current.frames.append

    def _add_block(self) -> bool:
        self._trim()
        if self._blocks >= self._max_blocks * (1 + self._held):
            return False
        if not self._memory.take(self._block_bytes):
            self.full_memory = True
            return False
        self._blocks += 1
        self._view = memoryview(bytearray(self._block_bytes))
        self._current.blocks.append(self._view)
        return True

    def _trim(self) -> None:
        if not self._held:
            self._trim_answered()

    def _trim_answered(self) -> None:
        """Drop what lies before the last state that is clear or known, and whose results were all handed out."""
        drop = results = 0
        for index, (before, segment) in enumerate(pairwise(self._segments), 1):
            results += len(before.frames)
            if results > self.reported:
                break
            if before.resets or segment.state is not None:
                drop = index
        for _ in range(drop):
            segment = self._segments.popleft()
            self.reported -= len(segment.frames)
            self._dropped += len(segment.frames)
            self._give(segment)

    def _give(self, segment: _Segment) -> None:
        self._blocks -= len(segment.blocks)
        self._memory.give(len(segment.blocks) * self._block_bytes + len(segment.state or b""))

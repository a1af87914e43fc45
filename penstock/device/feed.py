"""A source read by a thread of its own into an inbox, so that it is never held up by the network."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, Protocol, Self, TypeVar, cast, final

from penstock.core.errors import SourceError
from penstock.device.inbox import Inbox, Pace, Timed

# How often a wait looks around.
LOOK_S = 0.1
# A source that is left while it reads has so long to come back from it.
LEAVE_S = 1.0


class Piece(Timed, Protocol):
    """What a source gives: a frame, or a chunk of sound."""

    @property
    def time_s(self) -> float:
        """When it is due, on the source's clock."""
        ...


T = TypeVar("T", bound=Piece)


@final
class Feed(Generic[T]):
    """Reads ahead of what is taken, as long as it is entered.

    Args:
        pieces: What the source gives, in its order: frozen records.
        inbox: Where it waits.
        clock: Seconds that only go forward.
        paced: Whether pieces are to come no earlier than their time, as of a recording.
        stall_s: After so many seconds without a piece the source is taken for dead.
        name: Of the source.
        close: Closes the source.
    """

    def __init__(
        self,
        pieces: Iterator[T],
        inbox: Inbox[T],
        *,
        clock: Callable[[], float],
        paced: bool,
        stall_s: float,
        name: str,
        close: Callable[[], object],
    ) -> None:
        self.pace = Pace()
        self._pieces = pieces
        self._inbox = inbox
        self._clock = clock
        self._paced = paced
        self._stall_s = stall_s
        self._name = name
        self._close = close
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._ended = False
        self._error: BaseException | None = None
        # Since when the source is asked for its next piece; None while that waits for its time.
        self._asked_s: float | None = None
        # A read that never returns must not keep the process.
        self._thread = threading.Thread(target=self._run, name="source", daemon=True)

    def __enter__(self) -> Self:
        self._asked_s = self._clock()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop reading, as soon as the source gives its next piece, and close it."""
        self._stopped.set()
        self._thread.join(LEAVE_S)
        # What the thread still reads from must stay: it goes with the process.
        if not self._thread.is_alive():
            self._close()

    def __iter__(self) -> Iterator[T]:
        """What came, until the source ends.

        Raises:
            SourceError: The source broke or stalled.
        """
        while True:
            piece = self._next()
            if piece is None:
                return
            yield piece

    def _next(self) -> T | None:
        while True:
            with self._changed:
                piece = self._inbox.take(self._clock())
                if piece is not None:
                    return piece
                if self._ended:
                    if self._error is not None:
                        raise self._error
                    return None
                asked_s = self._asked_s
                if asked_s is not None and self._clock() - asked_s > self._stall_s:
                    raise SourceError(f"{self._name} gave nothing for {self._stall_s:g} s; it stalled or is gone.")
                self._changed.wait(LOOK_S)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for piece in self._pieces:
                if not self._offer(piece):
                    break
        except BaseException as caught:  # noqa: BLE001 - it is raised again by who takes
            error = caught
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify()

    def _offer(self, piece: T) -> bool:
        now_s = due_s = self._clock()
        if self._paced:
            due_s = self.pace.due_s(piece.time_s, now_s)
            self._asked_s = None
            while (left_s := due_s - self._clock()) > 0:
                if self._stopped.wait(left_s):
                    return False
        with self._changed:
            self._inbox.offer(replace(cast(Any, piece), taken_s=due_s))
            self._asked_s = self._clock()
            self._changed.notify()
        return not self._stopped.is_set()

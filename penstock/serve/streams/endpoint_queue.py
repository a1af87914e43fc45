"""The ends of a stream's utterances: each waits for its better text, and what follows waits behind it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

from penstock.core.errors import RequestError
from penstock.core.speech.endpoint_beam import Redecoded
from penstock.serve.frontend.beam_process import BeamJob, BeamModel, BeamOutcome
from penstock.serve.streams.actions import Action, Redecode, Send


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Limits of what waits for better texts; beyond the numbers, all that waits gets its greedy text at once.

    Args:
        wait_s: Time that the end of an utterance waits; None for the application's.
        actions: Actions that wait; None for any number.
        bytes: Their messages and frames.
    """

    wait_s: float | None = None
    actions: int | None = 256
    bytes: int = 4 << 20


LIVE = QueueLimits()
# Nobody listens, so an end waits longer; and there are no messages, only frames, about as many as the body has.
RECORDING = QueueLimits(wait_s=10.0, actions=None, bytes=32 << 20)


class CountOutcome(Protocol):
    """Counts what became of an utterance."""

    def __call__(self, outcome: BeamOutcome, /) -> None:
        """Count one."""


@final
class EndpointQueue:
    """Actions of one stream that wait for the better text of an utterance, in their order.

    Args:
        beam: The model in the beam process; None where there is none, so that nothing waits.
        execute: Executes an action that is no `Redecode`.
        fail: Ends the stream, where the application's own function failed on the better text.
        count: Counts what became of each utterance.
        limits: Of what waits.
    """

    def __init__(
        self,
        beam: BeamModel | None,
        execute: Callable[[Action], None],
        fail: Callable[[RequestError], None],
        count: CountOutcome,
        limits: QueueLimits = LIVE,
    ) -> None:
        self._beam, self._execute, self._fail, self._count = beam, execute, fail, count
        self._limits = limits
        self._waiting: deque[Action] = deque()
        self._bytes = 0
        self._job: BeamJob | None = None
        self._running = self._settling = False

    @property
    def busy(self) -> bool:
        """True while actions must wait: pass them to `add`."""
        return self._job is not None or (bool(self._waiting) and not self._running)

    def add(self, action: Action) -> None:
        """Execute an action once all before it are."""
        self._waiting.append(action)
        self._bytes += _bytes_of(action)
        if self._running:
            return
        if self._job is None:
            self._run()
        elif self._full:
            self.settle()

    def settle(self) -> None:
        """Execute all that waits now, with the greedy texts."""
        job, self._job = self._job, None
        self._settling = True
        try:
            if job is not None:
                job.finish(None, BeamOutcome.LATE)
            self._run()
        finally:
            self._settling = False

    def cancel(self) -> None:
        """Drop all that waits."""
        job, self._job = self._job, None
        self._waiting.clear()
        self._bytes = 0
        if job is not None:
            job.cancel()

    @property
    def _full(self) -> bool:
        limits = self._limits
        return self._bytes > limits.bytes or (limits.actions is not None and len(self._waiting) > limits.actions)

    def _run(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            while self._waiting and self._job is None:
                action = self._waiting.popleft()
                self._bytes -= _bytes_of(action)
                if type(action) is not Redecode:
                    self._execute(action)
                elif not self._begin(action):
                    self._go_on(action, None)
        finally:
            self._running = False

    def _begin(self, action: Redecode) -> bool:
        beam, frames = self._beam, action.frames
        if beam is None or frames is None:
            return False
        if self._settling:
            self._count(BeamOutcome.REFUSED)
            return False

        def done(redecoded: Redecoded | None, outcome: BeamOutcome) -> None:
            self._count(outcome)
            self._job = None
            self._go_on(action, redecoded)
            self._run()

        limit_s = beam.beam.max_wait_s if self._limits.wait_s is None else self._limits.wait_s
        self._job = beam.process.submit(beam.number, frames, action.hot_words, limit_s, done)
        if self._job is None:
            self._count(BeamOutcome.REFUSED)
        return self._job is not None

    def _go_on(self, action: Redecode, redecoded: Redecoded | None) -> None:
        try:
            after = action.then(redecoded)
        except RequestError as error:
            self.cancel()
            self._fail(error)
            return
        self._waiting.extendleft(reversed(after))
        self._bytes += sum(map(_bytes_of, after))


def _bytes_of(action: Action) -> int:
    """Bytes of a message, or of the frames of an utterance."""
    if type(action) is Send:
        return len(action.payload)
    if type(action) is Redecode and action.frames is not None:
        return sum(array.nbytes for array in action.frames)
    return 0

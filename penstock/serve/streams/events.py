"""Events of a stream's results: the application's `events` called on each, encoded as JSON."""

import json
import logging
import math
from typing import Any, final

import orjson

from penstock.core.errors import ComputeFailed
from penstock.core.spec import Array, TensorSpec
from penstock.core.speech.endpoint_beam import Redecoded
from penstock.core.speech.spoken import Speech
from penstock.core.streams.live import Live, events_of

log = logging.getLogger(__name__)

# Of an application's memory that goes into a ticket.
MAX_MEMORY_BYTES = 1 << 16
FAILED = "The application's events failed on a result; the server's log says how."


@final
class EventEncoder:
    """The `events` of one stream, with the memory that they keep from call to call.

    Args:
        app: The application's name.
        live: Its live settings.
        output: Spec of the longest output of one chunk.

    Attributes:
        event: The last event; None if there was none.
    """

    def __init__(self, app: str, live: Live, output: TensorSpec) -> None:
        self._app = app
        self._events, self._speech = events_of(live), live.speech
        self._revise = None if live.beam is None else live.beam.revise
        self._skip_empty = live.events is None
        self._frame = output.shape[1:]
        self._memory: Any = None
        self.event: Any = None

    def clear(self) -> None:
        """Forget what came before: the signal begins anew."""
        self._memory = None

    def save(self) -> Any:
        """Copy the memory, as JSON values.

        Raises:
            TypeError: It is no JSON, holds NaN or infinity, or is too long.
        """
        data = orjson.dumps(self._memory, option=orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS)
        if len(data) > MAX_MEMORY_BYTES:
            raise TypeError(f"it has {len(data):,} bytes as JSON, more than {MAX_MEMORY_BYTES:,}")
        if b"null" in data:
            # As which NaN and infinity are written, too.
            try:
                json.dumps(self._memory, allow_nan=False)
            except ValueError as error:
                raise TypeError(str(error)) from None
        return orjson.loads(data)

    def restore(self, memory: Any) -> None:
        """Go on with a memory that `save` of another server copied."""
        self._memory = memory

    def encode(self, output: Array, last: bool) -> bytes:
        """Encode the event of the next result; `null` if there is none.

        Args:
            output: Its valid numbers, flat.
            last: Whether the stream ends with it.

        Raises:
            ComputeFailed: The function raised, or returned what JSON cannot hold.
        """
        if self._skip_empty and not output.size:
            self.event = None
            return b"null"
        try:
            self.event, self._memory = self._events(output.reshape(-1, *self._frame), self._memory, last)
            return orjson.dumps(self.event, option=orjson.OPT_SERIALIZE_NUMPY)
        except Exception:  # the application's own code may raise anything
            log.exception("the events of %r raised; that stream alone ends", self._app)
            raise ComputeFailed(FAILED) from None

    def ended(self) -> Speech | None:
        """Say what the last event says of an utterance that it ends; None if it ends none.

        Raises:
            ComputeFailed: `speech` raised, or gave something else.
        """
        if self.event is None or self._speech is None:
            return None
        try:
            said = self._speech(self.event)
            if said is None:
                return None
            _check(said)
        except Exception:  # the application's own code may raise anything
            log.exception("the speech of %r raised; that stream alone ends", self._app)
            raise ComputeFailed(FAILED) from None
        return said if said.final else None

    def revised(self, event: Any, redecoded: Redecoded) -> bytes:
        """Encode the event that ends an utterance, with its better text.

        Args:
            event: The event.
            redecoded: The better text.

        Raises:
            ComputeFailed: `revise` raised, or returned what JSON cannot hold.
        """
        assert self._revise is not None, self._app
        try:
            return orjson.dumps(self._revise(event, redecoded), option=orjson.OPT_SERIALIZE_NUMPY)
        except Exception:  # the application's own code may raise anything
            log.exception("the revise of %r raised; that stream alone ends", self._app)
            raise ComputeFailed(FAILED) from None

    def speech(self, output: Array, last: bool) -> Speech | None:
        """Say what was spoken by the next result, of an application that declares `speech`; None if it adds nothing.

        Args:
            output: Its valid numbers, flat.
            last: Whether the stream ends with it, or the signal begins anew after it.

        Raises:
            ComputeFailed: `events` or `speech` raised, or gave something else.
        """
        assert self._speech is not None, self._app
        try:
            event, self._memory = self._events(output.reshape(-1, *self._frame), self._memory, last)
            if event is None or (said := self._speech(event)) is None:
                return None
            _check(said)
            return said
        except Exception:  # the application's own code may raise anything
            log.exception("the events of %r raised; that stream alone ends", self._app)
            raise ComputeFailed(FAILED) from None


def _check(said: Any) -> None:
    """Check what cannot be written as JSON, or compared with a time."""
    if not isinstance(said, Speech):
        raise TypeError(f"speech gave {said!r:.200}; it gives a Speech or None")
    for text in (said.delta, said.text, *(word.text for word in said.words)):
        if text is not None:
            text.encode()
    if said.end_s is not None and not 0 <= said.end_s < math.inf:
        raise ValueError(f"speech gave end_s={said.end_s!r}; it must be finite, from 0")
    for word in said.words:
        if not math.isfinite(word.start_s + word.end_s + word.probability):
            raise ValueError(f"speech gave {word!r:.200}; its times and probability must be finite")

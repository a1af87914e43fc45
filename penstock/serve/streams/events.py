"""Events of a stream's results: the application's `events` called on each, encoded as JSON."""

import logging
from typing import Any, final

import orjson

from penstock.core.errors import ComputeFailed
from penstock.core.live import Live, events_of
from penstock.core.spec import Array, TensorSpec

log = logging.getLogger(__name__)


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
        self._events = events_of(live)
        self._skip_empty = live.events is None
        self._frame = output.shape[1:]
        self._memory: Any = None
        self.event: Any = None

    def clear(self) -> None:
        """Forget what came before: the signal begins anew."""
        self._memory = None

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
            raise ComputeFailed("The application's events failed on a result; the server's log says how.") from None

"""The output frames of the utterances that an application's own events end."""

from typing import final

from penstock.core.spec import Array
from penstock.core.speech.endpoint_beam import EndpointBeam
from penstock.core.speech.utterance_decoder import UtteranceFrames
from penstock.serve.streams.events import EventEncoder
from penstock.serve.streams.frame_log import FrameLog


@final
class EventFrames:
    """The frames of one stream, for a second decoding where its events end an utterance.

    Args:
        beam: The application's beam.
        symbols: Number of the symbols.
        events: Encodes the stream's events.
    """

    def __init__(self, beam: EndpointBeam, symbols: int, events: EventEncoder) -> None:
        self._log, self._frame_s, self._events = FrameLog(symbols), beam.frame_s, events

    @staticmethod
    def of(beam: EndpointBeam | None, symbols: int, events: EventEncoder) -> "EventFrames | None":
        """Make them; None where the event that ends an utterance stays as it is."""
        return None if beam is None or beam.revise is None else EventFrames(beam, symbols, events)

    def clear(self) -> None:
        """Begin anew: the signal does."""
        self._log.clear()

    def hear(self, output: Array) -> UtteranceFrames | None:
        """Keep the frames of the result whose event was encoded last.

        Args:
            output: Its frames, flat.

        Returns:
            The frames of the utterance that the event ends; None if it ends none, or there is nothing to decode.

        Raises:
            ComputeFailed: The application's `speech` failed.
        """
        self._log.add(output)
        ended = self._events.ended()
        if ended is None:
            return None
        return self._log.take(None if ended.end_s is None else round(ended.end_s / self._frame_s))

"""The tickets of one live stream: when one is due, what it holds, and its text. No sockets, no clock."""

import binascii
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from penstock.core.errors import InvalidTicket
from penstock.core.spec import TensorSpec
from penstock.core.speech.resumable_resampler import ResumableResampler
from penstock.core.speech.sound import MAX_RATE_HZ, PcmDecoder, SoundDecoder
from penstock.core.streams.live import is_sound
from penstock.serve.streams.events import MAX_MEMORY_BYTES, EventEncoder
from penstock.serve.streams.ticket_content import TicketContent, TicketFields
from penstock.serve.streams.tickets import FOREIGN, HEAD_BYTES, TAG_BYTES, TicketScope, TicketSealer

log = logging.getLogger(__name__)

# Of a ticket's fields, beside the memory.
FIELDS_BYTES = 1_024
_TEXT = b'{"type":"ticket","seq":%d,"ticket":"%b"}'
OTHER_START = "The start names another encoding, rate or form of results than the ticket's stream had; name the same."
NONE_TAKEN = "This stream takes no tickets; send it from its beginning."


def max_ticket_bytes(input: TensorSpec, rate_hz: float, state_bytes: int) -> int:
    """Bytes at most of what a ticket holds.

    Args:
        input: Spec of the network's input.
        rate_hz: Frames of the signal a second.
        state_bytes: Bytes of a state.
    """
    heard_bytes = ResumableResampler.max_heard_bytes(MAX_RATE_HZ, rate_hz) if is_sound(input) else 0
    return state_bytes + FIELDS_BYTES + MAX_MEMORY_BYTES + input.nbytes + heard_bytes


@final
class SessionTickets:
    """Tickets of one stream.

    Args:
        sealer: Seals them.
        scope: What they are bound to.
        max_bytes: Bytes of what one holds at most.
        first_frames: Frames of the signal, as the network takes it, before the first one.
        every_frames: Frames between two.
    """

    def __init__(
        self, sealer: TicketSealer, scope: TicketScope, *, max_bytes: int, first_frames: int, every_frames: int
    ) -> None:
        self._sealer, self._scope = sealer, scope
        self._left, self._every_frames = first_frames, every_frames
        # What the next ticket holds beside the state, from its chunk on; complete once its message is answered.
        self._content: TicketContent | None = None
        self._is_complete = False
        self._can_be_saved = True
        # Of the stream that was started: encoding and rate of its messages, and whether its results are binary.
        self._settings = "", 0.0, False
        self.max_text_bytes = (max_bytes + HEAD_BYTES + TAG_BYTES) * 4 // 3 + 4

    def start(self, fields: dict[str, Any], *, encoding: str, rate_hz: float, binary: bool) -> TicketContent | None:
        """Begin a stream with these settings; returns the content of the ticket that the start brings.

        Raises:
            InvalidTicket: It cannot go on.
        """
        self._settings = encoding, rate_hz, binary
        if "ticket" not in fields:
            return None
        return self.open(fields["ticket"], encoding=encoding, rate_hz=rate_hz, binary=binary)

    def is_due(self, frames: int) -> bool:
        """Count the frames of a message; True if a ticket is due after it."""
        self._left -= frames
        if self._left > 0 or not self._can_be_saved:
            return False
        self._left = self._every_frames
        return True

    def begin(self, messages: int, without_samples: int, held: bytes, decoder: SoundDecoder | None) -> None:
        """Begin a ticket with what is known when its last message came; one that is not complete is dropped.

        Args:
            messages: Messages so far.
            without_samples: Those of them without samples.
            held: Samples that wait for more.
            decoder: The decoder of the messages; None where they are the network's own.
        """
        heard, to_drop = decoder.heard() if isinstance(decoder, PcmDecoder) else (b"", 0)
        encoding, rate_hz, binary = self._settings
        fields = TicketFields(
            messages=messages,
            without_samples=without_samples,
            encoding=encoding,
            rate_hz=rate_hz,
            binary=binary,
            memory=None,
            to_drop=to_drop,
        )
        self._content, self._is_complete = TicketContent(fields=fields, held=held, heard=heard, state=b""), False

    def answered(self, messages: int, events: EventEncoder) -> None:
        """Note how many messages are answered, and the memory after the last one."""
        content = self._content
        if content is None or content.fields.messages != messages:
            return
        try:
            self._content = replace(content, fields=replace(content.fields, memory=events.save()))
            self._is_complete = True
        except TypeError as error:
            log.warning("a stream of %s gets no tickets: the memory of its events (%s)", self._scope.application, error)
            self._content, self._can_be_saved = None, False

    def message(self, state: bytes) -> bytes | None:
        """Complete a ticket with its state; returns the message to the client, or None if it is not complete."""
        content, self._content = self._content, None
        if content is None or not self._is_complete:
            return None
        ticket = self._sealer.seal(replace(content, state=state).encode(), self._scope)
        return _TEXT % (content.fields.messages - 1, binascii.b2a_base64(ticket, newline=False))

    def open(self, text: str, *, encoding: str, rate_hz: float, binary: bool) -> TicketContent:
        """Open a client's ticket, for a stream that begins with these settings.

        Raises:
            InvalidTicket: It cannot go on.
        """
        try:
            ticket = binascii.a2b_base64(text, strict_mode=True)
        except ValueError:
            raise InvalidTicket(FOREIGN) from None
        content = TicketContent.decode(self._sealer.open(ticket, self._scope))
        fields = content.fields
        if (fields.encoding, fields.rate_hz, fields.binary) != (encoding, rate_hz, binary):
            raise InvalidTicket(OTHER_START)
        return content


def tickets_of_start(
    fields: dict[str, Any], tickets: SessionTickets | None, decoder: SoundDecoder | None
) -> SessionTickets | None:
    """Return the tickets of a stream whose start asks for them or brings one; None where it can have none.

    Args:
        fields: The start.
        tickets: Those that it may have.
        decoder: The decoder of its messages, before any of them; None where they are the network's own.

    Raises:
        InvalidTicket: It brings one and can have none.
    """
    if not fields.get("tickets") and "ticket" not in fields:
        return None
    if tickets is not None and (decoder is None or (isinstance(decoder, PcmDecoder) and decoder.make_resumable())):
        return tickets
    if "ticket" in fields:
        raise InvalidTicket(NONE_TAKEN)
    return None


def resumable_decoder(make: Callable[[], SoundDecoder]) -> SoundDecoder:
    """Make the decoder of what follows a flush, in a stream with tickets."""
    decoder = make()
    assert isinstance(decoder, PcmDecoder), decoder
    decoder.make_resumable()
    return decoder

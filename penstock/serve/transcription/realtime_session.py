"""Transcription over OpenAI's realtime API, without sockets and clock: messages and results in, actions out.

Sound goes to the network as it comes, so that text comes before a commit. A commit is a flush: the network gives all
that it holds back, and begins the next item anew. See docs/reference/speech.md for what of the API is served.
"""

import binascii
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast, final

import orjson
from websockets.frames import CloseCode

from penstock.core.errors import RequestError
from penstock.core.spec import Array
from penstock.core.wording.shown import shown
from penstock.serve.streams.actions import Action, Actions, Close, PushChunk, Send
from penstock.serve.streams.protocol import ENDING, FLOWING, OVER, Ending, StreamState
from penstock.serve.transcription.hearing import Hearing
from penstock.serve.transcription.realtime_settings import RealtimeSettings
from penstock.serve.transcription.sound_input import MAX_MESSAGE_BYTES, SoundInput
from penstock.serve.transcription.speech_model import SpeechModel
from penstock.serve.transcription.utterances import Began, Change, Grew, Utterance, Utterances
from penstock.serve.transcription.vendor_errors import BadParameter

_TRANSCRIPTION = "conversation.item.input_audio_transcription"
# Close codes from which on the cause is the server's.
_SERVER_CODES = (CloseCode.INTERNAL_ERROR, CloseCode.SERVICE_RESTART, CloseCode.TRY_AGAIN_LATER)


@dataclass(slots=True)
class _Item:
    """One item of the conversation: the sound between two commits.

    Args:
        id: Its identifier.
        start_s: Where it begins in the signal.
        text: Text of its utterances that have ended.
        committed: Whether its end is in the signal.
        cleared: Whether the client dropped it.
        heard: Whether its utterances have text so far.
        said: Whether a delta was sent.
        gap: Whether the next delta begins another utterance.
    """

    id: str
    start_s: float = 0.0
    text: str = ""
    committed: bool = False
    cleared: bool = False
    heard: bool = False
    said: bool = False
    gap: bool = False

    def add(self, utterance: Utterance) -> Actions:
        """Add the text of an utterance, which may be better than that of its deltas."""
        self.text = f"{self.text} {utterance.text}".strip()
        return ()


@final
class RealtimeSession:
    """The protocol of one stream; see `LiveProtocol`.

    Args:
        model: The model.
        stream: The stream's name in logs, from which identifiers are made.
    """

    idle_s: float | None = None
    max_message_bytes = MAX_MESSAGE_BYTES

    def __init__(self, model: SpeechModel, *, stream: str) -> None:
        self.state: StreamState = FLOWING
        self._model, self._stream = model, stream
        self._settings = RealtimeSettings(model=model.name)
        self._hot_words = self._settings.hot_words
        self._sound = self._sound_input()
        self._hearing = Hearing(model.application, model.name)
        self._utterances = Utterances(self._pause_s)
        self._events = self._taken = 0
        self._numbers = 0
        # Those whose result is not complete; the last one is open for sound.
        self._items = deque([self._new_item()])
        self._previous: str | None = None
        # Frames that came since the last commit.
        self._uncommitted = 0
        self._until_s = 0.0
        self._close = Close(CloseCode.NORMAL_CLOSURE, "")

    @property
    def activity(self) -> int:
        """Number of messages that were taken."""
        return self._taken

    def open(self) -> Actions:
        """Tell the session."""
        return (self._said("session.created", session=self._told()),)

    def receive_binary(self, message: bytes) -> Actions:
        """Refuse: sound is base64 here."""
        if self.state is not FLOWING:
            return ()
        return self._refused("A binary message came; send sound as base64 in input_audio_buffer.append.", {})

    def receive_text(self, message: bytes) -> Actions:
        """Take an event of the client; one that is refused is answered with an error, and the session goes on."""
        if self.state is not FLOWING:
            return ()
        fields: dict[str, Any] = {}
        try:
            parsed = orjson.loads(message)
        except orjson.JSONDecodeError:
            return self._refused("A message is no JSON that can be read.", fields, code="invalid_json")
        if not isinstance(parsed, dict):
            return self._refused("A message is no object; send one with a type.", fields, code="invalid_json")
        fields = cast(dict[str, Any], parsed)
        kind = fields.get("type")
        handle = self._HANDLERS.get(kind) if isinstance(kind, str) else None
        if handle is None:
            known = ", ".join(self._HANDLERS)
            return self._refused(
                f"There is no event {shown(kind)} in a transcription; send {known}.", fields, param="type"
            )
        try:
            return handle(self, fields)
        except BadParameter as error:
            return self._refused(str(error), fields, param=error.param)
        except RequestError as error:
            return self._refused(str(error), fields)

    def receive_result(self, output: Array, last: bool) -> Actions:
        """Take the result of the next chunk.

        Raises:
            ComputeFailed: The application's own functions failed.
        """
        heard = self._hearing.hear(output, last)
        self._until_s = heard.until_s
        actions: list[Action] = []
        changes = self._utterances.hear(heard.speech, heard.until_s)
        if changes:
            self._tell(changes, actions)
        if heard.flushed or last:
            item = self._items[0]
            self._end_utterance(item, self._utterances.end(heard.until_s), actions)
            if last and item.heard and not item.committed:
                actions.append(self._committed(item))
                item.committed = True
            if item.committed:
                self._complete(actions)
        if last:
            self.state = OVER
            actions.append(self._close)
        return actions

    def segment_ended(self) -> Actions:
        """Do nothing: there are no chains here."""
        return ()

    def finish(self, code: int, reason: str) -> Actions:
        """End the stream from the server's side: what was spoken is told as if the client had committed it."""
        if self.state is not FLOWING:
            return ()
        self.state, self._close = ENDING, Close(code, reason)
        return self._pushed(self._sound.end())

    def ending(self, code: int, reason: str) -> Ending:
        """Say the cause in an error before the close."""
        if code in (CloseCode.NORMAL_CLOSURE, CloseCode.NO_STATUS_RCVD) or not reason:
            return Ending((), code, reason)
        kind = "server_error" if code in _SERVER_CODES else "invalid_request_error"
        return Ending((self._error(reason, kind, None, None, None),), code, reason)

    def _update(self, fields: dict[str, Any]) -> Actions:
        settings = self._settings.updated(fields.get("session"))
        now = self._settings
        if (settings.encoding, settings.rate_hz) != (now.encoding, now.rate_hz):
            if self._uncommitted:
                raise BadParameter(
                    "The format cannot change within an item; commit or clear it first.", "session.audio.input.format"
                )
            self._settings = settings
            self._sound = self._sound_input()
        self._settings, self._hot_words = settings, settings.hot_words
        self._utterances.pause_s = self._pause_s
        self._taken += 1
        return (self._said("session.updated", session=self._told()),)

    def _append(self, fields: dict[str, Any]) -> Actions:
        audio = fields.get("audio")
        if not isinstance(audio, str):
            raise BadParameter("An append has no audio; send samples in base64.", "audio")
        try:
            samples = binascii.a2b_base64(audio, strict_mode=True)
        except (binascii.Error, ValueError):
            raise BadParameter(
                "audio is no base64 (RFC 4648, section 4); encode the samples with it.", "audio"
            ) from None
        if len(samples) % self._frame_bytes:
            raise BadParameter(f"audio has {len(samples):,} bytes; send whole frames of {self._frame_bytes}.", "audio")
        chunks = self._sound.feed(samples)
        self._uncommitted += len(samples) // self._frame_bytes
        self._taken += 1
        return self._pushed(chunks)

    def _commit(self, fields: dict[str, Any]) -> Actions:
        if not self._uncommitted:
            return self._refused(
                "There is nothing to commit: no sound came since the last commit.",
                fields,
                code="input_audio_buffer_commit_empty",
            )
        item = self._items[-1]
        item.committed = True
        return (self._committed(item), *self._flush())

    def _clear(self, _: dict[str, Any]) -> Actions:
        cleared = self._said("input_audio_buffer.cleared")
        if not self._uncommitted:
            return (cleared,)
        item = self._items[-1]
        item.committed = item.cleared = True
        return (cleared, *self._flush())

    _HANDLERS: ClassVar[dict[str, Callable[["RealtimeSession", dict[str, Any]], Actions]]] = {
        "session.update": _update,
        "input_audio_buffer.append": _append,
        "input_audio_buffer.commit": _commit,
        "input_audio_buffer.clear": _clear,
    }

    def _flush(self) -> list[PushChunk]:
        self._uncommitted = 0
        self._taken += 1
        self._items.append(self._new_item())
        return self._pushed(self._sound.flush())

    def _tell(self, changes: list[Change], actions: list[Action]) -> None:
        for change in changes:
            item = self._items[0]
            turns = self._settings.silence_ms is not None and not item.committed
            if isinstance(change, Began):
                if turns:
                    actions.append(
                        self._said(
                            "input_audio_buffer.speech_started", item_id=item.id, audio_start_ms=_ms(change.at_s)
                        )
                    )
            elif isinstance(change, Grew):
                self._grow(item, change.delta, actions)
            else:
                self._end_utterance(item, change, actions)
                if turns:
                    self._end_turn(item, change, actions)

    def _end_utterance(self, item: _Item, ended: Utterance, actions: list[Action]) -> None:
        item.gap, item.heard = True, item.heard or bool(ended.text)
        actions += self._hearing.ended(ended, self._hot_words, item.add)

    def _grow(self, item: _Item, delta: str, actions: list[Action]) -> None:
        if item.cleared:
            return
        # Utterances of one item are separated as in its transcript.
        text = f" {delta}" if item.said and item.gap else delta
        item.said, item.gap = True, False
        actions.append(self._said(f"{_TRANSCRIPTION}.delta", item_id=item.id, content_index=0, delta=text))

    def _end_turn(self, item: _Item, ended: Utterance, actions: list[Action]) -> None:
        actions.append(self._said("input_audio_buffer.speech_stopped", item_id=item.id, audio_end_ms=_ms(ended.end_s)))
        actions.append(self._committed(item))
        self._complete(actions)

    def _complete(self, actions: list[Action]) -> None:
        item = self._items.popleft()
        if not self._items:
            self._items.append(self._new_item())
        self._items[0].start_s = self._until_s
        if item.cleared:
            return
        usage = {"type": "duration", "seconds": round(self._until_s - item.start_s, 3)}
        actions += self._hearing.in_order(partial(self._completed, item, usage))

    def _completed(self, item: _Item, usage: dict[str, Any]) -> Actions:
        kind = f"{_TRANSCRIPTION}.completed"
        return (self._said(kind, item_id=item.id, content_index=0, transcript=item.text, usage=usage),)

    def _committed(self, item: _Item) -> Send:
        previous, self._previous = self._previous, item.id
        return self._said("input_audio_buffer.committed", item_id=item.id, previous_item_id=previous)

    def _pushed(self, chunks: list[PushChunk]) -> list[PushChunk]:
        for chunk in chunks:
            self._hearing.pushed(chunk)
        return chunks

    def _new_item(self) -> _Item:
        self._numbers += 1
        return _Item(f"item_{self._stream}_{self._numbers}")

    @property
    def _pause_s(self) -> float | None:
        silence_ms = self._settings.silence_ms
        return None if silence_ms is None else silence_ms / 1e3

    def _sound_input(self) -> SoundInput:
        settings = self._settings
        self._frame_bytes = 1 if settings.encoding == "mulaw" else 2
        return SoundInput(self._model.application, settings.encoding, settings.rate_hz)

    def _told(self) -> dict[str, Any]:
        return self._settings.to_json(f"sess_{self._stream}")

    def _refused(
        self, message: str, fields: dict[str, Any], *, param: str | None = None, code: str | None = "invalid_value"
    ) -> Actions:
        event = fields.get("event_id")
        event = event[:200] if isinstance(event, str) else None
        return (self._error(message, "invalid_request_error", code, param, event),)

    def _error(self, message: str, kind: str, code: str | None, param: str | None, event: str | None) -> Send:
        error = {"type": kind, "code": code, "message": message, "param": param, "event_id": event}
        return self._said("error", error=error)

    def _said(self, kind: str, **fields: Any) -> Send:
        self._events += 1
        return Send(orjson.dumps({"type": kind, "event_id": f"event_{self._stream}_{self._events}"} | fields), False)


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)

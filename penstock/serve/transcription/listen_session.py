"""Deepgram's streaming protocol, `/v1/listen`, without sockets and clock: messages and results in, actions out.

See docs/reference/speech.md for what of it is served, and Deepgram's reference of live audio for all of it.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, final

import orjson
from websockets.frames import CloseCode

from penstock.core.errors import InvalidInput, TooLarge
from penstock.core.spec import Array
from penstock.core.speech.spoken import Word
from penstock.serve.streams.actions import Action, Actions, Close, PushChunk, Send
from penstock.serve.streams.protocol import ENDING, FLOWING, OVER, Ending, StreamState
from penstock.serve.transcription.hearing import Hearing
from penstock.serve.transcription.listen_options import ListenOptions
from penstock.serve.transcription.sound_input import MAX_MESSAGE_BYTES, SoundInput
from penstock.serve.transcription.speech_model import SpeechModel
from penstock.serve.transcription.utterances import Began, Cause, Change, Grew, Utterance, Utterances

# Deepgram ends a stream that sends neither sound nor KeepAlive for so long.
IDLE_S = 10.0
MAX_TEXT_BYTES = 16_384
# Length at which results become final within an utterance.
MAX_RESULT_S = 20.0
# Close codes whose cause is the client's data; Deepgram has one for all of them.
_BAD_DATA = (
    CloseCode.PROTOCOL_ERROR,
    CloseCode.UNSUPPORTED_DATA,
    CloseCode.INVALID_DATA,
    CloseCode.MESSAGE_TOO_BIG,
)
_TIMED_OUT = 4408


@final
class ListenSession:
    """The protocol of one stream; see `LiveProtocol`.

    Args:
        model: The model.
        options: Its options.
        stream: The stream's name in logs, which its request is identified by.
        created: Time of the request, as ISO 8601.

    Raises:
        InvalidInput: The rate of the sound cannot be resampled.
    """

    idle_s: float | None = IDLE_S
    max_message_bytes = MAX_MESSAGE_BYTES

    def __init__(self, model: SpeechModel, options: ListenOptions, *, stream: str, created: str) -> None:
        self.state: StreamState = FLOWING
        self._options, self._stream, self._created = options, stream, created
        self._sound = SoundInput(model.application, options.encoding, options.rate_hz, options.channels)
        self._hearing = Hearing(model.application, model.name)
        self._utterances = Utterances(options.pause_s, MAX_RESULT_S)
        self._metadata = {
            "request_id": stream,
            "model_info": {"name": model.name, "version": model.version, "arch": "penstock"},
            "model_uuid": model.uuid,
        }
        self._sha256 = hashlib.sha256()
        self._taken = 0
        # Whether text came since the last `UtteranceEnd`, and the end of the last word in a final result.
        self._is_unended = False
        self._final_word_s: float | None = None
        self._until_s = 0.0
        self._close = Close(CloseCode.NORMAL_CLOSURE, "")

    @property
    def activity(self) -> int:
        """Number of messages with sound or KeepAlive."""
        return self._taken

    def open(self) -> Actions:
        """Wait for sound."""
        return ()

    def receive_binary(self, message: bytes) -> Actions:
        """Take sound, or the end as an empty message.

        Raises:
            RequestError: It is not of the encoding.
        """
        if self.state is not FLOWING:
            return ()
        if not message:
            return self._end({})
        self._taken += 1
        self._sha256.update(message)
        return self._pushed(self._sound.feed(message))

    def receive_text(self, message: bytes) -> Actions:
        """Take a control message."""
        if self.state is not FLOWING:
            return ()
        if len(message) > MAX_TEXT_BYTES:
            raise TooLarge(f"A text message has {len(message):,} bytes; at most {MAX_TEXT_BYTES:,} are taken.")
        try:
            fields = orjson.loads(message)
        except orjson.JSONDecodeError:
            return self._schema_error("A text message is no JSON; sound is sent in binary messages.", message)
        kind = fields.get("type") if isinstance(fields, dict) else None
        handle = self._HANDLERS.get(kind) if isinstance(kind, str) else None
        if handle is None:
            known = ", ".join(self._HANDLERS)
            return self._schema_error(f"A text message has no type that is known; send one of {known}.", message)
        try:
            return handle(self, fields)
        except InvalidInput as error:
            return self._schema_error(str(error), message)

    def receive_result(self, output: Array, last: bool) -> Actions:
        """Take the result of the next chunk.

        Raises:
            ComputeFailed: The application's own functions failed.
        """
        heard = self._hearing.hear(output, last)
        self._until_s = heard.until_s
        actions: list[Action] = []
        changes = self._utterances.hear(heard.speech, heard.until_s)
        if heard.flushed or last:
            ended = self._utterances.end(heard.until_s)
            # The answer to a Finalize comes in any case, and once.
            if ended.text or (heard.flushed and not (changes and isinstance(changes[-1], Utterance))):
                changes.append(ended)
        if changes:
            self._tell(changes, actions, flushed=heard.flushed)
        self._is_unended = self._is_unended or any(isinstance(change, Grew) for change in changes)
        pause_s, word_s = self._options.utterance_end_s, self._utterances.last_word_s
        if self._is_unended and pause_s is not None and word_s is not None and heard.until_s - word_s >= pause_s:
            self._is_unended = False
            is_final = not self._utterances.text
            actions += self._hearing.in_order(partial(self._utterance_end, word_s, is_final=is_final))
        if last:
            self.state = OVER
            actions += (self._about(), self._close)
        return actions

    def segment_ended(self) -> Actions:
        """Do nothing: there are no chains here."""
        return ()

    def finish(self, code: int, reason: str) -> Actions:
        """End the stream from the server's side, as if the client had sent CloseStream."""
        if self.state is not FLOWING:
            return ()
        self._close = Close(code, reason)
        return self._end({})

    def ending(self, code: int, reason: str) -> Ending:
        """Say a cause as Deepgram does: NET-0001 for silence, DATA-0000 for data that cannot be read."""
        if code == _TIMED_OUT:
            return Ending((), CloseCode.INTERNAL_ERROR, f"NET-0001: {reason}")
        if code in _BAD_DATA:
            return Ending((), CloseCode.POLICY_VIOLATION, f"DATA-0000: {reason}")
        return Ending((), code, reason)

    def _keep_alive(self, _: dict[str, Any]) -> Actions:
        self._taken += 1
        return ()

    def _finalize(self, fields: dict[str, Any]) -> Actions:
        if fields.get("channel") not in (None, 0):
            raise InvalidInput("There is one channel, 0; leave channel out.")
        return self._pushed(self._sound.flush())

    def _end(self, _: dict[str, Any]) -> Actions:
        self.state = ENDING
        return self._pushed(self._sound.end())

    def _configure(self, fields: dict[str, Any]) -> Actions:
        if not fields.get("keyterms") and not fields.get("features"):
            return (_send({"type": "ConfigureSuccess", "request_id": self._stream}),)
        failure = {
            "type": "ConfigureFailure",
            "request_id": self._stream,
            "code": "CONFIGURE_KEYTERMS_NOT_SUPPORTED",
            "description": "The application takes no keyterms or features while a stream is open.",
        }
        return (_send(failure),)

    _HANDLERS: ClassVar[dict[str, Callable[["ListenSession", dict[str, Any]], Actions]]] = {
        "KeepAlive": _keep_alive,
        "Finalize": _finalize,
        "CloseStream": _end,
        "Configure": _configure,
    }

    def _pushed(self, chunks: list[PushChunk]) -> list[PushChunk]:
        for chunk in chunks:
            self._hearing.pushed(chunk)
        return chunks

    def _tell(self, changes: list[Change], actions: list[Action], *, flushed: bool) -> None:
        options = self._options
        for change in changes:
            if isinstance(change, Began):
                if options.vad_events:
                    actions.append(_send({"type": "SpeechStarted", "channel": [0, 1], "timestamp": _s(change.at_s)}))
            elif isinstance(change, Utterance):
                then = partial(self._final, flushed=flushed and change is changes[-1])
                actions += self._hearing.ended(change, self._options.hot_words, then)
        # What was added is in the final result already, if one came.
        if options.interim_results and self._utterances.text and not isinstance(changes[-1], Utterance):
            open_now = Utterance(
                text=self._utterances.text.strip(),
                words=self._utterances.words_so_far,
                start_s=self._utterances.start_s,
                end_s=self._until_s,
                cause=Cause.LENGTH,
            )
            actions.append(self._result(open_now, final=False))

    def _final(self, utterance: Utterance, *, flushed: bool) -> Actions:
        if utterance.words:
            self._final_word_s = utterance.words[-1].end_s
        return (self._result(utterance, final=True, flushed=flushed),)

    def _result(self, utterance: Utterance, *, final: bool, flushed: bool = False) -> Send:
        words = utterance.words
        # An application that gives words when they are over may give one that began before the last pause was told.
        start_s = min(utterance.start_s, words[0].start_s) if words else utterance.start_s
        confidence = sum(word.probability for word in words) / len(words) if words else 0.0
        alternative = {
            "transcript": utterance.text,
            "confidence": round(confidence, 4),
            "words": [_word(word) for word in words],
        }
        ended = utterance.cause in (Cause.PAUSE, Cause.APPLICATION) and self._options.endpointing
        return _send(
            {
                "type": "Results",
                "channel_index": [0, 1],
                "duration": _s(utterance.end_s - start_s),
                "start": _s(start_s),
                "is_final": final,
                "speech_final": final and (ended or flushed),
                "from_finalize": flushed,
                "channel": {"alternatives": [alternative]},
                "metadata": self._metadata,
            }
        )

    def _utterance_end(self, word_s: float, *, is_final: bool) -> Actions:
        if is_final and self._final_word_s is not None:
            # Its result has other times where it was decoded again.
            word_s = self._final_word_s
        return (_send({"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": _s(word_s)}),)

    def _about(self) -> Send:
        return _send(
            {
                "type": "Metadata",
                "transaction_key": "deprecated",
                "request_id": self._stream,
                "sha256": self._sha256.hexdigest(),
                "created": self._created,
                "duration": _s(self._until_s),
                "channels": 1,
            }
        )

    def _schema_error(self, description: str, message: bytes) -> Actions:
        text = message[:200].decode(errors="replace")
        return (_send({"type": "Error", "variant": "SchemaError", "description": description, "message": text}),)


def _word(word: Word) -> dict[str, Any]:
    return {
        "word": word.text,
        "start": _s(word.start_s),
        "end": _s(word.end_s),
        "confidence": round(word.probability, 4),
        "punctuated_word": word.text,
    }


def _s(seconds: float) -> float:
    return round(seconds, 3)


def _send(fields: dict[str, Any]) -> Send:
    return Send(orjson.dumps(fields), False)

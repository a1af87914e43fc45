"""`POST /v1/audio/transcriptions`: a recording in, its words in one of OpenAI's forms out, whole or as events."""

from functools import partial
from typing import Any, final

import orjson

from penstock.core.errors import InvalidInput, RequestError, TooLarge
from penstock.core.spec import Array
from penstock.core.speech.endpoint_beam import Redecoded
from penstock.core.speech.sound import sound_decoder
from penstock.serve.exchange.form import MULTIPART, boundary_of, fields_of
from penstock.serve.exchange.request import MAX_HEAD_BYTES, Head, Request
from penstock.serve.exchange.response import Answer, Body, Cancel, Response, Streamed, rejected
from penstock.serve.http.generated_answer import EVENT_HEADERS, EVENTS, event
from penstock.serve.http.large_bodies import LARGE_BYTES, LargeBodies
from penstock.serve.http.plain_body import content_type_of
from penstock.serve.http.recording import admitted, chunks_of, recorded_endpoints
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.speech_models import speech_models, with_speech
from penstock.serve.streams.actions import Actions, PushChunk, Redecode
from penstock.serve.streams.streams import Streams
from penstock.serve.transcription.hearing import Hearing
from penstock.serve.transcription.transcription_request import FIELDS, LISTS, MAX_PARTS, TranscriptionRequest
from penstock.serve.transcription.transcripts import FORMS, Transcript
from penstock.serve.transcription.utterances import Change, Grew, Utterance, Utterances
from penstock.serve.transcription.vendor_errors import openai_error

# What OpenAI's clients send at most: the longest file while models are not loaded, whose limits are not known.
UNKNOWN_BYTES = 25 << 20
# Pause that ends a segment, and its longest length: what fits two lines of subtitles.
PAUSE_S, MAX_SEGMENT_S = 0.8, 7.0


@final
class TranscriptionCall:
    """Answers the requests with one head.

    Args:
        models: All models.
        large: Reads large bodies.
        head: The head.

    Raises:
        InvalidInput: It is no form.
    """

    def __init__(self, models: ModelRegistry, large: LargeBodies, head: Head) -> None:
        self._models, self._large = models, large
        content_type = content_type_of(head)
        if content_type != MULTIPART:
            raise InvalidInput(f"Content-Type is {content_type[:80]!r}; send {MULTIPART} with a part 'file'.")
        self._boundary = boundary_of(head.headers["content-type"])

    @property
    def max_body_bytes(self) -> int:
        """Longest body: the longest recording of any application that has words, and the other parts of the form."""
        found = [served.application.max_body_bytes for served in speech_models(self._models)]
        if self._models.incomplete:
            found.append(UNKNOWN_BYTES)
        return max(found, default=0) + MAX_HEAD_BYTES

    def handle(self, request: Request, answer: Answer) -> Cancel | None:
        """Read the form, feed the recording, and answer; returns a function that cancels it.

        Raises:
            RequestError: The form is malformed, or the request is rejected.
        """
        if len(request.body) <= LARGE_BYTES:
            return self._begin(self._read(request.body), answer)
        return self._large.read(
            partial(self._read, request.body), lambda asked, _: self._begin(asked, answer), None, request, answer
        )

    def _read(self, body: bytes) -> TranscriptionRequest:
        return TranscriptionRequest.of(fields_of(body, self._boundary, FIELDS, LISTS, MAX_PARTS))

    def _begin(self, asked: TranscriptionRequest, answer: Answer) -> Cancel:
        served = with_speech(self._models, asked.model)
        try:
            application, streams = served.application, served.streams
            assert streams is not None, served.name
            most = application.max_body_bytes
            if len(asked.sound) > most:
                raise TooLarge(
                    f"The file has {len(asked.sound):,} bytes; {served.name!r} takes at most {most:,}. Cut it, or send "
                    f"it as a live stream."
                )
            assert application.live is not None, served.name
            decoder = sound_decoder("wav", None, application.live.rate_hz)
            chunks = chunks_of(decoder, asked.sound, application.input_tensor)
            first = next(chunks)
            served.reject_lost()
            return admitted(served, streams, first, chunks, lambda taking: _Spoken(taking, served, asked, answer))
        except RequestError as error:
            served.count_rejection(error)
            raise


@final
class _Spoken:
    """Collects what is spoken in a recording, and answers with it: at the end, or with events as it comes.

    Args:
        streams: The model's streams.
        served: The model.
        asked: The request.
        answer: Takes the response.
    """

    def __init__(self, streams: Streams, served: ServedModel, asked: TranscriptionRequest, answer: Answer) -> None:
        self._asked, self._answer = asked, answer
        self._hearing = Hearing(served.application, served.name)
        self._utterances = Utterances(PAUSE_S, MAX_SEGMENT_S)
        self._ended: list[Utterance] = []
        self._until_s = 0.0
        self._body: Body | None = None
        self._opened = self._gap = False
        self._cancelled = False
        self._endpoints = recorded_endpoints(streams, self.reject)

    def pushed(self, chunk: PushChunk) -> None:
        """Note a chunk, see `RecordingListener`."""
        self._hearing.pushed(chunk)

    def hear(self, output: Array, last: bool) -> None:
        """Take a result, see `RecordingListener`."""
        speech, self._until_s, _ = self._hearing.hear(output, last)
        for change in self._utterances.hear(speech, self._until_s):
            self._take(change)
        if last:
            self._take(self._utterances.end(self._until_s))

    def finish(self) -> None:
        """Answer with the transcript, once the better texts are there."""
        self._endpoints.add(Redecode(None, (), self._finish))

    def cancel(self) -> None:
        """Answer nothing more, see `RecordingListener`."""
        self._cancelled = True
        self._endpoints.cancel()

    def _finish(self, _: Redecoded | None) -> Actions:
        if not self._cancelled:
            self._answer_all()
        return ()

    def _answer_all(self) -> None:
        transcript = Transcript(utterances=self._ended, duration_s=self._until_s, language=self._asked.language)
        if self._asked.stream:
            self._write({"type": "transcript.text.done", "text": transcript.text})
            if self._body is not None:
                self._body.end()
            return
        content_type, body = FORMS[self._asked.form](transcript, self._asked.granularities)
        self._answer(Response(200, body, content_type))

    def reject(self, error: RequestError) -> None:
        """Answer with the rejection, or end the events with it."""
        if not self._opened:
            self._answer(rejected(error))
        elif self._body is not None:
            self._body.write(event(b"", openai_error(error)))
            self._body.end()

    def _take(self, change: Change) -> None:
        if isinstance(change, Utterance):
            for action in self._hearing.ended(change, self._asked.hot_words, self._end):
                assert type(action) is Redecode, action
                self._endpoints.add(action)
            self._gap = self._gap or bool(change.text)
        elif isinstance(change, Grew) and self._asked.stream:
            # Segments are separated as in the whole text.
            delta = f" {change.delta}" if self._gap else change.delta
            self._gap = False
            self._write({"type": "transcript.text.delta", "delta": delta})

    def _end(self, utterance: Utterance) -> Actions:
        if utterance.text:
            self._ended.append(utterance)
        return ()

    def _write(self, fields: dict[str, Any]) -> None:
        if not self._opened:
            self._opened = True
            self._answer(Streamed(200, content_type=EVENTS, headers=EVENT_HEADERS, opened=self._open))
        # The client may be gone.
        if self._body is not None:
            self._body.write(event(b"", orjson.dumps(fields)))

    def _open(self, body: Body) -> None:
        self._body = body

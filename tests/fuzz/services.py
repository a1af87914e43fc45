"""Parsing of speech services: messages of their streams, the query of one, and the form of a recording."""

import base64

import orjson

from penstock.core.errors import RequestError
from penstock.serve.exchange.form import boundary_of, fields_of
from penstock.serve.streams.protocol import OVER
from penstock.serve.transcription.listen_options import ListenOptions
from penstock.serve.transcription.transcription_request import FIELDS, LISTS, MAX_PARTS, TranscriptionRequest
from penstock.serve.transcription.transcripts import FORMS
from tests.support.services import Conversation, listening, realtime

# Before each message is its length; one of these stands for something else.
FINISH, ANSWER, TEXT, AUDIO = range(252, 256)


def listen(data: bytes) -> None:
    """`ListenOptions` and `ListenSession`. The first line is the query; the rest as for `realtime_`."""
    line, _, rest = data.partition(b"\n")
    try:
        ListenOptions.of(line.decode("latin-1"))
        # Of the network's own rate, unless the query says more.
        talk = listening(line.decode("latin-1"))
    except RequestError as error:
        _is_a_sentence(error)
        talk = listening(interim_results=True, vad_events=True)
    _play(talk, rest)


def realtime_(data: bytes) -> None:
    """`RealtimeSession`. Each message has its length before it, and what it is before that if it is no sound."""
    _play(realtime(), data)


def _play(talk: Conversation, data: bytes) -> None:
    at = 0
    try:
        while at < len(data):
            size, at = data[at], at + 1
            if size == FINISH:
                talk.finish(1012, "over")
            elif size == ANSWER:
                talk.answer(1)
            elif size in (TEXT, AUDIO):
                size, at = (data[at] if at < len(data) else 0), at + 1
                payload, at = data[at : at + size], at + size
                if size and data[at - size - 2] == AUDIO:
                    talk.text(type="input_audio_buffer.append", audio=base64.b64encode(payload).decode())
                else:
                    talk.send_text(payload)
            else:
                payload, at = data[at : at + size], at + size
                talk.send(payload)
    except RequestError as error:
        _is_a_sentence(error)
        messages, code, reason = talk.session.ending(1007, str(error))
        assert 1000 <= code < 5000
        assert reason
        for message in messages:
            orjson.loads(message.payload)
        return
    talk.finish(1012, "over")
    talk.answer()
    assert talk.session.state is OVER
    assert talk.closed is not None


def recording(data: bytes) -> None:
    """`TranscriptionRequest`. The line: the Content-Type of a form; the rest is its body."""
    line, _, body = data.partition(b"\n")
    try:
        parts = fields_of(body, boundary_of(line.decode("latin-1")), FIELDS, LISTS, MAX_PARTS)
        asked = TranscriptionRequest.of(parts)
    except RequestError as error:
        _is_a_sentence(error)
        return
    assert asked.sound[:4] == b"RIFF"
    assert asked.form in FORMS
    assert asked.granularities <= {"segment", "word"}


def _is_a_sentence(error: RequestError) -> None:
    assert 400 <= error.status < 500, error
    assert len(str(error)) <= 1_000, error
    assert str(error).endswith((".", "both.")), error
    orjson.dumps({"error": str(error)})

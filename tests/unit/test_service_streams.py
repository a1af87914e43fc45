"""Streams of other services' protocols on the server's connections: bytes that are held, silence, ends, refusals."""

import asyncio
from functools import partial
from typing import Any, cast

import numpy as np
import orjson
import pytest
from websockets.frames import Frame, Opcode

from penstock.core.errors import (
    ComputeFailed,
    DeadlineImpossible,
    Forbidden,
    InvalidInput,
    Overloaded,
    QuotaExceeded,
    RequestError,
    Unauthorized,
)
from penstock.core.speech.sound import sound_decoder
from penstock.serve.exchange.access import Access
from penstock.serve.exchange.request import MAX_HEAD_BYTES, Head
from penstock.serve.exchange.request_bounds import CONNECTION_BYTES, RequestBounds
from penstock.serve.http.transcription import UNKNOWN_BYTES
from penstock.serve.messages import ModelState
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.speech_models import with_speech
from penstock.serve.transcription.listen_options import ListenOptions
from penstock.serve.transcription.listen_session import ListenSession
from penstock.serve.transcription.realtime_session import RealtimeSession
from penstock.serve.transcription.sound_input import SoundInput
from penstock.serve.transcription.vendor_errors import UnknownModel, deepgram_error, openai_error, shape_of
from penstock.serve.websocket.stream_connection import StreamConnection
from tests.support.routes import routes_of
from tests.support.services import CHUNK, RATE_HZ, application, model
from tests.support.streams import BUDGET_NS, Caller, Wire, World


def listen(name: str) -> ListenSession:
    options = ListenOptions(encoding="pcm_s16le", rate_hz=RATE_HZ)
    return ListenSession(model(), options, stream=name, created="now")


def realtime(name: str) -> RealtimeSession:
    return RealtimeSession(model(), stream=name)


def call(world: World, protocol: Any = listen, bounds: RequestBounds | None = None) -> Caller:
    wire, now_s = Wire(), [0.0]
    admit = partial(world.streams.admit_stream, budget_ns=BUDGET_NS)
    socket = StreamConnection(admit, lambda: now_s[0], protocol=protocol, bounds=bounds or RequestBounds())
    socket.take_over(cast(asyncio.Transport, wire), b"", world.peers)
    return Caller(socket, wire, now_s)


def registry(*states: ModelState, starting: bool = False) -> ModelRegistry:
    """A registry that serves nothing yet."""
    models = ModelRegistry(cast(Any, None), loading=False, demand=lambda name: None)
    models.starting = starting
    for state in states:
        models.set_state(state)
    return models


UNLOADED = ModelState(name="words", version="1", state="UNAVAILABLE", on_demand_ns=0)


def test_a_recording_may_have_models_loaded_that_are_not_there_yet() -> None:
    form = Head("POST", "/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=X"})
    for models, limit in (
        (registry(), MAX_HEAD_BYTES),
        (registry(starting=True), MAX_HEAD_BYTES + UNKNOWN_BYTES),
        (registry(UNLOADED), MAX_HEAD_BYTES + UNKNOWN_BYTES),
    ):
        assert routes_of(models, Access()).max_body_bytes(form) == limit


@pytest.mark.parametrize(
    ("models", "name", "error", "why"),
    [
        (registry(), "", UnknownModel, "No model here recognises words"),
        (registry(), "words", UnknownModel, "No model here recognises words"),
        (registry(starting=True), "", Overloaded, "The server is starting"),
        (registry(starting=True), "words", Overloaded, "The server is starting"),
        (registry(UNLOADED), "", UnknownModel, "No model that is loaded recognises words; send as model"),
        (registry(UNLOADED), "words", Overloaded, "'words' is being loaded"),
    ],
)
def test_models_that_are_not_loaded_are_no_missing_ones(
    models: ModelRegistry, name: str, error: type[RequestError], why: str
) -> None:
    with pytest.raises(error, match=why):
        with_speech(models, name)


def test_messages_that_have_not_come_whole_are_counted() -> None:
    world, bounds = World(), RequestBounds(max_bytes=1 << 20)
    caller = call(world, bounds=bounds)
    assert bounds.held_bytes == 0
    data = Frame(Opcode.BINARY, bytes(20_000)).serialize(mask=True)
    caller.feed(data[:15_000])
    assert bounds.held_bytes == CONNECTION_BYTES + 15_000
    caller.feed(data[15_000:])
    # What waits for room in the slot is counted too.
    assert caller.socket.stream.waiting * 2 * CHUNK + CONNECTION_BYTES == bounds.held_bytes > CONNECTION_BYTES
    while caller.socket.stream.waiting:
        world.settle()
    assert bounds.held_bytes == CONNECTION_BYTES
    caller.socket.connection_lost(None)
    assert bounds.held_bytes == 0


def test_a_message_for_which_there_is_no_room_ends_its_stream() -> None:
    world, bounds = World(), RequestBounds(max_bytes=3 * CONNECTION_BYTES)
    caller = call(world, realtime, bounds)
    caller.feed(Frame(Opcode.TEXT, b"x" * (4 * CONNECTION_BYTES)).serialize(mask=True)[: 3 * CONNECTION_BYTES])
    caller.read()
    created, error = caller.said
    assert created["type"] == "session.created"
    assert "come back later" in error["error"]["message"]
    assert caller.closed is not None
    assert caller.closed[0] == 1013
    assert (caller.wire.ended, caller.socket.stream.over) == ("abort", True)
    caller.socket.connection_lost(None)
    assert (bounds.held_bytes, world.peers) == (0, set())


def test_one_byte_at_a_time_is_as_good_as_all_at_once() -> None:
    world = World()
    whole, split = call(world, realtime), call(world, realtime)
    data = b""
    for event in (
        {"type": "input_audio_buffer.append", "audio": "AQABAAAAAAA="},
        {"type": "nonsense"},
        {"type": "input_audio_buffer.commit"},
    ):
        data += Frame(Opcode.TEXT, orjson.dumps(event)).serialize(mask=True)
    whole.feed(data)
    for at in range(len(data)):
        split.feed(data[at : at + 1])
    world.settle()
    whole.read()
    split.read()
    assert [said["type"] for said in split.said] == [said["type"] for said in whole.said]
    assert split.said[-1]["type"].endswith(".completed")


def test_silence_ends_a_stream_of_deepgrams_and_keep_alive_does_not() -> None:
    world = World()
    silent, kept, other = call(world), call(world), call(world, realtime)
    for now_s in range(1, 31):
        if now_s % 9 == 0:
            kept.send(1, b'{"type":"KeepAlive"}')
        for caller in (silent, kept, other):
            caller.now_s[0] = now_s
            if not caller.wire.ended:
                caller.socket.sweep(now_s, 120.0, 60.0)
    silent.read()
    assert silent.closed == (1011, "NET-0001: No samples came for 11 s; open another stream.")
    kept.read()
    assert kept.closed is None
    other.read()
    assert other.closed is None


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 24_000])
def test_sound_is_the_same_in_pieces_of_any_size(rate_hz: int) -> None:
    app = application(rate_hz=8_000)
    rng = np.random.default_rng(rate_hz)
    sound_T = rng.integers(-9_000, 9_000, 4_001).astype(np.int16)
    found: list[bytes] = []
    for sizes in ([8_002], [1] * 8_002, rng.integers(1, 999, 40).tolist()):
        made, data, chunks = SoundInput(app, "pcm_s16le", rate_hz), sound_T.tobytes(), list[Any]()
        for size in sizes:
            chunks += made.feed(data[:size])
            data = data[size:]
        chunks += made.feed(data)
        chunks += made.flush()
        assert (chunks[-1].resets, chunks[-1].last) == (True, False)
        # What follows a flush is resampled as if nothing had been before.
        chunks += made.feed(sound_T.tobytes())
        chunks += made.end()
        assert chunks[-1].last
        assert made.frames_in == 8_002 // 2 * 2
        found.append(b"".join(bytes(chunk.samples) for chunk in chunks))
    decoder = sound_decoder("pcm_s16le", rate_hz, 8_000)
    once = np.concatenate([decoder.feed(sound_T.tobytes()), decoder.flush()]).tobytes()
    assert found == [once + once] * 3


@pytest.mark.parametrize(
    ("error", "code", "err_code"),
    [
        (InvalidInput("It is wrong."), None, "Bad Request"),
        (Unauthorized("It needs a key."), "invalid_api_key", "INVALID_AUTH"),
        (Forbidden("It may not."), None, "INSUFFICIENT_PERMISSIONS"),
        (UnknownModel("There is none."), "model_not_found", "NOT_FOUND"),
        (QuotaExceeded("It has too many."), "rate_limit_exceeded", "TOO_MANY_REQUESTS"),
        (Overloaded("Come later."), "server_overloaded", "SERVICE_UNAVAILABLE"),
        (DeadlineImpossible("It cannot be."), None, "SERVICE_UNAVAILABLE"),
        (ComputeFailed("It failed."), None, "INTERNAL_SERVER_ERROR"),
    ],
)
def test_rejections_have_the_shape_of_each_service(error: RequestError, code: str | None, err_code: str) -> None:
    found = orjson.loads(openai_error(error))["error"]
    assert (found["message"], found["code"]) == (str(error), code)
    assert found["type"] == ("server_error" if error.status >= 500 else "invalid_request_error")
    body, headers = deepgram_error(error)
    request_id = dict(headers)["dg-request-id"]
    assert orjson.loads(body) == {"err_code": err_code, "err_msg": str(error), "request_id": request_id}
    assert dict(headers)["dg-error"] == str(error)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/models", "openai"),
        ("/v1/models/tones", "openai"),
        ("/v1/models/tones:predict", None),
        ("/v1/audio/translations", "openai"),
        ("/v1/realtime/client_secrets", "openai"),
        ("/v1/chat/completions", "openai"),
        ("/v1/audios", None),
        ("/v1/listen", "deepgram"),
        ("/v2/listen", "deepgram"),
        ("/v2/listening", None),
        ("/v1/apps/listen", None),
        ("/v2/models/tones", None),
    ],
)
def test_whoever_asks_for_a_path_reads_its_rejection(path: str, shape: str | None) -> None:
    found = shape_of(path)
    told = None if found is None else orjson.loads(found(InvalidInput("It is wrong."))[0])
    assert told is None or ("error" in told) == (shape == "openai")
    assert (told is None) == (shape is None)


def test_a_sentence_in_a_header_cannot_end_it() -> None:
    _, headers = deepgram_error(InvalidInput("It is\r\nX-Other: wröng\0."))
    assert dict(headers)["dg-error"] == "It is??X-Other: wr?ng?."

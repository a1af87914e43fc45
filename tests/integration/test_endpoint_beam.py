"""Ends of utterances that a beam decodes again, over every protocol, and a beam process that dies."""

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from deepgram import DeepgramClient
from deepgram.environment import DeepgramClientEnvironment
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection, connect

from penstock import Client, HotWord
from penstock.bench.process_usage import child_pids
from penstock.core.speech.sound import Samples
from tests.fuzz.process import listening_on
from tests.support.letters import RATE_HZ, letters_bundle, said
from tests.support.processes import eventually, kill
from tests.support.serving import RunningServer
from tests.support.tones import pieces, tones_bundle, wav

CHUNK = 80
# Greedy, the text is "aa"; the language model knows "ab" alone.
WORD, GREEDY, BETTER = said("a a|b"), "aa", "ab"
SILENCE = np.zeros(1_300, np.int16)
# The client looks for the protocol of older versions of websockets, which is deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:websockets:DeprecationWarning", "ignore:connect.. must be used as a context manager:DeprecationWarning"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tones = tones_bundle(tmp_path_factory.mktemp("tones"))
    with RunningServer(letters_bundle(tmp_path_factory.mktemp("letters")), str(tones)) as server:
        eventually(lambda: dictated(server) == [BETTER], within_s=60)
        yield server


class Dictation:
    """A stream of our own protocol."""

    def __init__(self, server: RunningServer, app: str = "letters", **start: Any) -> None:
        # Without pings: a client that is not read yet would take no answer to them, and end its connection.
        self._stream: ClientConnection = connect(
            f"ws://{server.host}:{server.port}/v1/apps/{app}/stream", compression=None, ping_interval=None, legacy=True
        )
        self._stream.send(json.dumps({"type": "start"} | start))
        self.ready = json.loads(self._stream.recv())
        self._sent = 0

    def send(self, sound_T: Samples) -> None:
        for at in range(0, len(sound_T), CHUNK):
            self._stream.send(self._sent.to_bytes(4, "little") + sound_T[at : at + CHUNK].tobytes())
            self._sent += 1

    def flush(self) -> None:
        self._stream.send('{"type":"flush"}')
        self._sent += 1

    def receive(self) -> dict[str, Any]:
        return json.loads(self._stream.recv(60))

    def end(self) -> list[dict[str, Any]]:
        """The events of all results, each of which comes once and in order."""
        self._stream.send('{"type":"end"}')
        messages = [self.receive()]
        while messages[-1]["type"] != "end":
            messages.append(self.receive())
        assert messages.pop() == {"type": "end", "chunks": self._sent}
        first = messages[0]["seq"]
        assert [message["seq"] for message in messages] == list(range(first, self._sent + 1))
        return [message["event"] for message in messages if message["event"] is not None]


def texts(events: list[dict[str, Any]]) -> list[str]:
    return [event["utterance"]["text"] for event in events if "utterance" in event]


def dictated(server: RunningServer) -> list[str]:
    """The texts of an utterance; they are greedy if the beam process is still loading when its time is over."""
    stream = Dictation(server)
    stream.send(WORD)
    return texts(stream.end())


def counted(server: RunningServer, outcome: str) -> float:
    text = server.ask("GET", "/metrics")[2].decode()
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith("penstock_utterances_total") and f'outcome="{outcome}"' in line
    )
    return float(line.split()[-1])


def restarts(server: RunningServer) -> float:
    text = server.ask("GET", "/metrics")[2].decode()
    (line,) = (line for line in text.splitlines() if line.startswith('penstock_beam_restarts_total{app="letters"}'))
    return float(line.split()[-1])


def beam_processes() -> list[int]:
    """The beam processes of this machine's servers."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"penstock.serve.frontend.beam_main" in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def children_of(process: int) -> list[int]:
    return [process, *(below for child in child_pids(process) for below in children_of(child))]


def beams_of(server: RunningServer) -> list[int]:
    """The beam processes of a server with one front-end."""
    front_end = listening_on(server.port)
    assert front_end is not None, "nobody listens"
    return sorted(set(beam_processes()) & set(children_of(front_end)))


def beam_of(server: RunningServer) -> int:
    (found,) = beams_of(server)
    return found


def test_the_event_that_ends_an_utterance_has_its_better_text(server: RunningServer) -> None:
    before = counted(server, "decoded")
    stream = Dictation(server)
    stream.send(np.concatenate([WORD, said("_"), WORD, SILENCE, WORD]))
    events = stream.end()
    # What was told is not taken back.
    assert "".join(event["text"] for event in events) == "aa aa" + "aa"
    assert texts(events) == ["ab ab", "ab"]
    first, second = (event for event in events if "utterance" in event)
    assert (first["final"], second["final"]) == (True, True)
    words = first["utterance"]["words"] + second["utterance"]["words"]
    begins = np.array([0, len(WORD) + 4, 2 * len(WORD) + 4 + len(SILENCE)]) / RATE_HZ
    assert [word["word"] for word in words] == ["ab"] * 3
    assert [word["begin_s"] for word in words] == pytest.approx(begins.tolist(), abs=0.011)
    assert all(0.5 < word["probability"] < 1 for word in words)
    assert counted(server, "decoded") == before + 2


def test_a_flush_ends_an_utterance_too(server: RunningServer) -> None:
    stream = Dictation(server)
    for _ in range(2):
        stream.send(WORD)
        stream.flush()
    assert texts(stream.end()) == ["ab", "ab"]


def test_hot_words_of_a_stream_are_preferred(server: RunningServer) -> None:
    for hot_words, expected in (
        ([], "ab"),
        (["AA"], "aa"),
        ([{"text": "aa", "bonus": 6}], "aa"),
        ([{"text": "aa", "bonus": -6}], "ab"),
        # It cannot be written in these letters.
        (["zz"], "ab"),
    ):
        stream = Dictation(server, hot_words=hot_words)
        stream.send(WORD)
        assert texts(stream.end()) == [expected], hot_words


def test_events_in_binary_stay_as_they_are(server: RunningServer) -> None:
    stream = Dictation(server, events="binary")
    assert stream.ready["type"] == "ready"


@pytest.mark.parametrize(
    ("app", "start", "reason"),
    [
        ("tones", {"hot_words": ["aa"]}, "'tones' decodes no utterance again in this stream; leave hot_words out."),
        ("letters", {"hot_words": "aa"}, "hot_words is 'aa'; it must be a list of at most 100 words."),
        ("letters", {"hot_words": ["a"] * 101}, "it must be a list of at most 100 words."),
        ("letters", {"hot_words": [""]}, "it must be a text of 1 to 64 characters"),
        ("letters", {"hot_words": [{"text": "a", "bonus": 21}]}, "it must be from -20 to 20."),
        ("letters", {"hot_words": [{"text": "a", "boost": 1}]}, "it must be a text of 1 to 64 characters"),
        ("letters", {"hot_words": ["a"], "events": "binary"}, "leave hot_words out."),
    ],
)
def test_hot_words_that_cannot_be_used_are_refused(
    server: RunningServer, app: str, start: dict[str, Any], reason: str
) -> None:
    with connect(f"ws://{server.host}:{server.port}/v1/apps/{app}/stream", legacy=True) as stream:
        stream.send(json.dumps({"type": "start"} | start))
        with pytest.raises(ConnectionClosedError) as closed:
            stream.recv(60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1007
    assert reason in closed.value.rcvd.reason


def listened(server: RunningServer, sound_T: Samples, **options: Any) -> list[Any]:
    http, ws = f"http://{server.host}:{server.port}", f"ws://{server.host}:{server.port}"
    environment = DeepgramClientEnvironment(base=http, production=ws, agent=ws, agent_rest=http)
    client = DeepgramClient(api_key="none", environment=environment)
    given: dict[str, Any] = {"model": "letters", "encoding": "linear16", "sample_rate": RATE_HZ} | options
    with client.listen.v1.connect(**given) as stream:
        for piece in pieces(sound_T, 100):
            stream.send_media(piece)
        stream.send_close_stream()
        messages: list[Any] = list(stream)
    return [message for message in messages if message.type == "Results"]


def test_deepgrams_final_results_have_the_better_text(server: RunningServer) -> None:
    sound_T = np.concatenate([WORD, np.zeros(400, np.int16), WORD])
    results = listened(server, sound_T, interim_results="true")
    assert {each.channel.alternatives[0].transcript for each in results if not each.is_final} <= {"a", GREEDY}
    finals = [each for each in results if each.is_final]
    assert [each.channel.alternatives[0].transcript for each in finals] == [BETTER, BETTER]
    words = [word for each in finals for word in each.channel.alternatives[0].words]
    assert [word.word for word in words] == [BETTER] * 2
    assert [word.start for word in words] == pytest.approx([0, 0.408], abs=0.002)
    for options in ({"keyterm": "aa"}, {"keywords": "aa:8"}):
        finals = [each for each in listened(server, WORD, **options) if each.is_final]
        assert [each.channel.alternatives[0].transcript for each in finals] == ["aa"], options


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    base = f"http://{server.host}:{server.port}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        yield client


def completed(client: openai.OpenAI, turns: Any, sound_T: Samples, **hints: Any) -> tuple[str, list[str], list[str]]:
    """The deltas of a stream, its transcripts, and the kinds of its events."""
    deltas, transcripts, kinds = "", list[str](), list[str]()
    with client.realtime.connect(extra_query={"intent": "transcription", "model": "letters"}, max_retries=0) as stream:
        settings = {
            "format": {"type": "audio/pcm", "rate": RATE_HZ},
            "transcription": {"model": "letters"} | hints,
            "turn_detection": turns,
        }
        session: Any = {"type": "transcription", "audio": {"input": settings}}
        stream.session.update(session=session)
        for piece in pieces(sound_T, 100):
            stream.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
        if turns is None:
            stream.input_audio_buffer.commit()
        event: Any
        for event in stream:
            kinds.append(event.type.rpartition(".")[2])
            assert event.type != "error", event
            deltas += event.delta if event.type.endswith(".delta") else ""
            if event.type.endswith(".completed"):
                transcripts.append(event.transcript)
                break
    return deltas, transcripts, kinds


def test_openais_transcripts_have_the_better_text(client: openai.OpenAI) -> None:
    sound_T = np.concatenate([WORD, SILENCE])
    for turns in (None, {"type": "server_vad", "silence_duration_ms": 400}):
        deltas, transcripts, kinds = completed(client, turns, sound_T)
        assert (deltas, transcripts) == (GREEDY, [BETTER])
        assert kinds.index("committed") < kinds.index("completed")
    for hints in ({"prompt": "Aa, and other words that matter little"}, {"keywords": ["aa"]}):
        assert completed(client, None, sound_T, **hints)[1] == ["aa"], hints


def test_a_recording_has_the_better_text(server: RunningServer, client: openai.OpenAI) -> None:
    sound = wav(np.concatenate([WORD, SILENCE, WORD, said("_"), WORD]), RATE_HZ)

    def asked(**options: Any) -> Any:
        return client.audio.transcriptions.create(file=("said.wav", sound), model="letters", **options)

    assert asked().text == "ab ab ab"
    assert asked(prompt="aa").text == "aa aa aa"
    found = asked(response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert [(word.word, word.start) for word in found.words] == [
        ("ab", 0.0),
        ("ab", pytest.approx(1.308, abs=0.002)),
        ("ab", pytest.approx(1.32, abs=0.002)),
    ]
    assert [segment.text.strip() for segment in found.segments] == ["ab", "ab ab"]
    events = list(asked(stream=True))
    assert "".join(event.delta for event in events if event.type == "transcript.text.delta") == "aa aa aa"
    assert events[-1].text == "ab ab ab"
    status, _, reply = server.ask("POST", "/v1/apps/letters", sound, {"Content-Type": "audio/wav"})
    assert status == 200
    assert texts(reply["events"]) == ["ab", "ab ab"]


def test_a_beam_process_that_dies_is_started_again_and_the_text_is_greedy_meanwhile(server: RunningServer) -> None:
    assert dictated(server) == [BETTER]
    before = beam_of(server)
    # One that hangs within an utterance, and is killed then.
    os.kill(before, signal.SIGSTOP)
    stream = Dictation(server)
    stream.send(np.concatenate([WORD, SILENCE]))
    eventually(lambda: stream.receive()["event"] is not None, within_s=10)
    os.kill(before, signal.SIGKILL)
    events = stream.end()
    assert texts(events) == []
    assert [event["final"] for event in events if "final" in event] == [True]
    eventually(lambda: dictated(server) == [BETTER], within_s=60)
    assert beam_of(server) != before
    assert counted(server, "failed") >= 1
    eventually(lambda: restarts(server) >= 1, within_s=10)


def test_a_fast_client_does_not_wait_for_a_beam_that_hangs(server: RunningServer) -> None:
    # A live end waits for 10 s here, but not with more than 256 results behind it.
    stream = Dictation(server)
    eventually(lambda: len(beams_of(server)) == 1, within_s=30)
    beam, before = beam_of(server), counted(server, "late")
    os.kill(beam, signal.SIGSTOP)
    try:
        begun_s = time.monotonic()
        stream.send(np.concatenate([WORD, np.zeros(300 * CHUNK, np.int16)]))
        while not (event := stream.receive()["event"]) or "final" not in event:
            pass
        assert time.monotonic() - begun_s < 8
    finally:
        os.kill(beam, signal.SIGCONT)
    assert texts(stream.end()) == []
    assert counted(server, "late") == before + 1


@pytest.mark.thorough
@pytest.mark.parametrize(("devices", "engine"), [("cpu,cpu", "engine 0 on cpu"), ("cpu", "engine")])
def test_a_stream_that_goes_on_in_another_engine_ends_with_the_same_text(
    devices: str, engine: str, tmp_path: Path
) -> None:
    with RunningServer(letters_bundle(tmp_path), "--device", devices, "--frontends", "1") as server:

        def stats() -> Any:
            return server.ask("GET", "/v1/stats")[2]["models"]["letters"]

        eventually(lambda: len(stats()["engines"]) == len(devices.split(",")), within_s=60)
        eventually(lambda: dictated(server) == [BETTER], within_s=60)
        before = counted(server, "decoded")
        streams = [Dictation(server) for _ in range(4)]
        for stream in streams:
            stream.send(np.concatenate([WORD, said("_")] * 8))
        kill(server, engine)
        for stream in streams:
            stream.send(np.concatenate([WORD, SILENCE, WORD]))
        for stream in streams:
            assert texts(stream.end()) == [" ".join(["ab"] * 9), "ab"]
        assert stats()["streams"]["resumed"] >= 1
        assert stats()["streams"]["lost"] == 0
        # Nothing was greedy for want of a beam. The counts of an engine that died are gone.
        assert counted(server, "decoded") in (8, before + 8)


@pytest.mark.thorough
def test_an_end_that_waits_too_long_is_greedy(tmp_path: Path) -> None:
    with RunningServer(letters_bundle(tmp_path, max_wait_s=0.2)) as server:
        # It has been started, and is stopped.
        eventually(lambda: len(beams_of(server)) == 1, within_s=30)
        process = beam_of(server)
        os.kill(process, signal.SIGSTOP)
        stream = Dictation(server)
        stream.send(np.concatenate([WORD, SILENCE, WORD]))
        events = stream.end()
        assert "".join(event["text"] for event in events) == "aaaa"
        assert texts(events) == []
        assert counted(server, "late") + counted(server, "refused") == 2


def test_the_python_clients_send_hot_words(server: RunningServer) -> None:
    with Client(f"http://{server.host}:{server.port}") as client, client.streams() as shared:
        for hot_words, expected in ((None, "ab"), ([HotWord("aa", 6.0), "b"], "aa")):
            for stream in (client.stream("letters", hot_words=hot_words), shared.open("letters", hot_words=hot_words)):
                with stream:
                    stream.send(WORD)
                    assert texts([result.event for result in stream.end() if result.event]) == [expected]

"""A chain whose first part is live, over real sockets: segments, their answers and errors, and how streams end."""

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from playwright.sync_api import expect
from tritonclient.utils import InferenceServerException
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from penstock import Client, load_chain
from penstock.client.stream_results import SegmentAnswer, SegmentError, SegmentResult, SegmentStep, StreamResult
from penstock.core.errors import ComputeFailed, Overloaded, Unreachable
from penstock.core.spec import Array
from penstock.verify.chromium import open_chromium
from tests.support.page import Watch, url_of
from tests.support.processes import kill
from tests.support.segmented import CHUNK, RAISES, RATE_HZ, SLOW, UNFIT, Segmented, sound, write_segmented
from tests.support.serving import RunningServer

PATH = "/v1/apps/count-on/stream"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Segmented:
    return write_segmented(tmp_path_factory.mktemp("segmented"))


@pytest.fixture(scope="module")
def server(files: Segmented) -> Iterator[RunningServer]:
    with RunningServer(None, *files.arguments, "--frontends", "0", "--grpc-port", "0") as server:
        yield server


@pytest.fixture(scope="module")
def tokens(files: Segmented) -> Callable[..., list[list[int]]]:
    """The answers of each segment of some bursts, part by part in this process."""
    chain = load_chain(files.chain, files.bundles)
    return lambda *bursts: [answer["token"].tolist() for answer in chain.predict(sound(*bursts))]


def url(server: RunningServer) -> str:
    return f"http://{server.host}:{server.port}"


def heard(server: RunningServer, signal_T: Array, cut: int = CHUNK, chain: str = "count-on") -> list[StreamResult]:
    with Client(url(server)) as client, client.stream(chain) as stream:
        for at in range(0, len(signal_T), cut):
            stream.send(signal_T[at : at + cut])
        return list(stream.end())


def of_segments(results: list[StreamResult]) -> dict[int, list[SegmentResult]]:
    found: dict[int, list[SegmentResult]] = {}
    for result in results:
        if isinstance(result, SegmentResult):
            found.setdefault(result.segment, []).append(result)
    return found


def stats(server: RunningServer, name: str) -> dict[str, Any]:
    return server.ask("GET", "/v1/stats")[2]["models"][name]


def soon(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end_s = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.02)


def started(server: RunningServer, path: str = PATH) -> ClientConnection:
    stream = connect(f"ws://{server.host}:{server.port}{path}", compression=None, legacy=True)
    stream.send('{"type":"start"}')
    assert json.loads(stream.recv(10))["type"] == "ready"
    return stream


def stream_of(stream: ClientConnection) -> Iterator[str | bytes]:
    while True:
        yield stream.recv(10)


def stream_until_closed(stream: ClientConnection) -> Iterator[str | bytes]:
    with suppress(ConnectionClosed):
        yield from stream_of(stream)


def send(stream: ClientConnection, signal_T: Array) -> int:
    pieces = range(0, len(signal_T), CHUNK)
    for number, at in enumerate(pieces):
        stream.send(number.to_bytes(4, "little") + signal_T[at : at + CHUNK].tobytes())
    return len(pieces)


def test_each_segment_is_answered_as_part_by_part(
    server: RunningServer, tokens: Callable[..., list[list[int]]]
) -> None:
    before = stats(server, "count-on"), stats(server, "counter"), stats(server, "beeps")
    results = heard(server, sound(2, 1, 4))
    bursts = [beeps for result in results if result.event for beeps in result.event["bursts"]]
    assert bursts == [2, 1, 4]
    segments, expected = of_segments(results), tokens(2, 1, 4)
    assert list(segments) == [0, 1, 2]
    ends = [result.seq for result in results if result.event]
    for number, (*steps, answer) in segments.items():
        assert all(isinstance(step, SegmentStep) and step.part == "counter" for step in steps)
        assert [step.outputs["token"] for step in steps if isinstance(step, SegmentStep)] == expected[number]
        assert isinstance(answer, SegmentAnswer)
        assert (answer.part, answer.final, answer.seq) == ("counter", True, ends[number])
        assert answer.ended == ("end" if expected[number][-1] % 7 == 0 else "max_steps")
        assert answer.reply["token"] == expected[number]
    after = stats(server, "count-on"), stats(server, "counter"), stats(server, "beeps")
    assert after[0]["answered"] - before[0]["answered"] == 3
    assert after[1]["answered"] - before[1]["answered"] == 3
    assert after[2]["streams"]["opened"] - before[2]["streams"]["opened"] == 1


def test_several_streams_at_once_are_answered_as_one(
    server: RunningServer, tokens: Callable[..., list[list[int]]]
) -> None:
    all_bursts = [(1, 2), (3,), (5, 6, 1), (4, 4), (), (2, 3)]
    got: dict[int, list[StreamResult]] = {}

    def run(index: int) -> None:
        got[index] = heard(server, sound(*all_bursts[index]), cut=177 + 311 * index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(all_bursts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, bursts in enumerate(all_bursts):
        answers = [result for result in got[index] if isinstance(result, SegmentAnswer)]
        by_segment = sorted(answers, key=lambda answer: answer.segment)
        assert [answer.reply["token"] for answer in by_segment] == (tokens(*bursts) if bursts else [])
    # Nothing of them is left.
    for part in ("beeps", "counter"):
        soon(lambda part=part: stats(server, part)["slots"]["in_use"] == 0)


def test_a_segment_that_fails_gets_an_error_and_the_stream_goes_on(
    server: RunningServer, tokens: Callable[..., list[list[int]]]
) -> None:
    segments = of_segments(heard(server, sound(2, RAISES, UNFIT, 1)))
    first, raised, unfit, last = (segments[number][-1] for number in range(4))
    assert isinstance(raised, SegmentError)
    assert isinstance(unfit, SegmentError)
    assert isinstance(raised.error, ComputeFailed)
    assert str(raised.error).startswith("Part 'counter': The application's network failed on this input")
    assert isinstance(unfit.error, ComputeFailed)
    assert str(unfit.error).startswith("The segments of chain 'count-on' give no input: digits has 100 length")
    assert isinstance(first, SegmentAnswer)
    assert isinstance(last, SegmentAnswer)
    assert [first.reply["token"], last.reply["token"]] == [tokens(2)[0], tokens(2, 1, 1, 1)[-1]]


def test_functions_lists_and_joins_have_their_place(server: RunningServer, files: Segmented) -> None:
    expected = load_chain(files.long, files.bundles).predict(sound(2, 3))
    segments = of_segments(heard(server, sound(2, 3), chain="long"))
    for number, beeps in ((0, 2), (1, 3)):
        results = segments[number]
        answers = [(each.part, each.final, each.reply) for each in results if isinstance(each, SegmentAnswer)]
        double, counter, last = answers
        assert double == ("double", False, [{"twice": 2.0 * beeps}] * beeps)
        assert counter[:2] == ("counter", False)
        assert last == ("long", True, {name: int(value) for name, value in expected[number].items()})
        steps = [each.outputs["token"] for each in results if isinstance(each, SegmentStep)]
        assert steps == counter[2]["token"]
        assert len(steps) == last[2]["steps"]


def test_more_segments_than_allowed_are_rejected(server: RunningServer) -> None:
    # The first takes ten seconds, and the sound of the second comes at once.
    refused = stats(server, "one")["refused"]
    with Client(url(server)) as client, client.stream("one") as stream:
        stream.send(sound(SLOW, 1))
        results = iter(stream)
        while not isinstance(result := next(results), SegmentError):
            pass
        assert (result.segment, result.part) == (1, "counter")
        assert isinstance(result.error, Overloaded)
        assert str(result.error).startswith("Chain 'one' takes at most 1 segments of a stream at once")
        # The first goes on.
        while not isinstance(result := next(results), SegmentStep):
            pass
        assert result.segment == 0
    assert stats(server, "one")["refused"] - refused == 1


def test_a_budget_that_no_network_keeps_is_an_error_of_each_segment(server: RunningServer) -> None:
    with started(server, "/v1/apps/hasty/stream") as stream:
        count = send(stream, sound(1, 2))
        stream.send('{"type":"end"}')
        said = [json.loads(text) for text in stream]
    errors = [each for each in said if each["type"] == "error"]
    assert [(each["segment"], each["status"], each["part"]) for each in errors] == [
        (0, 504, "counter"),
        (1, 504, "counter"),
    ]
    assert errors[0]["error"].startswith("A budget of 0.001 ms is shorter than the own time of the chain's networks")
    assert [each["type"] for each in said].count("result") == count + 1
    assert stream.close_code == 1000


def test_binary_streams_have_segments_too(server: RunningServer, tokens: Callable[..., list[list[int]]]) -> None:
    with Client(url(server)) as client, client.stream("count-on", events="binary") as stream:
        stream.send(sound(3))
        results = list(stream.end())
    assert sum(len(result.output) for result in results if result.output is not None) == 2 * 64
    assert [result.reply["token"] for result in results if isinstance(result, SegmentAnswer)] == tokens(3)


def test_the_end_waits_for_the_segments_and_then_closes(server: RunningServer) -> None:
    with started(server) as stream:
        # Without the silence behind it: the end of the stream is that of the segment.
        count = send(stream, sound(SLOW)[: -RATE_HZ // 4])
        stream.send('{"type":"end"}')
        said: list[dict[str, Any]] = []
        for text in stream:
            said.append(json.loads(text))
            if said[-1]["type"] == "step" and said[-2].get("last"):
                # The slot of the live part is free already.
                soon(
                    lambda: stats(server, "beeps")["streams"]["open"] == stats(server, "beeps")["slots"]["in_use"] == 0
                )
    assert stream.close_code == 1000
    assert said[-1] == {"type": "end", "chunks": count}
    last = next(at for at, each in enumerate(said) if each.get("last") and each["type"] == "result")
    assert said[last]["event"] == {"bursts": [SLOW]}
    assert [each["type"] for each in said[last + 1 :]] == ["step"] * 50 + ["answer", "end"]
    assert said[-2]["ended"] == "max_steps"
    soon(lambda: stats(server, "beeps")["streams"]["open"] == 0)


def test_a_client_that_leaves_cancels_what_is_under_way(server: RunningServer) -> None:
    before = stats(server, "count-on")
    outputs = stats(server, "counter")["generated"]["outputs"]
    stream = started(server)
    last = send(stream, sound(SLOW)) - 1
    while (said := json.loads(stream.recv(10)))["type"] != "result" or said["seq"] < last:
        pass
    while json.loads(stream.recv(10))["type"] != "step":
        pass
    assert stats(server, "counter")["generated"]["in_progress"] == 1
    stream.close()
    soon(lambda: stats(server, "counter")["slots"]["in_use"] == 0)
    soon(lambda: stats(server, "counter")["generated"]["in_progress"] == 0)
    # It would be 50 of them.
    assert stats(server, "counter")["generated"]["outputs"] - outputs < 45
    after = stats(server, "count-on")
    assert after["answered"] == before["answered"]
    soon(lambda: stats(server, "beeps")["streams"]["open"] == 0)


def test_a_slow_client_delays_no_other(server: RunningServer, tokens: Callable[..., list[list[int]]]) -> None:
    stream = started(server)
    send(stream, sound(SLOW, 2))
    # It reads nothing for a while; the others get theirs.
    answers = [each for each in heard(server, sound(1)) if isinstance(each, SegmentAnswer)]
    assert [answer.reply["token"] for answer in answers] == tokens(1)
    stream.send('{"type":"end"}')
    said = [json.loads(text) for text in stream]
    assert stream.close_code == 1000
    assert [each["segment"] for each in said if each["type"] == "answer"] in ([0, 1], [1, 0])


def test_the_page_shows_the_answers_of_each_segment(server: RunningServer, watch: Watch, tmp_path: Path) -> None:
    import soundfile

    soundfile.write(tmp_path / "beeps.wav", sound(2, RAISES), RATE_HZ)
    with open_chromium() as browser:
        page = browser.new_page()
        watch.look_at(page)
        page.goto(url_of(server))
        page.get_by_label("Application").select_option("long")
        page.get_by_label("or a sound file").set_input_files(tmp_path / "beeps.wav")
        page.get_by_role("button", name="Play it").click()
        expect(page.locator(".stream-state")).to_contain_text("all that was heard is answered", timeout=20_000)
        lines = page.locator("ol.reply li").all_inner_texts()
    assert watch.complaints == []
    assert lines[:2] == ['{"bursts":[2]}', '1 double [{"twice":4},{"twice":4}]']
    assert lines[2].startswith('1 counter {"token":[')
    assert lines[3].startswith('1 long {"sum":8,"steps":')


def test_it_takes_no_single_requests(server: RunningServer) -> None:
    sentence = (
        "'count-on' begins with a live signal, and takes no single requests; open a stream at /v1/apps/count-on/stream."
    )
    rejected = [
        server.ask("POST", "/v1/apps/count-on", b"[1]", {"Content-Type": "application/json"}),
        server.ask("POST", "/v1/models/count-on:predict", b'{"instances": [[1]]}', {}),
        server.ask("POST", "/v2/models/count-on/infer", b'{"inputs": []}', {}),
    ]
    assert [(status, reply["error"]) for status, _, reply in rejected] == [(400, sentence)] * 3
    assert server.process.stdout is not None
    triton: Any = tritonclient.grpc
    rpc = triton.InferenceServerClient(f"127.0.0.1:{server.process.stdout.readline().split()[-1]}")
    given = triton.InferInput("sound", [1, CHUNK], "INT16")
    given.set_data_from_numpy(np.zeros((1, CHUNK), np.int16))
    with pytest.raises(InferenceServerException, match="begins with a live signal, and takes no single requests"):
        rpc.infer("count-on", [given])
    rpc.close()
    with Client(url(server)) as client:
        app = next(app for app in client.apps() if app["name"] == "count-on")
    assert app["live"] == {"rate_hz": 8000, "sound": True, "speech": False}
    assert app["parts"] == ["beeps", "counter"]
    assert app["segments"] == {"max_under_way": 4}
    assert "/v1/apps/count-on" not in server.ask("GET", "/openapi.json")[2]["paths"]
    # The recordings of its live part are there to try.
    examples = server.ask("GET", "/v1/apps/count-on/examples")[2]["examples"]
    assert [example["content_type"] for example in examples] == ["audio/wav"] * 2


def test_a_server_that_ends_answers_the_segments_first(files: Segmented) -> None:
    with RunningServer(None, *files.arguments, "--frontends", "0") as server, started(server) as stream:
        count = send(stream, sound(SLOW))
        while (said := json.loads(stream.recv(10)))["type"] != "result" or said["seq"] < count - 1:
            pass
        server.stop(signal.SIGTERM)
        rest = [json.loads(text) for text in stream_until_closed(stream)]
        assert stream.close_code == 1012
        assert rest[-1]["type"] == "answer"
        assert rest[-1]["last"]


def test_parts_are_unloaded_under_an_open_stream(files: Segmented, tmp_path: Path) -> None:
    for bundle in files.bundles:
        shutil.copytree(bundle, tmp_path / bundle.name / "1")
    options = ("--models", str(tmp_path), "--frontends", "0", str(files.chain))
    with RunningServer(None, *options) as server, Client(url(server), retries=0) as client:
        with client.stream("count-on") as stream:
            client.unload("counter")
            stream.send(sound(1))
            results = iter(stream)
            while not isinstance(result := next(results), SegmentError):
                pass
            assert isinstance(result.error, Overloaded)
            assert str(result.error).startswith("Part 'counter': The model is not loaded")
            with pytest.raises(Overloaded, match="Part 'counter': The model is not loaded"):
                client.stream("count-on")
            client.load("counter")
            # The stream went on, and so do its segments.
            stream.send(sound(3))
            while not isinstance(result := next(results), SegmentAnswer):
                assert not isinstance(result, SegmentError)
            assert result.segment == 1
            stream.send(sound(SLOW))
            while next(results).event is None:
                pass
            client.unload("beeps")
            rest: list[StreamResult] = []
            with pytest.raises(Overloaded, match="Another version is served now, or none; open another stream"):
                rest.extend(results)
            assert isinstance(rest[-1], SegmentAnswer)
            assert rest[-1].segment == 2
        with pytest.raises(Overloaded, match="The model is not loaded"):
            client.stream("count-on")


def test_an_engine_killed_in_the_middle(files: Segmented, tokens: Callable[..., list[list[int]]]) -> None:
    options = ("--device", "cpu", "--frontends", "1")
    with RunningServer(None, *files.arguments, *options) as server:
        stream = started(server)
        sent = sound(1, SLOW, 3)
        send(stream, sent)
        said: list[dict[str, Any]] = []
        # The first segment is answered, and the second has begun.
        while not {("answer", 0), ("step", 1)} <= {(each["type"], each.get("segment")) for each in said}:
            said.append(json.loads(stream.recv(10)))
        kill(server, "engine")
        soon(lambda: server.ask("GET", "/v2/health/ready")[0] == 503, 10)
        soon(lambda: server.ask("GET", "/v2/health/ready")[0] == 200, 60)
        # The live part goes on where it was, and the next segment is answered.
        more = sound(2)
        for number, at in enumerate(range(0, len(more), CHUNK), -(-len(sent) // CHUNK)):
            stream.send(number.to_bytes(4, "little") + more[at : at + CHUNK].tobytes())
        stream.send('{"type":"end"}')
        said += [json.loads(text) for text in stream]
        assert stream.close_code == 1000
        last = {each["segment"]: each for each in said if each["type"] in ("answer", "error")}
        assert sorted(last) == [0, 1, 2, 3]
        right = tokens(1, SLOW, 3, 2)
        assert [last[number]["reply"]["token"] for number in (0, 3)] == [right[0], right[3]]
        # An answer that had begun went with the engine. Whether the next segment had ended by then is left open.
        assert (last[1]["type"], last[1]["status"]) == ("error", 503)
        assert last[2]["type"] == "error" or last[2]["reply"]["token"] == right[2]


def test_a_client_begins_again_after_its_server_is_killed(
    files: Segmented, tokens: Callable[..., list[list[int]]]
) -> None:
    def run(server: RunningServer, kill_it: bool) -> list[SegmentAnswer]:
        answers: list[SegmentAnswer] = []
        with Client(url(server)) as client, client.stream("count-on") as stream:
            stream.send(sound(3, 2, 1))
            for result in iter(stream) if kill_it else stream.end():
                if isinstance(result, SegmentAnswer):
                    answers.append(result)
                    if kill_it:
                        server.stop(signal.SIGKILL)
        return answers

    with RunningServer(None, *files.arguments, "--frontends", "0") as server, pytest.raises(Unreachable):
        run(server, True)
    with RunningServer(None, *files.arguments, "--frontends", "0") as server:
        again = run(server, False)
    # The same sound ends the same segments, whose answers do not depend on the server.
    assert sorted((each.segment, each.reply["token"]) for each in again) == list(enumerate(tokens(3, 2, 1)))


def test_a_segment_on_another_engine_that_is_killed(files: Segmented, tokens: Callable[..., list[list[int]]]) -> None:
    with RunningServer(None, *files.arguments, "--device", "cpu,cpu", "--frontends", "1") as server:

        def in_use(name: str) -> list[int]:
            return [engine["slots"]["in_use"] for engine in stats(server, name)["engines"]]

        with started(server) as stream:
            mine = in_use("beeps").index(1)
            send(stream, sound(SLOW, SLOW, SLOW))
            soon(lambda: in_use("counter")[1 - mine] > 0)
            kill(server, f"engine {1 - mine} on cpu")
            more = sound(2)
            for number, at in enumerate(range(0, len(more), CHUNK), -(-len(sound(SLOW, SLOW, SLOW)) // CHUNK)):
                stream.send(number.to_bytes(4, "little") + more[at : at + CHUNK].tobytes())
            stream.send('{"type":"end"}')
            said = [json.loads(text) for text in stream]
        assert stream.close_code == 1000
        last = {each["segment"]: each for each in said if each["type"] in ("answer", "error")}
        assert sorted(last) == [0, 1, 2, 3]
        right = tokens(SLOW, SLOW, SLOW, 2)
        assert last[3]["type"] == "answer"
        for number, each in last.items():
            # What had given an output is lost; the other engine answers what had not.
            if each["type"] == "answer":
                assert each["reply"]["token"] == right[number]
                continue
            assert (each["status"], each["part"]) == (503, "counter")
            assert each["error"] == "Part 'counter': The engine that it was on stopped; send it again."

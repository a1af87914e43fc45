"""Ends of utterances in the order of their stream, with and without a beam process that answers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import ComputeFailed, RequestError
from penstock.core.speech.endpoint_beam import EndpointBeam, Redecoded
from penstock.core.speech.hot_words import HotWord
from penstock.core.speech.utterance_decoder import UtteranceFrames
from penstock.serve.frontend.beam_process import BeamDone, BeamJob, BeamModel, BeamOutcome
from penstock.serve.streams.actions import Action, Actions, Close, Redecode, Send
from penstock.serve.streams.endpoint_queue import LIVE, RECORDING, EndpointQueue, QueueLimits

FRAMES = UtteranceFrames(np.zeros((1, 3), np.float16), np.zeros(1, np.int32))
MOST = LIVE.actions or 0


class Process:
    """A beam process whose answers come when a test says so."""

    def __init__(self) -> None:
        self.jobs: list[BeamJob] = []
        self.full = False

    def submit(
        self, model: int, frames: UtteranceFrames, hot_words: Sequence[HotWord], limit_s: float, done: BeamDone
    ) -> BeamJob | None:
        if self.full:
            return None
        self.jobs.append(BeamJob(model, frames, hot_words, limit_s, done))
        return self.jobs[-1]

    def answer(self, text: str | None) -> None:
        found = None if text is None else Redecoded(text=text, words=())
        self.jobs.pop(0).finish(found, BeamOutcome.DECODED if found else BeamOutcome.LATE)


class Stream:
    """Executes actions as a live stream does."""

    def __init__(self, process: Process | None, limits: QueueLimits = LIVE) -> None:
        self.sent: list[str] = []
        self.outcomes: list[str] = []
        self.failed: list[RequestError] = []
        self.closed = False
        model: Any = process and BeamModel(process, 1, EndpointBeam(frame_s=0.02))  # pyright: ignore
        self.queue = EndpointQueue(
            model, self.execute, self.failed.append, lambda outcome: self.outcomes.append(outcome.value), limits
        )

    def execute(self, action: Action) -> None:
        if isinstance(action, Close):
            self.closed = True
            self.queue.cancel()
        else:
            assert isinstance(action, Send)
            self.sent.append(action.payload.decode())

    def put(self, *actions: Action) -> None:
        for action in actions:
            if isinstance(action, Redecode) or self.queue.busy:
                self.queue.add(action)
            else:
                self.execute(action)


def message(text: str) -> Send:
    return Send(text.encode(), False)


def end(greedy: str, *after: Action, frames: UtteranceFrames | None = FRAMES) -> Redecode:
    def then(redecoded: Redecoded | None) -> Actions:
        return (message(greedy if redecoded is None else redecoded.text), *after)

    return Redecode(frames, (), then)


def test_what_follows_an_end_waits_for_its_better_text() -> None:
    process = Process()
    stream = Stream(process)
    stream.put(message("a"), end("b"), message("c"), end("d"), message("e"), Close(1000, ""))
    assert stream.sent == ["a"]
    process.answer("B")
    assert (stream.sent, stream.closed) == (["a", "B", "c"], False)
    process.answer(None)
    assert (stream.sent, stream.closed) == (["a", "B", "c", "d", "e"], True)
    assert stream.outcomes == ["decoded", "late"]
    assert not stream.queue.busy


def test_actions_of_an_end_come_before_those_that_waited() -> None:
    process = Process()
    stream = Stream(process)
    stream.put(end("a", end("b"), message("c")), message("d"))
    process.answer("A")
    assert stream.sent == ["A"]
    process.answer("B")
    assert stream.sent == ["A", "B", "c", "d"]


def test_without_a_beam_or_without_frames_or_with_a_full_queue_nothing_waits() -> None:
    process = Process()
    process.full = True
    for stream, frames in ((Stream(None), FRAMES), (Stream(Process()), None), (Stream(process), FRAMES)):
        stream.put(end("a", frames=frames), message("b"))
        assert stream.sent == ["a", "b"]
    assert stream.outcomes == ["refused"]


def test_frames_are_not_needed_to_keep_the_order() -> None:
    process = Process()
    stream = Stream(process)
    stream.put(end("a"), end("b", frames=None), message("c"))
    assert stream.sent == []
    process.answer("A")
    assert stream.sent == ["A", "b", "c"]


def test_the_end_of_a_stream_settles_what_waits_with_greedy_texts() -> None:
    process = Process()
    stream = Stream(process)
    stream.put(end("a"), message("b"), end("c"))
    stream.queue.settle()
    assert stream.sent == ["a", "b", "c"]
    # The late answer is dropped.
    process.answer("A")
    assert stream.sent == ["a", "b", "c"]


def test_a_cancelled_stream_gets_nothing() -> None:
    process = Process()
    stream = Stream(process)
    stream.put(end("a"), message("b"))
    stream.queue.cancel()
    process.answer("A")
    assert stream.sent == []
    assert not stream.queue.busy


def test_a_failure_of_the_applications_function_ends_the_stream() -> None:
    def then(redecoded: Redecoded | None) -> Actions:
        raise ComputeFailed("broken")

    process = Process()
    stream = Stream(process)
    stream.put(Redecode(FRAMES, (), then), message("b"))
    process.answer("A")
    assert [str(error) for error in stream.failed] == ["broken"]
    assert stream.sent == []


@pytest.mark.parametrize("ends", [1_000])
def test_many_ends_take_no_deep_stack(ends: int) -> None:
    process = Process()
    stream = Stream(process, QueueLimits(actions=None))
    stream.put(end("first"), *(end("a", frames=None) for _ in range(ends)))
    process.answer("A")
    assert len(stream.sent) == ends + 1


def test_what_waits_beyond_the_limit_gets_the_greedy_texts_in_order() -> None:
    process = Process()
    stream = Stream(process)
    stream.put(end("a"))
    for number in range(MOST - 1):
        stream.put(message(str(number)))
    stream.put(end("b"))
    assert stream.sent == []
    stream.put(message("c"))
    assert stream.sent == ["a", *map(str, range(MOST - 1)), "b", "c"]
    assert stream.outcomes == ["late", "refused"]
    assert not stream.queue.busy
    # The next utterance is decoded again.
    stream.put(end("d"), message("e"))
    process.answer("A")
    process.answer("D")
    assert stream.sent[-2:] == ["D", "e"]
    assert stream.outcomes == ["late", "refused", "decoded"]


def test_bytes_that_wait_are_bounded_and_counted_once() -> None:
    process = Process()
    stream = Stream(process)
    frames = UtteranceFrames(np.zeros((LIVE.bytes // 8, 3), np.float16), np.zeros(0, np.int32))
    stream.put(message("before"), end("a"), end("b", frames=frames), message("c" * (LIVE.bytes // 4)))
    assert stream.sent == ["before"]
    stream.put(message("d"))
    assert stream.outcomes == ["late", "refused"]
    assert [text[0] for text in stream.sent] == ["b", "a", "b", "c", "d"]
    # All of it was sent: as much may wait again.
    stream.put(end("e"), message("f" * LIVE.bytes))
    assert [text[0] for text in stream.sent] == ["b", "a", "b", "c", "d"]
    process.answer(None)
    process.answer("E")
    assert [text[0] for text in stream.sent[5:]] == ["E", "f"]


def test_a_recording_waits_for_all_its_utterances() -> None:
    process = Process()
    stream = Stream(process, RECORDING)
    stream.put(*(end(str(number)) for number in range(2 * MOST)))
    for number in range(2 * MOST):
        process.answer(f"better {number}")
    assert stream.sent == [f"better {number}" for number in range(2 * MOST)]

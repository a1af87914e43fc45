"""Segments of a live stream: what is refused when declared, the protocol of their stream, their way through a chain."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock import Application, Chain, ChainStep, Live, Segments, TensorSpec
from penstock.client.retry import ClientConfig
from penstock.client.stream_results import SegmentAnswer, SegmentError, SegmentStep, segment_result
from penstock.core.chains.chain_run import ChainPlan
from penstock.core.errors import ApplicationError, ComputeFailed, InvalidInput, Overloaded, RequestError, TooLate
from penstock.core.spec import Array
from penstock.core.streams.segments import SegmentFinder
from penstock.serve.exchange.peer import UNREAD_BYTES
from penstock.serve.registry.chain_request import StepReport
from penstock.serve.registry.segment_runs import SegmentRuns
from penstock.serve.streams.actions import BeginSegment
from penstock.serve.streams.session import StreamState
from penstock.serve.table.slots import CUT, OK
from penstock.serve.websocket.stream_connection import StreamConnection
from tests.support.generating import COUNTER
from tests.support.session import CHUNK, talk
from tests.support.streams import BUDGET_NS, Caller, Wire, World

ONE = np.arange(CHUNK, dtype=np.int16)


def tensor(*shape: int, name: str = "", dtype: str = "float32") -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape, meaning="numbers", name=name)


def app(name: str, input: TensorSpec, output: TensorSpec, **fields: Any) -> Application:
    return Application(name=name, input=input, output=output, model=":none", **fields)


def nothing(*_: Any) -> Any:
    raise AssertionError("never called")


LIVE = app("ear", tensor(8, name="sound"), tensor(8, 2, name="scores"), live=Live(rate_hz=1000), chunks=2)
FIRST = app("first", tensor(4, name="a"), tensor(3, name="b"))
SECOND = app("second", tensor(3, name="c"), tensor(2, name="d"), reply=lambda output: {"d": output.tolist()})
SEGMENTS = Segments(find=nothing)


def test_a_live_chain_is_its_live_part_to_a_client_and_single_requests_behind() -> None:
    steps = (ChainStep(part=LIVE), ChainStep(part=FIRST), ChainStep(part=SECOND))
    chain = Chain(name="hear", steps=steps, segments=SEGMENTS, description="About.")
    parts = {"ear": LIVE, "first": FIRST, "second": SECOND}
    made = chain.declare(parts)
    assert (made.name, made.description, made.live, made.input) == ("hear", "About.", LIVE.live, LIVE.input)
    later = chain.later
    assert [step.name for step in later.steps] == ["first", "second"]
    plan = ChainPlan(chain=later, parts=parts)
    assert (plan.application.input, plan.application.output) == (FIRST.input, SECOND.output)


def test_a_function_may_come_first_behind_the_live_part_where_a_segment_is_declared() -> None:
    steps = (ChainStep(part=LIVE), ChainStep(run=nothing), ChainStep(part=SECOND, feed=nothing))
    chain = Chain(name="hear", steps=steps, segments=SEGMENTS, input=tensor(5, name="words"))
    plan = ChainPlan(chain=chain.later, parts={"ear": LIVE, "second": SECOND})
    assert list(plan.application.inputs) == ["words"]
    with pytest.raises(ApplicationError, match="begins with the function 'nothing' and declares no input"):
        Chain(name="hear", steps=steps, segments=SEGMENTS)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"segments": None}, r"has the live application 'ear'; a live part is the first of a chain alone, with seg"),
        ({"segments": nothing}, r"has segments=<function nothing.*; give Segments\(find=\.\.\.\)"),
        ({"steps": (ChainStep(part=FIRST), ChainStep(part=SECOND))}, "has segments, but 'first' is not live"),
        (
            {"steps": (ChainStep(part=LIVE), ChainStep(part=FIRST), ChainStep(part=LIVE, name="again", feed=nothing))},
            "has the live part 'ear' twice",
        ),
        (
            {
                "steps": (
                    ChainStep(part=LIVE),
                    ChainStep(part=FIRST),
                    ChainStep(
                        part=app("ear2", tensor(8, name="s"), tensor(8, 2, name="t"), live=LIVE.live, chunks=2),
                        feed=nothing,
                    ),
                )
            },
            "has the live application 'ear2'; a live part is the first of a chain alone",
        ),
        ({"steps": (ChainStep(part=LIVE),)}, "has no part after the live 'ear'"),
        ({"steps": (ChainStep(part=LIVE), ChainStep(run=nothing)), "output": tensor(1)}, "has no part after the live"),
        ({"steps": (ChainStep(part=LIVE, feed=nothing), ChainStep(part=FIRST))}, "is not the live part alone"),
        ({"steps": (ChainStep(run=nothing), ChainStep(part=FIRST))}, "is not the live part alone"),
        (
            {"steps": (ChainStep(part=LIVE), ChainStep(part=SECOND), ChainStep(part=FIRST))},
            r"feeds 'first' with the output of 'second', which does not fit: d is float32\[2\]",
        ),
        ({"input": tensor(7, name="x")}, r"feeds 'first' with the chain's input.*x is float32\[7\]"),
        ({"join": nothing}, "has a join and no output"),
        ({"max_body_bytes": 7}, "has segments, which no request carries"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_declared(fields: dict[str, Any], sentence: str) -> None:
    steps = (ChainStep(part=LIVE), ChainStep(part=FIRST), ChainStep(part=SECOND))
    declared: dict[str, Any] = {"name": "hear", "steps": steps, "segments": SEGMENTS} | fields
    with pytest.raises(ApplicationError, match=sentence):
        Chain(**declared)


def test_a_part_by_name_is_checked_once_it_is_known() -> None:
    chain = Chain(name="hear", steps=(ChainStep(part="ear"), ChainStep(part="second")), segments=SEGMENTS)
    chain.check_parts({"ear": LIVE, "second": SECOND})
    with pytest.raises(ApplicationError, match="has segments, but 'ear' is not live"):
        chain.check_parts({"ear": FIRST, "second": SECOND})
    with pytest.raises(ApplicationError, match="has the live application 'second'"):
        chain.check_parts({"ear": LIVE, "second": LIVE})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"find": 3}, "has find='3'; it must be a function"),
        ({"budget_ms": 0}, "has budget_ms=0; it must be a number of milliseconds above 0"),
        ({"budget_ms": float("nan")}, "has budget_ms=nan"),
        ({"max_under_way": 0}, "has max_under_way=0; it must be a whole number, 1 to 64"),
        ({"max_under_way": True}, "has max_under_way=True"),
    ],
)
def test_segments_out_of_range_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        Segments(**cast(Any, {"find": nothing} | fields))


def test_a_function_that_fails_or_gives_no_list_is_named() -> None:
    with pytest.raises(ComputeFailed, match="The segments of chain 'hear' failed on an event") as caught:
        SegmentFinder("hear", SEGMENTS)("an event", False)
    assert isinstance(caught.value.__cause__, AssertionError)
    with pytest.raises(ComputeFailed, match="failed on an event"):
        SegmentFinder("hear", Segments(find=lambda event, memory, last: None))("an event", False)  # pyright: ignore[reportArgumentType, reportReturnType, reportCallIssue]
    with pytest.raises(ComputeFailed, match="give a str, not a list of inputs"):
        SegmentFinder("hear", Segments(find=lambda event, memory, last: ("text", memory)))("an event", False)


def each_second(event: Any, memory: Any, last: bool) -> tuple[list[Any], Any]:
    """A segment for each two frames."""
    frames = (memory or 0) + len(event or ())
    return [frames] * (frames // 2), frames % 2


def test_segments_follow_the_result_that_ended_them() -> None:
    stream = talk(segments=Segments(find=each_second))
    stream.start()
    stream.send(0, ONE[:1])
    stream.send(1, ONE[:4])
    stream.answer_all()
    assert stream.segments == [(0, 1, 5), (1, 1, 5)]
    assert [type(action).__name__ for action in stream.actions[-3:]] == ["Send", "BeginSegment", "BeginSegment"]
    stream.segment_ended()
    stream.segment_ended()
    assert stream.session.state is StreamState.FLOWING
    stream.send(2, ONE[:1])
    stream.end()
    stream.answer_all()
    assert stream.segments[2:] == [(2, 2, 2)]
    # All is answered but the segment.
    assert stream.session.state is StreamState.SETTLING
    assert stream.sent[-1] == {"type": "result", "seq": 3, "event": None, "last": True}
    assert not stream.closed
    stream.segment_ended()
    assert stream.sent[-1] == {"type": "end", "chunks": 3}
    assert stream.closed == [(1000, "")]
    assert stream.session.state is StreamState.OVER


def test_binary_results_have_segments_too() -> None:
    stream = talk(segments=Segments(find=each_second))
    stream.start(events="binary")
    stream.send(0, ONE[:2])
    stream.answer_all()
    assert isinstance(stream.sent[-1], bytes)
    assert stream.segments == [(0, 0, 2)]


def test_a_server_that_ends_the_stream_waits_for_the_segments() -> None:
    stream = talk(segments=Segments(find=each_second))
    stream.start()
    stream.send(0, ONE[:2])
    stream.finish(1001, "down")
    stream.answer_all()
    stream.finish(1012, "again")
    assert not stream.closed
    stream.segment_ended()
    assert stream.closed == [(1001, "down")]


def test_a_function_that_fails_ends_the_stream() -> None:
    stream = talk(segments=SEGMENTS)
    stream.start()
    stream.send(0, ONE[:1])
    with pytest.raises(ComputeFailed, match="The segments of chain 'hark' failed"):
        stream.answer_all()


@dataclass
class Scripted:
    """A chain whose requests a test answers."""

    chain: Chain
    parts: dict[str, Application]
    refuses: RequestError | None = None
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    cancelled: list[int] = field(default_factory=list[int])
    rejected: list[RequestError] = field(default_factory=list[RequestError])
    broken: int = 0

    def __post_init__(self) -> None:
        plan = ChainPlan(chain=self.chain.later, parts=self.parts)
        self.name, self.segments, self.steps = self.chain.name, self.chain.segments, SimpleNamespace(plan=plan)
        self.unpacked = plan.unpacked

    def submit_rows(
        self, chunks: Array, finished: Any, arrival_ns: int, budget_ns: int | None, **how: Any
    ) -> Callable[[], None]:
        if self.refuses is not None:
            raise self.refuses
        number = len(self.requests)
        self.requests.append({"chunk": chunks[0], "finished": finished, "arrival_ns": arrival_ns} | how)
        return lambda: self.cancelled.append(number)

    def reply(self, output: Any) -> Any:
        application = self.steps.plan.application
        return (application.reply or (lambda given: given.tolist()))(output)

    def count_rejection(self, error: RequestError) -> None:
        self.rejected.append(error)

    def count_broken_reply(self) -> None:
        self.broken += 1

    def report(self, request: int, name: str, error: RequestError | None = None, results: Any = ()) -> None:
        self.requests[request]["observe"](StepReport(name=name, duration_ns=1, rows=1, error=error, results=results))


class Scene:
    """A chain of two parts behind a live one, and what it sent."""

    def __init__(self, *, max_under_way: int = 2, **fields: Any) -> None:
        steps = (ChainStep(part=LIVE), ChainStep(part=FIRST), ChainStep(part=SECOND))
        segments = Segments(find=nothing, max_under_way=max_under_way)
        declared: dict[str, Any] = {"name": "hear", "steps": steps, "segments": segments} | fields
        chain = Chain(**declared)
        applications = [step.part for step in chain.steps if isinstance(step.part, Application)]
        self.chain = Scripted(chain, {each.name: each for each in applications})
        self.sent: list[dict[str, Any]] = []
        self.ended = 0
        self.runs = SegmentRuns(cast(Any, self.chain), lambda text: self.sent.append(json.loads(text)), self._end)

    def _end(self) -> None:
        self.ended += 1

    def begin(self, number: int, value: Any = (1, 2, 3, 4)) -> None:
        self.runs.begin(BeginSegment(number, 10 + number, value), 1_000)


def test_each_part_answers_and_the_last_one_ends_the_segment() -> None:
    scene = Scene()
    scene.begin(0)
    (request,) = scene.chain.requests
    assert request["chunk"].tolist() == [1, 2, 3, 4]
    assert (request["arrival_ns"], request["every_part"]) == (1_000, True)
    scene.chain.report(0, "first", results=[np.array([1, 2, 3], np.float32)])
    scene.chain.report(0, "second", results=[np.array([5, 6], np.float32)])
    request["finished"](np.array([[5, 6]], np.float32))
    common = {"type": "answer", "segment": 0, "seq": 10}
    assert scene.sent == [
        common | {"part": "first", "reply": [1, 2, 3], "last": False},
        common | {"part": "second", "reply": {"d": [5, 6]}, "last": True},
    ]
    assert (scene.ended, len(scene.runs)) == (1, 0)


def test_each_step_of_a_part_that_generates_is_sent_and_the_answer_says_why_it_ended() -> None:
    scene = Scene(steps=(ChainStep(part=LIVE), ChainStep(part=COUNTER)), reply=lambda answer: len(answer["token"]))
    scene.begin(3, {"digits": [1, 2]})
    (request,) = scene.chain.requests
    part = cast(Any, SimpleNamespace(application=COUNTER, name="counter"))
    output = np.zeros((), COUNTER.output.numpy_dtype)
    for status, last in ((OK, False), (CUT, True)):
        request["stream"](part, status, output, last)
    whole = scene.chain.steps.plan.application.output.empty(1)
    whole["steps"] = 2
    request["finished"](whole)
    *steps, answer = scene.sent
    step = {"type": "step", "segment": 3, "seq": 13, "part": "counter", "output": {"token": 0, "sums": [0, 0, 0, 0]}}
    assert steps == [step, step]
    assert answer["reply"] == 2
    assert (answer["ended"], answer["steps"], answer["last"]) == ("max_steps", 2, True)


def test_a_join_answers_under_the_name_of_the_chain() -> None:
    scene = Scene(join=lambda results, given: np.ones(1, np.float32), output=tensor(1, name="one"))
    scene.begin(0)
    scene.chain.report(0, "first", results=[np.array([1, 2, 3], np.float32)])
    scene.chain.report(0, "second", results=[np.array([5, 6], np.float32)])
    scene.chain.requests[0]["finished"](np.ones((1, 1), np.float32))
    assert [(said["part"], said["last"]) for said in scene.sent] == [
        ("first", False),
        ("second", False),
        ("hear", True),
    ]


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (TooLate("Part 'second': late", 1.0), {"status": 503, "retry_after_s": 1}),
        (Overloaded("Part 'second': full", 2.6), {"status": 503, "retry_after_s": 3}),
        (ComputeFailed("Part 'second': failed"), {"status": 500}),
    ],
)
def test_an_error_names_the_part_and_ends_the_segment_alone(error: RequestError, fields: dict[str, Any]) -> None:
    scene = Scene()
    scene.begin(0)
    scene.begin(1)
    scene.chain.report(0, "first", results=[np.array([1, 2, 3], np.float32)])
    scene.chain.report(0, "second", error)
    scene.chain.requests[0]["finished"](error)
    assert scene.sent[-1] == {"type": "error", "segment": 0, "seq": 10, "part": "second", "error": str(error)} | fields
    # The chain has counted it.
    assert not scene.chain.rejected
    assert (scene.ended, len(scene.runs)) == (1, 1)


def test_what_is_rejected_before_it_begins_is_counted() -> None:
    scene = Scene()
    scene.chain.refuses = Overloaded("The answer would come after 80 ms.", 2.0)
    scene.begin(0)
    scene.chain.refuses = None
    scene.begin(1, [1, 2, 3])
    for number in (2, 3, 4):
        scene.begin(number)
    assert [(said["segment"], said["status"], said["part"]) for said in scene.sent] == [
        (0, 503, "first"),
        (1, 500, "first"),
        (4, 503, "first"),
    ]
    assert scene.sent[1]["error"].startswith(
        "The segments of chain 'hear' give no input: a is float32[3]; it must be float32[4]"
    )
    assert scene.sent[2]["error"].startswith("Chain 'hear' takes at most 2 segments of a stream at once")
    assert [type(error) for error in scene.chain.rejected] == [Overloaded, ComputeFailed, Overloaded]
    assert (scene.ended, len(scene.runs)) == (3, 2)


def test_a_reply_that_fails_is_an_error_of_that_segment() -> None:
    failing = app("first", tensor(4, name="a"), tensor(3, name="b"), reply=nothing)
    steps = (ChainStep(part=LIVE), ChainStep(part=failing), ChainStep(part=SECOND))
    scene = Scene(steps=steps)
    scene.begin(0)
    scene.chain.report(0, "first", results=[np.array([1, 2, 3], np.float32)])
    assert [(said["type"], said["part"], said["status"]) for said in scene.sent] == [("error", "first", 500)]
    assert scene.chain.cancelled == [0]
    assert len(scene.chain.rejected) == 1
    scene.chain.requests[0]["finished"](np.array([[5, 6]], np.float32))
    assert len(scene.sent) == 1
    scene = Scene(reply=nothing)
    scene.begin(0)
    scene.chain.report(0, "first", results=[np.array([1, 2, 3], np.float32)])
    scene.chain.report(0, "second", results=[np.array([5, 6], np.float32)])
    scene.chain.requests[0]["finished"](np.array([[5, 6]], np.float32))
    assert scene.sent[-1]["error"].startswith("The application's reply failed")
    assert (scene.chain.broken, len(scene.chain.rejected), scene.ended) == (1, 0, 1)


def test_what_is_cancelled_sends_nothing_more() -> None:
    scene = Scene()
    scene.begin(0)
    scene.begin(1)
    scene.runs.cancel()
    assert sorted(scene.chain.cancelled) == [0, 1]
    for request in (0, 1):
        scene.chain.report(request, "first", results=[np.array([1, 2, 3], np.float32)])
        scene.chain.requests[request]["finished"](ComputeFailed("too late"))
    assert (scene.sent, scene.ended, len(scene.runs)) == ([], 0, 0)


def test_a_client_that_reads_nothing_ends_its_stream_and_its_segments() -> None:
    scene, world = Scene(max_under_way=64), World()
    at_each = Segments(find=lambda event, memory, last: ([[1, 2, 3, 4]] if event else [], memory))
    scene.chain.segments = at_each
    wire = Wire()
    admit = partial(world.streams.admit_stream, budget_ns=BUDGET_NS)
    socket = StreamConnection(admit, lambda: 0.0, cast(Any, scene.chain))
    socket.take_over(cast(asyncio.Transport, wire), b"", world.peers)
    caller = Caller(socket, wire, [0.0])
    caller.start()
    caller.chunk(0, 1)
    caller.chunk(1, 2)
    world.settle()
    assert len(scene.chain.requests) == 2
    socket.pause_writing()
    answer = np.ones(3, np.float32)
    for request in (0, 1):
        scene.chain.report(request, "first", results=[answer])
    assert not wire.ended
    # More than is kept for a client.
    wire.unread += bytes(UNREAD_BYTES)
    scene.chain.requests[0]["finished"](np.ones((1, 2), np.float32))
    assert wire.ended == "abort"
    # The first is over.
    assert 1 in scene.chain.cancelled
    scene.chain.requests[1]["finished"](np.ones((1, 2), np.float32))
    assert world.streams.open_everywhere == 0


def test_a_client_reads_the_messages_as_results_of_their_kind() -> None:
    config = ClientConfig(url="http://here", api_key=None, timeout_s=1, retries=0)
    place: dict[str, Any] = {"segment": 2, "seq": 7, "part": "tell"}
    step = segment_result({"type": "step", "output": {"token": 3}} | place, config)
    answer = segment_result({"type": "answer", "reply": "three", "last": True, "ended": "end"} | place, config)
    assert step == SegmentStep(outputs={"token": 3}, **place)
    assert answer == SegmentAnswer(reply="three", final=True, ended="end", **place)
    assert (step.event, step.last) == (None, False)
    fields = {"type": "error", "status": 503, "error": "Part 'tell': full", "retry_after_s": 3} | place
    rejected = segment_result(fields, config)
    assert isinstance(rejected, SegmentError)
    assert isinstance(rejected.error, Overloaded)
    assert (str(rejected.error), rejected.error.retry_after_s) == ("Part 'tell': full", 3)
    invalid = segment_result({"type": "error", "status": 400, "error": "no"} | place, config)
    assert isinstance(invalid, SegmentError)
    assert isinstance(invalid.error, InvalidInput)

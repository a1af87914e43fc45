"""The sequences of one model over a real slot table and engine, with a clock and clients that a test makes up."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.core.application import Application
from penstock.core.errors import ComputeFailed, DeadlineImpossible, InvalidInput, Overloaded, RequestError
from penstock.core.spec import Array, TensorSpec
from penstock.core.streams.live import Live
from penstock.runtime.executor import Executor
from penstock.serve.engine.engine import Engine
from penstock.serve.frontend.table_writer import TableWriter
from penstock.serve.grpc import oip_v2_pb2 as pb
from penstock.serve.grpc.conversion import infer_response, parse_infer
from penstock.serve.oip.inference import frames_of, place_of
from penstock.serve.streams.sequences import MAX_WAITING, SequencePlace, Sequences, frame_of
from penstock.serve.streams.streams import Streams
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import ENGINE_LOST, STREAMS_ABORTED, STREAMS_OPEN, SlotTable, TableLayout
from tests.support.clock import idle_loop
from tests.support.toys import POINT, TOTAL, Countdown, Doubler, RunningSum

MS, S = 1_000_000, 1_000_000_000
SLOTS = 8
CURVE = Costs([1, 8], [1.0 * MS, 2.0 * MS])


class Server:
    """One model: its engine runs when a test says so."""

    def __init__(self, executor: Executor, *, idle_s: float = 10.0, curve: Costs = CURVE) -> None:
        self.ns = 1_000 * S
        application = Application(
            name="sums", input=POINT, output=TOTAL, live=Live(rate_hz=20), chunks=2, model=lambda: None
        )
        self.table = SlotTable.private(TableLayout(slots=SLOTS, chunks=2, input=POINT, output=TOTAL))
        self.engine = Engine(executor, self.table, budget_ns=50 * MS, clock_ns=lambda: self.ns, costs=curve)
        self.frontend = TableWriter(self.table, budget_ns=50 * MS, wake=lambda: None)
        self.streams = Streams(
            name="sums",
            application=application,
            writer=self.frontend,
            table=self.table,
            budget_ns=50 * MS,
            batch_loop=idle_loop(lambda: self.ns),
            now_ns=lambda: self.ns,
            error_of_status=lambda status, budget_ns: ComputeFailed(f"status {status}, budget {budget_ns}"),
        )
        self.sequences = Sequences(self.streams, idle_ns=int(idle_s * S))
        self.answers: list[tuple[str, Any]] = []

    def ask(
        self, said: str, *values: float, name: int | str = 7, flags: str = "", owner: str = "", **options: Any
    ) -> Callable[[], None]:
        """Send one chunk; `flags` has S for the start and E for the end."""
        place = SequencePlace(name, "S" in flags, "E" in flags)
        chunk = np.array(values, np.float32)
        return self.sequences.put(place, chunk, partial(self._finished, said), self.ns, owner=owner, **options)

    def _finished(self, said: str, result: Array | RequestError) -> None:
        self.answers.append((said, result if isinstance(result, RequestError) else result.tolist()))

    def run(self) -> list[tuple[str, Any]]:
        """Let the engine do all that there is; gives the answers since the last call."""
        while (chosen := self.engine.tick(self.ns)).run.size + chosen.expire.size:
            self.frontend.collect()
        answers, self.answers = self.answers, []
        return answers

    @property
    def nothing_is_left(self) -> bool:
        counts = self.frontend.counts
        return self.frontend.in_use == 0 and counts[STREAMS_OPEN] == 0 and len(self.sequences) == 0


@pytest.fixture
def server() -> Server:
    return Server(RunningSum(SLOTS))


def test_each_request_gets_what_came_of_its_chunk(server: Server) -> None:
    server.ask("a", 1, 2, flags="S")
    assert server.run() == [("a", [[1, 2]])]
    server.ask("b", 3)
    assert server.run() == [("b", [[4, 2]])]
    server.ask("c", 10, 10, flags="E")
    assert server.run() == [("c", [[14, 12]])]
    assert server.nothing_is_left
    assert server.frontend.counts[STREAMS_ABORTED] == 0


def test_requests_that_are_sent_ahead_are_answered_in_order(server: Server) -> None:
    server.ask("first", 1, 1, flags="S")
    for number in range(20):
        server.ask(str(number), 1, 1)
        server.ask(f"other {number}", 5, 5, name=8, flags="S" if number == 0 else "")
    server.ask("last", flags="E")
    answers = server.run()
    assert [said for said, _ in answers if "other" not in said] == ["first", *map(str, range(20)), "last"]
    assert [out for said, out in answers if "other" not in said] == [[[n, n]] for n in [*range(1, 22), 21]]
    assert [out for said, out in answers if "other" in said] == [[[n, n]] for n in range(5, 105, 5)]


def test_a_name_and_its_digits_and_two_owners_are_different_sequences(server: Server) -> None:
    server.ask("number", 1, 1, name=7, flags="S")
    server.ask("text", 2, 2, name="7", flags="S")
    server.ask("ann", 3, 3, owner="ann", flags="S")
    server.ask("again", 1, 1, name=7)
    assert [out for _, out in server.run()] == [[[1, 1]], [[2, 2]], [[3, 3]], [[2, 2]]]
    with pytest.raises(InvalidInput, match="Sequence '8' was not started"):
        server.ask("nobody", 1, name="8")


def test_what_a_network_says_beyond_its_chunks_comes_with_the_next_answer_or_the_end() -> None:
    server = Server(Countdown(SLOTS))
    server.ask("a", 2, 2, flags="S")
    server.ask("b", 3, 3, flags="E")
    answers = dict(server.run())
    assert list(answers) == ["a", "b"]
    assert answers["a"] == [[2, 2]]
    assert answers["b"] == [[1, 0, 0, 3, 2, 2, 1, 0, 0]]
    assert server.nothing_is_left


def test_a_second_start_cancels_the_first(server: Server) -> None:
    server.ask("a", 1, 1, flags="S")
    server.run()
    server.ask("b", 1, 1)
    server.ask("c", 2, 2, flags="S")
    ((said, error),) = server.answers
    assert said == "b"
    assert "started anew before this request was answered" in str(error)
    server.ask("d", 2, 2)
    assert server.run()[1:] == [("c", [[2, 2]]), ("d", [[4, 4]])]
    assert server.frontend.in_use == 1
    assert server.frontend.counts[STREAMS_ABORTED] == 1


def test_a_second_start_that_is_refused_leaves_the_first(server: Server) -> None:
    for name in range(1, SLOTS + 1):
        server.ask(str(name), 1, 1, name=name, flags="S")
    # Its slot is not free until the engine has answered it.
    with pytest.raises(Overloaded, match="slots are in use"):
        server.ask("anew", 5, 5, name=1, flags="S")
    assert len(server.run()) == SLOTS
    server.ask("goes on", 1, 1, name=1)
    assert server.run() == [("goes on", [[2, 2]])]
    server.ask("anew", 5, 5, name=1, flags="S")
    server.sequences.close()
    with pytest.raises(Overloaded, match="shutting down"):
        server.ask("down", 7, 7, name=1, flags="S")
    assert server.run() == [("anew", [[5, 5]])]
    server = Server(RunningSum(SLOTS), curve=Costs([1, 2], [1.0 * MS, 10.0 * MS]))
    for name in (1, 2):
        server.ask(str(name), 1, 1, name=name, flags="S")
        server.run()
    with pytest.raises(Overloaded, match="2 streams are open on its engine, as many as keep 1"):
        server.ask("anew", 5, 5, name=1, flags="S", budget_ns=int(1.5 * MS))
    server.ask("goes on", 1, 1, name=1)
    assert server.run() == [("goes on", [[2, 2]])]


def test_who_hears_of_a_second_start_may_start_it_too(server: Server) -> None:
    server.ask("a", 1, 1, flags="S")
    server.run()

    def again(result: Array | RequestError) -> None:
        server.ask("inner", 3, 3, flags="S")

    server.sequences.put(SequencePlace(7, False, False), np.ones(2, np.float32), again, server.ns)
    server.ask("outer", 2, 2, flags="S")
    answers = dict(server.run())
    assert isinstance(answers["inner"], InvalidInput)
    assert answers["outer"] == [[2, 2]]
    assert (server.frontend.in_use, len(server.sequences)) == (1, 1)


def test_a_start_after_an_end_that_is_not_answered_disturbs_nobody(server: Server) -> None:
    server.ask("a", 1, 1, flags="SE")
    server.ask("b", 2, 2, flags="S")
    assert server.run() == [("a", [[1, 1]]), ("b", [[2, 2]])]


def test_silence_ends_a_sequence_but_not_while_it_waits(server: Server) -> None:
    server.ask("a", 1, 1, flags="S")
    server.run()
    server.ns += 6 * S
    server.sequences.sweep(server.ns)
    server.ask("b", 1, 1)
    server.ns += 60 * S
    server.sequences.sweep(server.ns)
    assert server.run() == [("b", [[2, 2]])]
    server.ns += 10 * S
    server.sequences.sweep(server.ns)
    assert len(server.sequences) == 1
    server.ns += 1
    server.sequences.sweep(server.ns)
    server.run()
    assert server.nothing_is_left
    with pytest.raises(InvalidInput, match="after 10 s of silence; send sequence_start"):
        server.ask("c", 1)


def test_a_client_that_is_gone_ends_nothing(server: Server) -> None:
    server.ask("a", 1, 1, flags="S")()
    leave = server.ask("b", 1, 1)
    leave()
    leave()
    server.ask("c", 1, 1, flags="E")
    assert server.run() == [("c", [[3, 3]])]
    assert server.nothing_is_left


def test_late_chunks_are_answered(server: Server) -> None:
    server.ask("a", 1, 1, flags="S", budget_ns=10 * MS)
    server.ns += 5 * S
    assert server.run() == [("a", [[1, 1]])]


def test_what_cannot_be_carried_is_refused_and_holds_nothing(server: Server) -> None:
    with pytest.raises(InvalidInput, match="send 1 to 2, or none with sequence_end"):
        server.ask("empty", flags="S")
    with pytest.raises(DeadlineImpossible):
        server.ask("impossible", 1, flags="S", budget_ns=1_000)
    for name in range(1, SLOTS + 1):
        server.ask(str(name), 1, name=name, flags="S")
    with pytest.raises(Overloaded, match="slots are in use") as raised:
        server.ask("one too many", 1, name="more", flags="S")
    assert raised.value.retry_after_s > 0
    assert len(server.sequences) == SLOTS
    for _ in range(MAX_WAITING - 1):
        server.ask("ahead", 1, name=1)
    with pytest.raises(Overloaded, match="256 requests of Sequence 1 wait"):
        server.ask("too far ahead", 1, name=1)
    assert len(server.run()) == SLOTS + MAX_WAITING - 1


def test_no_more_than_the_costs_allow() -> None:
    server = Server(RunningSum(SLOTS), curve=Costs([1, 8], [30.0 * MS, 400.0 * MS]))
    server.ask("a", 1, name=1, flags="S")
    with pytest.raises(Overloaded, match="1 streams are open, as many as keep 50 ms"):
        # A longer budget of its own is no reason to make the others late.
        server.ask("b", 1, name=2, flags="S", budget_ns=60 * S)
    assert server.frontend.in_use == len(server.sequences) == 1


def test_a_failure_ends_the_sequence_and_tells_all_who_wait() -> None:
    server = Server(Doubler())
    server.ask("a", 1, 1, flags="S")
    server.ask("b", 17, 17)
    server.ask("c", 1, 1)
    server.ask("other", 2, 2, name=8, flags="S")
    answers = dict(server.run())
    assert answers["a"] == [[2, 2]]
    assert answers["other"] == [[4, 4]]
    assert isinstance(answers["b"], ComputeFailed)
    assert isinstance(answers["c"], ComputeFailed)
    assert len(server.sequences) == 1


def test_a_lost_engine_ends_all(server: Server) -> None:
    server.ask("idle", 1, 1, flags="S")
    server.run()
    server.ask("asks", 1, 1, name=8, flags="S")
    server.frontend.fail(ENGINE_LOST)
    ((said, error),) = server.answers
    assert (said, isinstance(error, ComputeFailed)) == ("asks", True)
    assert len(server.sequences) == 0


def test_another_version_lets_those_finish_who_wait(server: Server) -> None:
    server.ask("idle", 1, 1, flags="S")
    server.run()
    server.ask("asks", 1, 1, name=8, flags="S")
    server.streams.finish(1012, "another version")
    assert len(server.sequences) == 1
    assert server.run() == [("asks", [[1, 1]])]
    assert server.nothing_is_left


def test_a_server_that_goes_down_begins_nothing(server: Server) -> None:
    server.ask("a", 1, 1, flags="S")
    server.sequences.close()
    server.ask("b", 1, 1)
    assert server.run() == [("a", [[1, 1]]), ("b", [[2, 2]])]
    with pytest.raises(Overloaded, match="shutting down"):
        server.ask("c", 1, name=8, flags="S")


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({}, None),
        ({"sequence_id": 0, "sequence_start": True}, None),
        ({"sequence_id": ""}, None),
        ({"sequence_id": 5}, SequencePlace(5, False, False)),
        ({"sequence_id": "a", "sequence_start": True, "sequence_end": False}, SequencePlace("a", True, False)),
        ({"sequence_id": (1 << 64) - 1, "sequence_end": True}, SequencePlace((1 << 64) - 1, False, True)),
    ],
)
def test_a_place_in_a_sequence(parameters: dict[str, Any], place: SequencePlace | None) -> None:
    assert place_of(parameters) == place


@pytest.mark.parametrize(
    "parameters",
    [
        {"sequence_id": True},
        {"sequence_id": 1.0},
        {"sequence_id": None},
        {"sequence_id": [1]},
        {"sequence_id": "x" * 129},
        {"sequence_id": 1, "sequence_start": 1},
        {"sequence_id": 1, "sequence_end": "true"},
        {"sequence_id": 1, "sequence_end": None},
    ],
)
def test_a_place_that_is_none_is_said(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="must be"):
        place_of(parameters)


SOUND = TensorSpec(dtype="int16", shape=(320,), meaning="sound", name="sound")
WIDE = TensorSpec(dtype="float32", shape=(5, 2), meaning="two sensors", labels=("x", "y"), name="wide")


@pytest.mark.parametrize(
    ("spec", "shape", "found"),
    [
        (SOUND, (1, 320), (320, True)),
        (SOUND, (7,), (7, False)),
        (SOUND, (1, 0), (0, True)),
        (SOUND, (0,), (0, False)),
        (SOUND, (1,), (1, False)),
        (SOUND, (1, 1), (1, True)),
        (WIDE, (1, 5, 2), (5, True)),
        (WIDE, (3, 2), (3, False)),
    ],
)
def test_the_frames_of_a_chunk(spec: TensorSpec, shape: tuple[int, ...], found: tuple[int, bool]) -> None:
    frame = frame_of(spec)
    assert frame.shape == spec.shape[1:]
    assert frames_of(spec.name, spec.protocol_datatype, shape, frame, spec.shape[0]) == found


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (SOUND, ()),
        (SOUND, (321,)),
        (SOUND, (-1,)),
        (SOUND, (1, -1)),
        (SOUND, (2, 320)),
        (SOUND, (1, 1, 320)),
        (WIDE, (5,)),
        (WIDE, (1, 5, 3)),
        (WIDE, (2, 5, 2)),
        (WIDE, (6, 2)),
    ],
)
def test_another_shape_is_refused(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=f"takes .*'frames'.* with 1 to {spec.shape[0]} frames"):
        frames_of(spec.name, spec.protocol_datatype, shape, frame_of(spec), spec.shape[0])


@pytest.mark.parametrize("frames", [0, 1, 3, 320])
@pytest.mark.parametrize("raw", [True, False])
def test_a_chunk_by_grpc_is_raw_or_typed(frames: int, raw: bool) -> None:
    request = pb.ModelInferRequest(model_name="hark")
    tensor = request.inputs.add(name="sound", datatype="INT16", shape=[1, frames])
    sound = np.arange(frames, dtype="<i2")
    if raw:
        request.raw_input_contents.append(sound.tobytes())
    else:
        tensor.contents.int_contents.extend(sound.tolist())
    request.parameters["sequence_id"].string_param = "a"
    request.parameters["sequence_end"].bool_param = True
    infer = parse_infer(request, frame_of(SOUND), TOTAL, 320, count=frames_of)
    assert infer.chunks.tolist() == sound.tolist()
    assert (infer.batched, infer.place) == (True, SequencePlace("a", False, True))
    response = infer_response(infer, np.zeros((1, 0, 2), np.float32), "hark", "1", TOTAL)
    assert list(response.outputs[0].shape) == [1, 0, 2]
    assert bool(response.raw_output_contents) is raw

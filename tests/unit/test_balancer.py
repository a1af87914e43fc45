"""Which replica takes a request or a stream, and what becomes of it when one is lost."""

from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.application import Application
from penstock.core.errors import DeadlineImpossible, Overloaded, RequestError
from penstock.core.spec import Array
from penstock.core.streams.live import Live
from penstock.serve.engine.engine import Engine
from penstock.serve.frontend.balancer import ALIKE, soonest
from penstock.serve.frontend.balancer import PredictedFinish as Finish
from penstock.serve.frontend.second_tries import SecondTries
from penstock.serve.frontend.table_writer import NEVER_NS, Done, SlotHandle, TableWriter
from penstock.serve.registry.served_model import Replica, ServedModel, status_error
from penstock.serve.streams.sequences import SequencePlace
from penstock.serve.streams.stream_balancer import StreamBalancer, StreamLoad, by_load
from penstock.serve.streams.streams import Streams
from penstock.serve.table.costs import Costs
from penstock.serve.table.slots import (
    ANSWERED,
    OFFERED,
    OK,
    RETRIED,
    STREAMS_OPEN,
    STREAMS_REFUSED,
    SlotTable,
    TableLayout,
)
from penstock.serve.websocket.stream_connection import StreamConnection
from tests.support.clock import idle_loop
from tests.support.streams import BUDGET_NS, FRAMES, MS, SOUND, SUMS, Sums

LIVE = Application(name="sums", input=SOUND, output=SUMS, live=Live(rate_hz=1000), chunks=2, model="nobody:asks")

times = st.integers(0, 10**9) | st.just(NEVER_NS)
predictions = st.lists(st.builds(Finish, times, st.integers(0, 300)), min_size=1, max_size=8)
loads = st.lists(st.builds(StreamLoad, st.integers(0, 1000), st.floats(1, 1e5)), min_size=1, max_size=8)


def test_a_request_goes_where_least_waits_among_replicas_that_are_alike() -> None:
    assert soonest([Finish(10 * MS, 4), Finish(11 * MS, 2), Finish(12 * MS, 3)], 50 * MS) == 1
    # Of as many the sooner one, and then the first.
    assert soonest([Finish(11 * MS, 2), Finish(10 * MS, 2), Finish(10 * MS, 2)], 50 * MS) == 1


def test_a_request_goes_where_it_is_answered_sooner_by_far() -> None:
    assert soonest([Finish(2 * MS, 20), Finish(30 * MS, 0)], 50 * MS) == 0
    assert soonest([Finish(20 * MS, 900), Finish(30 * MS, 0)], 50 * MS) == 1


def test_a_request_goes_where_it_is_admitted() -> None:
    assert soonest([Finish(45 * MS, 20), Finish(52 * MS, 3)], 50 * MS) == 0
    assert soonest([Finish(NEVER_NS, 0), Finish(45 * MS, 20)], 50 * MS) == 1
    # One that is idle tries where the others cannot keep it.
    assert soonest([Finish(60 * MS, 20), Finish(90 * MS, 0)], 50 * MS) == 1
    assert soonest([Finish(60 * MS, 20), Finish(NEVER_NS, 0)], 50 * MS) == 0


@given(predictions, st.integers(0, 10**9))
def test_no_request_is_refused_that_somebody_would_take(predictions: list[Finish], left_ns: int) -> None:
    chosen = predictions[soonest(predictions, left_ns)]
    keeping = [finish_ns for finish_ns, _ in predictions if finish_ns <= left_ns]
    if keeping:
        assert chosen.finish_ns <= min(left_ns, ALIKE * min(keeping))
    elif any(finish_ns < NEVER_NS and not waiting for finish_ns, waiting in predictions):
        assert chosen.finish_ns < NEVER_NS
        assert not chosen.waiting
    else:
        assert chosen == min(predictions)


def test_streams_go_where_the_fewest_are_though_measurements_differ() -> None:
    assert by_load([StreamLoad(3, 100.0), StreamLoad(2, 40.0), StreamLoad(4, 110.0)]) == [1, 0, 2]
    assert by_load([StreamLoad(0, 1.0), StreamLoad(0, 1.0)]) == [0, 1]


def test_a_replica_that_can_carry_little_is_given_little() -> None:
    taken = [0, 0]
    for _ in range(110):
        taken[by_load([StreamLoad(taken[0], 1000.0), StreamLoad(taken[1], 100.0)])[0]] += 1
    assert taken == [100, 10]


@given(loads)
def test_every_replica_has_its_turn(loads: list[StreamLoad]) -> None:
    assert sorted(by_load(loads)) == list(range(len(loads)))


class Engines:
    """A live model in two engines, as a front-end serves it; time is the test's."""

    def __init__(self, *curves: Costs, slots: int = 8) -> None:
        self.now_ns = 1_000 * MS
        self.curves = curves or (Costs([1, 8], [1000.0, 1000.0]),) * 2
        self.slots = slots
        self.engines: list[Engine] = []
        self.replicas = [self.replica(index) for index in range(len(self.curves))]
        self.served = ServedModel(
            name="sums",
            version="1",
            label="sums",
            application=LIVE,
            manifest=cast(Any, None),
            bundle=Path(),
            replica=self.replicas[0],
            several=True,
            budget_ns=BUDGET_NS,
            idle_ns=10**12,
            now_ns=self.clock,
        )
        for replica in self.replicas[1:]:
            self.served.add_replica(replica)

    def put(self, chunk: Array, done: Done, budget_ns: int | None = None) -> SlotHandle:
        return self.served.submit(chunk, done, self.now_ns, budget_ns)

    def clock(self) -> int:
        self.now_ns += 1_000
        return self.now_ns

    def replica(self, engine: int) -> Replica:
        table = SlotTable.private(TableLayout(slots=self.slots, chunks=2, input=SOUND, output=SUMS))
        executor, costs = Sums(self.slots), self.curves[engine]
        self.engines.append(Engine(executor, table, budget_ns=BUDGET_NS, clock_ns=self.clock, costs=costs))
        frontend = TableWriter(table, budget_ns=BUDGET_NS, wake=lambda: None)
        streams = Streams(
            name="sums",
            application=LIVE,
            writer=frontend,
            table=table,
            budget_ns=BUDGET_NS,
            batch_loop=idle_loop(self.clock),
            now_ns=self.clock,
            error_of_status=lambda status, budget_ns: status_error(status, budget_ns or BUDGET_NS),
        )
        return Replica(
            engine=engine, device="cpu", runs_by="torch", fallback="", writer=frontend, table=table, streams=streams
        )

    def lose(self, engine: int) -> None:
        """Let an engine die, as `Attachments.lose_engine` is told of it."""
        lost = self.replicas[engine]
        self.served.lose(lost)
        others = [each for each in self.served.replicas if each is not lost]
        self.served.settle(lost, others, SecondTries(self.clock))

    def tick(self) -> None:
        for engine, replica in zip(self.engines, self.replicas, strict=True):
            engine.tick(self.clock())
            replica.writer.collect()
            replica.writer.refresh()

    @property
    def open(self) -> list[int]:
        return [replica.writer.counts[STREAMS_OPEN] for replica in self.replicas]

    @property
    def in_use(self) -> list[int]:
        return [replica.writer.in_use for replica in self.replicas]

    def begin(self, key: int, outcomes: list[Array | RequestError], chunk: int = 1) -> None:
        assert self.served.sequences is not None
        samples = np.full(FRAMES, chunk, np.int16)
        self.served.sequences.put(SequencePlace(key, start=True, end=False), samples, outcomes.append, self.now_ns)


def no_result(status: int, output: Array, last: bool) -> None:
    raise AssertionError(status)


def test_streams_and_sequences_are_spread_and_stay_where_they_are() -> None:
    world = Engines()
    outcomes: list[list[Array | RequestError]] = [[] for _ in range(6)]
    for key in range(6):
        world.begin(key + 1, outcomes[key], chunk=key)
    assert world.open == [3, 3]
    world.tick()
    assert world.served.sequences is not None
    for key in range(6):
        more = SequencePlace(key + 1, start=False, end=False)
        world.served.sequences.put(more, np.full(FRAMES, 10, np.int16), outcomes[key].append, world.now_ns)
    world.tick()
    for key, (_, second) in enumerate(outcomes):
        assert not isinstance(second, RequestError)
        # The sums go on where they were.
        assert second.ravel()[-1] == FRAMES * (key + 10)


def test_requests_go_where_the_fewest_wait() -> None:
    world = Engines()
    chunk = np.zeros(FRAMES, np.int16)
    for _ in range(6):
        world.put(chunk, no_result)
    assert world.in_use == [3, 3]


def test_the_rows_of_one_request_stay_together() -> None:
    world = Engines()
    chunks = np.arange(3 * FRAMES, dtype=np.int16).reshape(3, FRAMES)
    results: list[Array | RequestError] = []
    tickets = world.served.submit_rows(chunks, results.append, world.now_ns, None)
    world.put(chunks[0], no_result)
    assert world.in_use == [3, 1]
    assert {ticket.writer for ticket in tickets} == {world.replicas[0].writer}


def test_rows_that_are_in_are_taken_back_whatever_is_raised() -> None:
    world = Engines()
    in_use: list[int] = []

    def fails_at_last() -> int:
        in_use.append(sum(world.in_use))
        if in_use[-1] == 2:
            raise IndexError
        return world.now_ns

    world.served.now_ns = fails_at_last
    with pytest.raises(IndexError):
        world.served.submit_rows(np.zeros((3, FRAMES), np.int16), lambda results: None, world.now_ns, None)
    assert in_use[-1] == 2
    world.tick()
    assert world.in_use == [0, 0]


def test_what_is_cancelled_is_cancelled_where_it_is() -> None:
    world = Engines()
    tickets = [world.put(np.zeros(FRAMES, np.int16), no_result) for _ in range(4)]
    world.served.cancel(tickets[:2])
    world.served.cancel(tickets[2:])
    world.tick()
    assert world.in_use == [0, 0]


def open_stream(streams: Streams | StreamBalancer) -> None:
    StreamConnection(partial(streams.admit_stream, budget_ns=BUDGET_NS), lambda: 0.0)


def test_a_stream_is_refused_when_no_replica_carries_it() -> None:
    # 4 ms of signal a chunk, and 30 ms a batch, whatever its size: a second stream is one too many.
    world = Engines(Costs([1, 2], [30.0 * MS, 60.0 * MS]), Costs([1, 2], [30.0 * MS, 60.0 * MS]))
    streams = world.served.streams
    assert streams is not None
    open_stream(streams)
    open_stream(streams)
    assert world.open == [1, 1]
    with pytest.raises(Overloaded, match=r"^2 streams are open, as many as keep 50 ms\.$"):
        open_stream(streams)
    assert world.served.total(STREAMS_REFUSED) == 1


def test_a_stream_is_refused_when_no_replica_has_a_slot() -> None:
    world = Engines(slots=2)
    streams = world.served.streams
    assert streams is not None
    for _ in range(4):
        open_stream(streams)
    with pytest.raises(Overloaded, match="All slots are in use"):
        open_stream(streams)


def test_a_budget_is_impossible_only_for_the_quickest() -> None:
    quick, slow = Costs([1, 8], [1.0 * MS, 2.0 * MS]), Costs([1, 8], [20.0 * MS, 21.0 * MS])
    world = Engines(slow, quick)
    chunk = np.zeros(FRAMES, np.int16)
    world.put(chunk, no_result, budget_ns=10 * MS)
    assert world.in_use == [0, 1]
    with pytest.raises(DeadlineImpossible):
        world.put(chunk, no_result, budget_ns=MS // 2)
    sequences = world.served.sequences
    assert sequences is not None
    with pytest.raises(DeadlineImpossible):
        sequences.put(SequencePlace(1, True, False), chunk, lambda result: None, world.now_ns, budget_ns=MS // 2)


def test_a_refusal_stands_for_all_replicas_until_a_result_comes() -> None:
    curve = Costs([1], [20.0 * MS])
    world = Engines(curve, curve)
    chunk = np.zeros(FRAMES, np.int16)
    for _ in range(4):
        world.put(chunk, no_result)
    assert world.in_use == [2, 2]
    with pytest.raises(Overloaded, match="The answer would come after"):
        world.put(chunk, no_result)
    assert world.served.writer.refusing
    assert world.served.cached_rejection(world.now_ns) is not None
    for replica in world.replicas:
        replica.writer.collect()
    assert not world.served.writer.refusing
    assert world.served.cached_rejection(world.now_ns) is None


def test_a_refusal_does_not_stand_where_one_replica_has_room_again() -> None:
    curve = Costs([1], [20.0 * MS])
    world = Engines(curve, curve)
    chunk, heard = np.zeros(FRAMES, np.int16), list[int]()
    for _ in range(4):
        world.put(chunk, lambda status, output, last: heard.append(status))
    with pytest.raises(Overloaded):
        world.put(chunk, no_result)
    refusing = next(index for index, replica in enumerate(world.replicas) if replica.writer.refusing)
    world.engines[1 - refusing].tick(world.clock())
    world.replicas[1 - refusing].writer.collect()
    assert heard == [OK]
    assert world.served.writer.refusing
    assert world.served.cached_rejection(world.now_ns) is None
    world.put(chunk, no_result)


@pytest.mark.parametrize("engines", [1, 2])
def test_the_refusal_of_many_rows_does_not_stand_for_one(engines: int) -> None:
    world = Engines(*[Costs([1], [20.0 * MS])] * engines)
    with pytest.raises(Overloaded):
        world.served.submit_rows(np.zeros((4, FRAMES), np.int16), lambda results: None, world.now_ns, None)
    assert not world.served.writer.refusing
    # One row that is refused stands, though it came as a batch of one.
    world.tick()
    for _ in range(2 * engines):
        world.put(np.zeros(FRAMES, np.int16), no_result)
    with pytest.raises(Overloaded):
        world.served.submit_rows(np.zeros((1, FRAMES), np.int16), lambda results: None, world.now_ns, None)
    assert world.served.cached_rejection(world.now_ns) is not None


def test_requests_of_a_lost_engine_are_answered_by_another_and_streams_are_told() -> None:
    world = Engines()
    statuses: list[list[int]] = [[] for _ in range(4)]
    for status in statuses:

        def done(code: int, output: Array, last: bool, status: list[int] = status) -> None:
            status.append(code)

        world.put(np.zeros(FRAMES, np.int16), done)
    outcomes: list[list[Array | RequestError]] = [[], []]
    for key in range(2):
        world.begin(key + 1, outcomes[key])
    world.replicas[0].writer.counts[ANSWERED] = 5
    world.served.counts[ANSWERED] += 1
    offered = world.served.total(OFFERED)
    world.lose(0)
    assert not world.served.engine_lost
    # The state of a stream is gone.
    (error,) = outcomes[0]
    assert isinstance(error, Overloaded)
    assert statuses == [[]] * 4
    assert world.served.total(ANSWERED) == 6
    assert (world.served.total(OFFERED), world.served.total(RETRIED)) == (offered, 2)
    world.tick()
    assert statuses == [[OK]] * 4
    (result,) = outcomes[1]
    assert not isinstance(result, RequestError)
    # New ones go to the other one, until that is lost too.
    world.begin(1, outcomes[0])
    assert world.open[1] == 2
    world.lose(1)
    assert world.served.engine_lost
    with pytest.raises(Overloaded, match="being started again"):
        world.put(np.zeros(FRAMES, np.int16), no_result)


def test_an_engine_that_is_back_takes_the_next_streams() -> None:
    world = Engines()
    outcomes: list[Array | RequestError] = []
    for key in range(4):
        world.begin(key + 1, outcomes)
    world.lose(0)
    world.replicas[0] = world.replica(0)
    world.served.add_replica(world.replicas[0])
    for key in range(4, 7):
        world.begin(key + 1, outcomes)
    assert world.open == [3, 2]


def test_an_engine_that_hangs_draws_no_streams_though_their_clients_give_up() -> None:
    world = Engines()
    outcomes: list[Array | RequestError] = []
    for key in range(4):
        world.begin(key + 1, outcomes)
    assert world.open == [2, 2]
    for _ in range(4):
        # Each time the client of the first one gives up, and asks again.
        world.begin(1, outcomes)
        world.engines[1].tick(world.clock())
        world.replicas[1].writer.collect()
    assert world.in_use[0] <= 3
    assert world.open == [1, 3]


def test_a_sequence_may_be_started_anew_wherever_there_is_room() -> None:
    world = Engines(slots=1)
    outcomes: list[list[Array | RequestError]] = [[], []]
    world.begin(1, outcomes[0])
    # The slot is not free before the engine has let go of it, and the other replica has one.
    world.begin(1, outcomes[1])
    (error,) = outcomes[0]
    assert isinstance(error, RequestError)
    world.tick()
    (result,) = outcomes[1]
    assert not isinstance(result, RequestError)
    assert world.open == [0, 1]

"""Answers that take steps with launches ahead: places, holes, marks and captures, on lanes without a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.core.errors import ApplicationError, DeviceLost
from penstock.core.spec import Array
from penstock.runtime.generation.generation_ahead import AheadExecutor
from penstock.runtime.generation.generation_graphs import NotCapturable
from penstock.runtime.generation.generation_lanes import BEGINS, STEPS
from penstock.runtime.generation.generation_places import Packing
from penstock.serve.engine.generation_faults import begin_isolated
from tests.support.generating import Counter, Endless, FullAtBegin, FunctionalCounter, counter, digits, examples
from tests.support.host_lanes import HostLanes, executor_of
from tests.unit.test_generation_executor import by_hand, records

NEVER: Callable[[int], bool] = lambda lane: False  # noqa: E731


def ahead(
    network: type[Counter] = Counter, max_rows: int = 8, refuses: Callable[[int], bool] = NEVER, **more: Any
) -> AheadExecutor:
    example = records(digits(7))[0]
    return executor_of(
        network(),
        counter(network),
        lanes=HostLanes(refuses),
        example=example,
        max_rows=max_rows,
        padding=float("nan"),
        **more,
    )


def tokens(answers: Array) -> list[list[int]]:
    return [answer["token"][: answer["steps"]].tolist() for answer in answers]


@pytest.mark.parametrize("network", [Counter, FunctionalCounter])
def test_whole_answers_of_a_batch_are_those_by_hand(network: type[Counter]) -> None:
    given = examples(8)
    assert tokens(ahead(network).predict(records(*given))) == [by_hand(each) for each in given]


def test_a_step_that_cannot_be_captured_is_refused_with_the_reason() -> None:
    with pytest.raises(NotCapturable, match="RuntimeError: operation not permitted"):
        ahead(refuses=lambda lane: lane == STEPS)


def test_a_beginning_that_cannot_be_captured_is_named_and_runs_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    executor = ahead(refuses=lambda lane: lane == BEGINS)
    assert "counter begins without CUDA graphs, because it cannot be captured (RuntimeError" in executor.fallback
    assert executor.fallback in caplog.text
    given = examples(5)
    assert tokens(executor.predict(records(*given))) == [by_hand(each) for each in given]


def test_graphs_that_do_not_fit_into_their_memory_are_refused_with_the_option() -> None:
    with pytest.raises(NotCapturable, match="raise --graph-memory"):
        ahead(limit_bytes=1000)


def test_a_gpu_that_fails_is_not_taken_for_an_error_of_a_request() -> None:
    lanes = HostLanes()
    executor = executor_of(Counter(), counter(), lanes=lanes, example=records(digits(7))[0], max_rows=4)
    lanes.failed = True
    with pytest.raises(DeviceLost, match="an illegal access"):
        begin_isolated(executor, records(digits(3), digits(4)))


def test_lengths_out_of_range_are_said_where_rows_join() -> None:
    class Long(Counter):
        def begin(self, digits: Tensor, seed: Tensor) -> dict[str, Tensor]:
            return super().begin(digits, seed) | {"past": torch.where(seed == 9, 3, 0)}

    executor = executor_of(Long(), counter(Long), lanes=HostLanes(), example=records(digits(7))[0], max_rows=4)
    state = executor.join([executor.begin(records(digits(5)))])
    bad = executor.begin(records(digits(3) | {"seed": np.array(9)}))
    with pytest.raises(ApplicationError, match="room for 0 past"):
        executor.join([state, executor.begin(records(digits(4))), bad])
    state = executor.join([state, *(executor.begin(records(digits(6))) for _ in range(3))])
    assert executor.step(state).output_B["token"].tolist() == [by_hand(digits(n))[0] for n in (5, 6, 6, 6)]


def test_a_row_that_begins_full_is_rejected_alone_and_the_others_of_its_batch_join() -> None:
    executor = ahead(FullAtBegin)
    begun = executor.begin(records(digits(5), digits(3) | {"seed": np.array(FullAtBegin.SEED)}, digits(4)))
    rejected_B, (why,) = executor.rejected(begun)
    assert rejected_B.tolist() == [False, True, False]
    assert "'keys' with 50 past, which is all that Dim('past', max=50) allows" in why
    state = executor.join([begun])
    assert state.rows == 2
    assert executor.step(state).output_B["token"].tolist() == [by_hand(digits(n))[0] for n in (5, 4)]


def test_rows_whose_state_is_copied_are_ready_only_after_the_copy() -> None:
    executor, (one, other) = ahead(), examples(2)
    first = executor.begin(records(one))
    first.mark.synchronize()
    executor.begin(records(other))
    assert not executor.is_ready(first), "its first query since the copy"


def test_buffers_of_graphs_are_filled_in_the_lane_that_reads_them() -> None:
    lanes, elsewhere = HostLanes(), list[str]()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.is_mutable and lanes.lane is None:
                elsewhere.append(str(func))
            return func(*args, **(kwargs or {}))

    network, example = Counter(), records(digits(7))[0]
    with Watching():
        executor_of(network, counter(), lanes=lanes, example=example, max_rows=1)
    assert elsewhere == []


def test_smaller_beginnings_have_graphs_where_the_largest_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    class Small(HostLanes):
        refusals = 3

        def rehearse(self, lane: int, run: Callable[[], object]) -> int:
            if lane == BEGINS and self.refusals:
                self.refusals -= 1
                raise torch.cuda.OutOfMemoryError
            return super().rehearse(lane, run)

    executor = executor_of(Counter(), counter(), lanes=Small(), example=records(digits(7))[0], max_rows=8)
    assert "`begin` of 3 of 8 batch shapes, from 4 rows, length 40 on, runs without CUDA graphs" in executor.fallback
    assert executor.fallback in caplog.text
    graphs = executor.graphs
    assert graphs.begin_graph(8, {"length": np.array([40])}) is None
    small = graphs.begin_graph(4, {"length": np.array([9])})
    assert small is not None
    assert small.rows == 4
    given = examples(8)
    assert tokens(executor.predict(records(*given))) == [by_hand(each) for each in given]


def test_rows_that_began_and_did_not_join_keep_their_state_while_others_begin() -> None:
    executor, given = ahead(), examples(4)
    begun = [executor.begin(records(each)) for each in given]
    state, found = executor.join(begun), [[] for _ in given]
    for _ in range(3):
        for row, output in enumerate(executor.step(state).output_B):
            found[row].append(int(output["token"]))
    for row, each in enumerate(given):
        wanted = by_hand(each)[:3]
        assert found[row][: len(wanted)] == wanted


def test_rows_that_the_caller_lets_leave_take_no_further_step_and_others_do() -> None:
    executor = ahead(Endless)
    state = executor.join([executor.begin(records(*examples(3)))])
    launched = [executor.launch(state), executor.launch(state)]
    executor.finish(launched[0], state)
    state, order = executor.keep(state, np.array([False, True, False]))
    assert order.tolist() == [1]
    step = executor.finish(launched[1], state)
    assert step.output_B["token"].tolist() == by_endless(examples(3)[1], 2)[1:]
    assert executor.step(state).output_B["token"].tolist() == by_endless(examples(3)[1], 3)[2:]


def by_endless(given: dict[str, Array], steps: int) -> list[int]:
    state = (alone := ahead(Endless, 1)).join([alone.begin(records(given))])
    return [int(alone.step(state).output_B["token"][0]) for _ in range(steps)]


def test_a_row_that_joins_between_two_launches_is_not_in_the_first() -> None:
    executor, (one, other) = ahead(Endless), examples(2)
    state = executor.join([executor.begin(records(one))])
    launched = executor.launch(state)
    state = executor.join([state, executor.begin(records(other))])
    second = executor.launch(state)
    assert executor.finish(launched, state).output_B["token"].tolist() == by_endless(one, 1)
    assert executor.finish(second, state).output_B["token"].tolist() == [by_endless(one, 2)[1], by_endless(other, 1)[0]]


def test_few_rows_move_to_the_first_places_and_long_holes_get_valid_lengths() -> None:
    executor = ahead(Endless, 16)
    given = [digits(40 if number < 12 else 3, number) for number in range(16)]
    state = executor.join([executor.begin(records(*given))])
    for _ in range(35):
        executor.step(state)
    state, _ = executor.keep(state, np.arange(16) >= 14)
    late = digits(3, 77)
    state = executor.join([state, executor.begin(records(late))])
    found = [executor.step(state).output_B["token"].tolist() for _ in range(4)]
    assert state.place_B.max() < 4
    assert [row[2] for row in found] == by_endless(late, 4)
    assert [row[1] for row in found] == by_endless(given[15], 39)[35:]


def test_numbers_that_are_not_finite_do_not_spread_to_the_next_row_in_their_place() -> None:
    class Spreading(Endless):
        def step(self, state: dict[str, Tensor]) -> Any:
            output, after, done = super().step(state)
            # As a mask that only adds does: zero times what lies beyond.
            sums = output["sums"] + 0 * after["keys"].sum((1, 2))
            after["keys"][state["seed"] == 9] = torch.inf
            return output | {"sums": sums}, after, done

    executor = executor_of(
        Spreading(), counter(Spreading), lanes=HostLanes(), example=records(digits(7))[0], max_rows=1
    )
    state = executor.join([executor.begin(records(digits(3) | {"seed": np.array(9)}))])
    assert [bool(np.isfinite(executor.step(state).output_B["sums"]).all()) for _ in range(2)] == [True, False]
    state = executor.join([executor.begin(records(digits(3)))])
    assert np.isfinite(executor.step(state).output_B["sums"]).all()


def test_a_packed_buffer_holds_tensors_of_several_dtypes() -> None:
    packing = Packing({"one": (torch.bool, (3,)), "two": (torch.int64, (2, 2)), "three": (torch.float16, (5,))})
    buffer = torch.zeros(packing.nbytes, dtype=torch.uint8)
    given = {
        "one": torch.tensor([True, False, True]),
        "two": torch.arange(4).reshape(2, 2),
        "three": torch.ones(5).half(),
    }
    for name, view in packing.views(buffer).items():
        view.copy_(given[name])
    assert {name: array.tolist() for name, array in packing.arrays(buffer).items()} == {
        name: each.tolist() for name, each in given.items()
    }

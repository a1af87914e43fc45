"""What goes over GPUs' own memory, and what goes another way."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from penstock.kernels.common import PRECISIONS
from penstock.kernels.peer_memory import dispatch, why_no_peer_memory
from penstock.train.parallel import collectives
from penstock.train.parallel import world as world_module
from penstock.train.parallel.buckets import MAX_PEER_MEMORY_BYTES, GradientBuckets
from penstock.train.parallel.collectives import (
    all_gather_linear,
    linear_reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from penstock.train.parallel.world import World


class Memory:
    """That of two ranks which have the same numbers.

    Args:
        takes: Whether it takes what it is given.
    """

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.overlapped: list[bool] = []
        self.waited = 0
        self.totals: list[int] = []

    def _wait(self) -> None:
        self.waited += 1

    def all_gather(self, own: Tensor, whole_R: Tensor, *, overlapped: bool = False) -> Any:
        self.overlapped.append(overlapped)
        whole_R.copy_(own.expand_as(whole_R))
        return self._wait if self.takes else None

    def reduce_scatter(self, parts_R: Tensor, own: Tensor, *, overlapped: bool = False) -> Any:
        self.overlapped.append(overlapped)
        own.copy_(2 * parts_R[0])
        return self._wait if self.takes else None

    def all_reduce(self, flat: Tensor, *, overlapped: bool = False) -> Any:
        if flat.dtype not in PRECISIONS:
            return None
        self.overlapped.append(overlapped)
        self.totals.append(flat.nbytes)
        flat.mul_(2)
        return self._wait


class Sent:
    """What the processes' group is given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, *_: object, **__: object) -> "Sent":
        self.calls += 1
        output.fill_(7)
        return self

    def wait(self) -> None:
        """It is there."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    found = Sent()
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(collectives, name, found)
    monkeypatch.setattr(torch.distributed, "all_reduce", found)
    return found


def of_two(memory: Memory) -> World:
    world = World(0, 2, group=cast(Any, object()), local_size=2)
    world.peer_memory = world.gradient_peer_memory = cast(Any, memory)
    return world


def test_what_the_memory_takes_goes_nowhere_else(sent: Sent) -> None:
    memory = Memory()
    own = torch.arange(6.0).reshape(2, 3)
    gathered = start_all_gather(of_two(memory), "a gather", own.t())
    scattered = start_reduce_scatter(of_two(memory), "a scatter", torch.stack([own, own]))
    assert torch.equal(gathered(), torch.stack([own.t(), own.t()]))
    assert torch.equal(scattered(), 2 * own)
    assert (memory.overlapped, memory.waited, sent.calls) == ([False, False], 2, 0)


def test_what_it_does_not_take_goes_by_the_group(sent: Sent) -> None:
    own = torch.arange(6.0)
    world = of_two(Memory(takes=False))
    assert torch.equal(start_all_gather(world, "a gather", own)(), torch.full((2, 6), 7.0))
    assert torch.equal(start_reduce_scatter(world, "a scatter", torch.stack([own, own]))(), torch.full((6,), 7.0))
    assert sent.calls == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [4, MAX_PEER_MEMORY_BYTES // 16 + 64])
def test_small_sums_of_gradients_go_over_the_memory(sent: Sent, rows: int, dtype: torch.dtype) -> None:
    memory, layer = Memory(), torch.nn.Linear(4, rows, bias=False, dtype=dtype)
    gradients = GradientBuckets(dict(layer.named_parameters()), [], of_two(memory), bucket_bytes=1 << 30)
    gradients.start()
    gradients.begin_last_backward()
    layer(torch.ones(1, 4, dtype=dtype)).sum().backward()
    gradients.finish()
    (found,) = gradients.tensors
    by_memory = rows == 4 and dtype == torch.float32
    assert bool((found == (2 if by_memory else 7)).all())
    # They are on their way before anybody waits.
    assert (memory.overlapped, memory.waited, sent.calls) == (([True], 1, 0) if by_memory else ([], 0, 1))


@pytest.mark.parametrize(("cut", "aside"), [("1.weight", 1), ("0.weight", 2)])
def test_what_is_stepped_aside_has_something_beside_it(
    sent: Sent, monkeypatch: pytest.MonkeyPatch, cut: str, aside: int
) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    stepped: list[torch.nn.Parameter] = []
    asides: list[int] = []

    def counted(_: GradientBuckets) -> AbstractContextManager[None]:
        asides.append(1)
        return nullcontext()

    monkeypatch.setattr(GradientBuckets, "_second_stream", counted)
    memory = Memory()
    named = dict(layers.named_parameters())
    gradients = GradientBuckets(named, [cut], of_two(memory), ready=lambda parameters, _: stepped.extend(parameters))
    gradients.start()
    gradients.begin_last_backward()
    layers(torch.ones(1, 4)).sum().backward()
    gradients.finish()
    assert {id(parameter) for parameter in stepped} == {id(parameter) for parameter in named.values()}
    # The weight that is cut always is; the other one if the cut one's gradient is still to be made.
    assert len(asides) == aside
    assert (memory.overlapped, memory.waited) == ([False], 1)


def test_who_cannot_share_says_why() -> None:
    assert why_no_peer_memory(torch.device("cpu"), 2) == "they have no GPUs"
    world = World()
    assert world.share_memory(wanted=False) == "the recipe has peer_memory=False"
    assert world.share_memory() == "they have no GPUs"
    assert world.peer_memory is None
    of_hosts = World(0, 4, group=cast(Any, object()), local_size=2)
    of_hosts.sum_on_host = lambda *values: [float(value) for value in values]  # pyright: ignore[reportAttributeAccessIssue]
    assert of_hosts.share_memory() == "the GPUs are on several hosts"


def test_processes_that_see_their_own_gpu_alone_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def asserts(*_: int) -> bool:
        raise AssertionError("Invalid peer device id")

    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", asserts)
    assert why_no_peer_memory(torch.device("cuda", 0), 2) == "each process sees its own GPU alone"


def test_one_that_cannot_is_everybodys_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def fails(*_: object) -> object:
        if made:
            raise RuntimeError("there is\n no room")
        made.append(object())
        return made[-1]

    world = World(0, 2, group=cast(Any, object()), local_size=2)
    world.sum_on_host = lambda *values: [float(value) for value in values]  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(world_module, "why_no_peer_memory", lambda *_: None)
    monkeypatch.setattr(world_module, "PeerMemory", fails)
    # Once more: what was made of the first half is nobody's.
    for _ in range(2):
        assert world.share_memory() == "there is no room"
        assert (world.peer_memory, world.gradient_peer_memory) == (None, None)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("of_an_input", [False, True])
def test_a_gather_in_chunks_overlaps_with_products_and_an_input_needs_no_gradient(
    sent: Sent, chunks: int, of_an_input: bool
) -> None:
    memory, weight = Memory(), torch.ones(5, 3, requires_grad=True)
    own = torch.ones(4, 3, requires_grad=not of_an_input)
    output = all_gather_linear(of_two(memory), "a layer", chunks, own, weight, None)
    assert memory.overlapped == [chunks > 1] * chunks
    output.sum().backward()
    # Backward, the product of the weight is always beside the reduce-scatter; examples have no gradient to send.
    assert memory.overlapped[chunks:] == [] if of_an_input else [True] * chunks
    assert (own.grad is None) == of_an_input


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_scatter_in_chunks_overlaps_with_products_both_ways(sent: Sent, chunks: int) -> None:
    memory, weight = Memory(), torch.ones(5, 3, requires_grad=True)
    output = linear_reduce_scatter(of_two(memory), "a layer", chunks, torch.ones(8, 3, requires_grad=True), weight)
    assert memory.overlapped == [chunks > 1] * chunks
    output.sum().backward()
    assert memory.overlapped[chunks:] == [chunks > 1] * chunks

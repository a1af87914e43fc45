"""Collectives over GPUs' own memory: launched and captured, against what the numbers of all ranks make."""

import json
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.acceptance.train.rank_processes import rank0_lines
from penstock.kernels.peer_memory import PeerMemory, why_no_peer_memory
from penstock.train.parallel.collectives import start_all_gather
from penstock.train.parallel.rank_assignment import RankAssignment
from penstock.train.parallel.world import World, join_world

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]

SHAPES = [(8,), (3, 24), (33, 4096), (64, 9216), (1000, 24)]
# A bf16 sum is rounded once.
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6}
REPLAYS = 200


@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_collectives_are_those_of_the_numbers_of_all(processes: int) -> None:
    if processes > GPUS:
        pytest.skip(f"there are {GPUS} GPUs")
    said = rank0_lines("tests.gpu.test_peer_memory", processes, [], 150.0)
    (found,) = (json.loads(line) for line in said if line.startswith("{"))
    assert found == {"wrong": [], "replayed": REPLAYS}


def test_who_cannot_share_is_told_why() -> None:
    assert why_no_peer_memory(torch.device("cpu"), 2) == "they have no GPUs"
    assert why_no_peer_memory(torch.device("cuda", 0), 2) is None


def of_all(world: World, own: Tensor) -> Tensor:
    """`[R, ...]`, in float64."""
    assert world.peer_memory is None, "it is NCCL's that is compared with"
    return start_all_gather(world, "what is expected", own)().double()


def poisoned(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)


def is_near(found: Tensor, expected: Tensor, terms: Tensor) -> bool:
    """Whether a sum is within its rounding, of which that of what is added is a part."""
    return bool(((found.double() - expected).abs() <= TOLERANCE[found.dtype] * terms).all())


def wrong_of(world: World, memory: PeerMemory, own: Tensor, *, overlapped: bool) -> list[str]:
    """Which collectives of a tensor go wrong."""
    rank, wrong = world.rank, list[str]()
    whole = poisoned((world.size, *own.shape), own)
    parts = torch.stack([own * (1 + other) + rank for other in range(world.size)])
    part, summed = poisoned(tuple(own.shape), own), own.clone()
    waits = [
        memory.all_gather(own, whole, overlapped=overlapped),
        memory.reduce_scatter(parts, part, overlapped=overlapped),
        memory.all_reduce(summed),
    ]
    for wait in waits:
        assert wait is not None
        wait()
    if not torch.equal(whole.double(), of_all(world, own)):
        wrong.append("gather")
    of_parts = of_all(world, parts)[:, rank]
    if not is_near(part, of_parts.sum(0), of_parts.abs().sum(0)):
        wrong.append("scatter")
    of_own = of_all(world, own)
    if not is_near(summed, of_own.sum(0), of_own.abs().sum(0)):
        wrong.append("total")
    of_sums = of_all(world, summed)
    if not bool((of_sums == of_sums[0]).all()):
        wrong.append("total differs")
    return wrong


def replayed(world: World, memory: PeerMemory, between: Callable[[], object]) -> int:
    """How often a captured step of several collectives did what it should, with others between its replays."""
    own = torch.zeros(64, 4096, dtype=torch.bfloat16, device=world.device)
    whole, part = own.new_empty((world.size, *own.shape)), torch.empty_like(own)
    summed, graph, stream = torch.zeros(23_296, device=world.device), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()

    def step() -> None:
        summed.copy_(own.view(-1)[: len(summed)])
        gathered = memory.all_gather(own, whole)
        scattered = memory.reduce_scatter(whole, part, overlapped=True)
        whole[0, 0, 0].clone()
        assert gathered is not None
        assert scattered is not None
        scattered()
        assert memory.all_reduce(summed) is not None

    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    right = 0
    for turn in range(REPLAYS):
        own.fill_(1 + (turn + world.rank) % 7)
        graph.replay()
        if turn % 50 == 10:
            between()
        numbers = [1 + (turn + rank) % 7 for rank in range(world.size)]
        gathered = all(bool((whole[rank] == number).all()) for rank, number in enumerate(numbers))
        scattered = bool((part == numbers[world.rank] * world.size).all())
        right += gathered and scattered and bool((summed == sum(numbers)).all())
    return right


def main(rank: int, size: int, port: int) -> None:
    seat = RankAssignment(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    with join_world(seat, torch.device("cuda", rank), 60.0) as world:
        assert world.group is not None
        memory = PeerMemory(world.group, world.device)
        count, litter = 1 << 19, list[Tensor]()

        def grows() -> None:
            nonlocal count
            count *= 2
            whole = torch.empty(size, count, device=world.device)
            assert memory.all_gather(torch.ones(count, device=world.device), whole) is not None
            assert bool((whole == 1).all())
            # Who let go of what a captured step still uses finds this there.
            litter.extend(torch.full((64,), -1, device=world.device) for _ in range(2000))

        # First, while there is little room.
        right = int(min(world.sum_on_host(replayed(world, memory, grows)))) // size
        wrong: list[str] = []
        for dtype in TOLERANCE:
            for shape in SHAPES:
                for overlapped in (False, True):
                    torch.manual_seed(rank)
                    own = torch.randn(shape, device=world.device).to(dtype)
                    wrong += [
                        f"{each} of {dtype} {shape}" for each in wrong_of(world, memory, own, overlapped=overlapped)
                    ]
        numbers = torch.arange(64, device=world.device)
        # What it does not take goes another way, everywhere: other types, and what ends between two vectors.
        assert memory.all_gather(numbers, numbers.new_empty((size, 64))) is None
        assert memory.all_reduce(numbers[:3].bfloat16()) is None
        everybodys = [each for of_rank in world.all_gather_objects(wrong) for each in of_rank]
        if world.is_rank_zero:
            print(json.dumps({"wrong": everybodys, "replayed": right}), flush=True)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:4]))

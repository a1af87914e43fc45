"""Which layers of a network are split, and that their slices together give the answers of the whole."""

import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from penstock.runtime.split.split_group import SplitGroup
from penstock.runtime.split.split_layers import ColumnSlice, RowSlice, split_network

# 64 x 64 weights, the least that is split.
WIDE = 64


class Ranks:
    """Collectives of threads in one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)
        self.gathered = self.reduced = 0

    def rank(self, rank: int) -> SplitGroup:
        return cast(SplitGroup, _Rank(self, rank))

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        self.parts[rank] = part
        self.barrier.wait(10)
        parts = list(self.parts)
        self.barrier.wait(10)
        return parts


class _Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def all_gather(self, part: Tensor) -> Tensor:
        self.ranks.gathered += self.rank == 0
        return torch.cat(self.ranks.exchange(self.rank, part), -1)

    def all_reduce(self, part: Tensor) -> Tensor:
        self.ranks.reduced += self.rank == 0
        return cast(Tensor, sum(self.ranks.exchange(self.rank, part)))


def answers(module: nn.Module, given: Tensor, size: int) -> tuple[list[Tensor], Ranks, list[Any]]:
    ranks = Ranks(size)
    own = [deepcopy(module) for _ in range(size)]
    splits = [split_network(each, ranks.rank(rank)) for rank, each in enumerate(own)]
    results: list[Tensor] = [torch.empty(0)] * size

    def run(rank: int) -> None:
        with torch.inference_mode():
            results[rank] = own[rank](given)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, ranks, [*zip(own, splits, strict=True)]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.mlp = nn.Sequential(nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDE, WIDE))
        self.out = nn.Linear(WIDE, WIDE, bias=False)
        self.small = nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp(self.norm(x))
        return self.small(torch.softmax(self.out(x), -1))


@pytest.mark.parametrize("size", [2, 4])
def test_slices_give_the_answers_of_the_whole_in_every_process(size: int) -> None:
    torch.manual_seed(0)
    module, given = Residual().eval(), torch.randn(5, 7, WIDE)
    with torch.inference_mode():
        whole = module(given)
    results, ranks, made = answers(module, given, size)
    for each in results:
        torch.testing.assert_close(each, whole, rtol=1e-5, atol=1e-6)
    # The pair of the MLP exchanges once.
    assert (ranks.gathered, ranks.reduced) == (1, 1)
    own, split = made[0]
    assert split.layers == ("mlp.0", "mlp.3", "out")
    assert isinstance(own.mlp[0], ColumnSlice)
    assert isinstance(own.mlp[3], RowSlice)
    assert own.mlp[0].weight.shape == (4 * WIDE // size, WIDE)
    assert own.mlp[3].weight.shape == (WIDE, 4 * WIDE // size)
    assert split.own_bytes < split.whole_bytes * (1 / size + 0.05)


@pytest.mark.parametrize(
    "make",
    [
        # A softmax needs all outputs.
        lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Softmax(-1), nn.Linear(WIDE, WIDE)),
        lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE)),
        # Three in a row: a pair, and one alone.
        lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE)),
        lambda: nn.Sequential(nn.Linear(WIDE, WIDE), nn.Sequential(nn.ReLU(), nn.Linear(WIDE, WIDE))),
        lambda: nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.Tanh(), nn.Linear(WIDE, 2)),
    ],
)
def test_what_stands_between_decides_whether_slices_go_on(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    module, given = make().eval(), torch.randn(3, WIDE)
    with torch.inference_mode():
        whole = module(given)
    results, _, made = answers(module, given, 2)
    for each in results:
        torch.testing.assert_close(each, whole, rtol=1e-5, atol=1e-6)
    assert made[0][1].layers


def test_a_layer_that_is_called_twice_stays_right() -> None:
    torch.manual_seed(2)
    twice = nn.Linear(WIDE, WIDE)
    module = nn.Sequential(twice, nn.ReLU(), twice, nn.Linear(WIDE, WIDE)).eval()
    given = torch.randn(3, WIDE)
    with torch.inference_mode():
        whole = module(given)
    results, _, _ = answers(module, given, 2)
    torch.testing.assert_close(results[1], whole, rtol=1e-5, atol=1e-6)


def test_layers_whose_weights_others_use_stay_whole() -> None:
    module = nn.Sequential(
        nn.TransformerEncoderLayer(WIDE, 4, 2 * WIDE, batch_first=True), nn.Linear(WIDE, WIDE)
    ).eval()
    given = torch.randn(2, 6, WIDE)
    with torch.inference_mode():
        whole = module(given)
    results, _, made = answers(module, given, 2)
    assert made[0][1].layers == ("1",)
    torch.testing.assert_close(results[0], whole, rtol=1e-5, atol=1e-5)


def test_a_weight_that_layers_share_stays_whole() -> None:
    module = nn.ModuleDict({"table": nn.Embedding(WIDE, WIDE), "head": nn.Linear(WIDE, WIDE, bias=False)})
    module["head"].weight = module["table"].weight
    assert split_network(module, Ranks(2).rank(0)).layers == ()

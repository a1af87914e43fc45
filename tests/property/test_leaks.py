"""No stream hears what another one said, however they come and go."""

import pytest
import torch

from benchmarks.acceptance.streams.leaks import LeakCheck
from penstock.runtime.gpu.cuda_graph_executor import CudaGraphExecutor
from penstock.runtime.state_table import StateTable


@pytest.mark.parametrize("seed", [0, 1])
def test_every_stream_hears_itself_alone(seed: int) -> None:
    leaks = LeakCheck(seed)
    assert leaks.run(400) == 0
    assert leaks.answered > 200


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_every_stream_hears_itself_alone_by_graphs_that_adopt_the_table(seed: int) -> None:
    leaks = LeakCheck(seed, CudaGraphExecutor)
    assert leaks.run(2_000) == 0
    assert leaks.answered > 1_000


def test_a_state_that_is_not_cleared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = StateTable.gather
    monkeypatch.setattr(
        StateTable, "gather", lambda self, slot_B, fresh_B: gather(self, slot_B, torch.zeros_like(fresh_B))
    )
    assert LeakCheck(0).run(200) > 50

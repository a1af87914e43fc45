"""Memory in use on a GPU."""

import pytest
import torch

from penstock.runtime.memory_use import memory_use, release_memory

pytestmark = pytest.mark.gpu
MB = 1 << 20


def test_a_tensor_is_memory_in_use_until_it_is_released() -> None:
    # Memory of its own, because tests before this one leave free room in segments that they still use.
    pool = torch.cuda.MemPool()
    release_memory("cuda")
    before = memory_use("cuda")
    assert before.total_bytes > 1 << 30
    with torch.cuda.use_mem_pool(pool):
        tensor = torch.ones(256 * MB, dtype=torch.uint8, device="cuda")
    # Other processes may use the GPU too.
    assert memory_use("cuda").used_bytes - before.used_bytes > 200 * MB
    del tensor, pool
    release_memory("cuda")
    assert memory_use("cuda").used_bytes - before.used_bytes < 56 * MB

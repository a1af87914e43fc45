"""Memory in use on a GPU."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
MB = 1 << 20


TENSOR = """
import torch
from penstock.runtime.memory_use import memory_use, release_memory
torch.zeros(1, device="cuda")
before = memory_use("cuda")
tensor = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
held = memory_use("cuda")
del tensor
release_memory("cuda")
print(before.total_bytes, held.used_bytes - before.used_bytes, memory_use("cuda").used_bytes - before.used_bytes)
"""


def test_a_tensor_is_memory_in_use_until_it_is_released() -> None:
    # In a process of its own: tests before this one leave free room in segments that they still use.
    done = subprocess.run([sys.executable, "-c", TENSOR], check=True, capture_output=True, text=True)
    total_bytes, held_bytes, left_bytes = map(int, done.stdout.split())
    assert total_bytes > 1 << 30
    # Other processes may use the GPU too.
    assert held_bytes > 200 * MB
    assert left_bytes < held_bytes - 100 * MB

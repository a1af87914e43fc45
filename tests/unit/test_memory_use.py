"""Memory in use, measured."""

import numpy as np

from penstock.runtime.memory_use import memory_use, release_memory

MB = 1 << 20


def test_an_array_is_memory_in_use_until_it_is_released() -> None:
    before = memory_use("cpu")
    assert before.used_bytes > 10 * MB
    assert before.total_bytes > before.used_bytes
    array = np.ones(200 * MB, np.uint8)
    grown = memory_use("cpu").used_bytes - before.used_bytes
    assert 190 * MB < grown < 230 * MB
    del array
    release_memory("cpu")
    assert memory_use("cpu").used_bytes - before.used_bytes < 20 * MB


def test_what_is_in_a_cycle_is_released() -> None:
    class Held:
        def __init__(self) -> None:
            self.array = np.ones(100 * MB, np.uint8)
            self.me = self

    before = memory_use("cpu").used_bytes
    Held()
    release_memory("cpu")
    assert memory_use("cpu").used_bytes - before < 20 * MB

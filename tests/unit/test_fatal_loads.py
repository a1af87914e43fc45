"""Which models are left out because their loads end processes, and for how long."""

import asyncio
import time

import pytest

from penstock.serve.background import in_daemon_thread
from penstock.serve.repository.fatal_loads import MAX_ENDS, MAX_KILLS, MAX_PAUSE_S, MIN_PAUSE_S, FatalLoads


class Seconds:
    """A clock that stands still until a test sets it."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.mark.parametrize(("killed", "most"), [(False, MAX_ENDS), (True, MAX_KILLS)])
def test_a_model_is_left_out_after_ends_in_a_row(killed: bool, most: int) -> None:
    loads = FatalLoads(Seconds())
    pauses = [loads.record_end(7, "engine", killed=killed) for _ in range(most)]
    assert pauses == [0.0] * (most - 1) + [MIN_PAUSE_S]
    assert (loads.left_s(7), loads.left_s(8)) == (MIN_PAUSE_S, 0.0)


def test_a_load_that_succeeds_and_another_process_count_anew() -> None:
    loads = FatalLoads(Seconds())
    for process in ("engine", "front-end 0", "front-end 1"):
        assert loads.record_end(7, process, killed=False) == 0.0
    loads.record_loaded(7, "engine")
    assert loads.record_end(7, "engine", killed=False) == 0.0
    assert loads.record_end(7, "front-end 0", killed=False) == MIN_PAUSE_S


def test_pauses_double_up_to_the_longest_and_end() -> None:
    now = Seconds()
    loads = FatalLoads(now)
    pauses: list[float] = []
    for _ in range(10):
        pauses.append(loads.leave_out(7))
        now.s += pauses[-1]
        assert loads.left_s(7) == 0.0
        assert loads.was_left_out(7)
    assert pauses == [min(MIN_PAUSE_S * 2**number, MAX_PAUSE_S) for number in range(10)]
    loads.forget(7)
    assert not loads.was_left_out(7)
    assert loads.leave_out(7) == MIN_PAUSE_S


def test_a_thread_that_never_ends_delays_neither_its_loop_nor_the_end_of_that() -> None:
    async def scene() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_daemon_thread(lambda: time.sleep(60)), 0.05)
        await asyncio.wait_for(in_daemon_thread(lambda: None), 5)

    start_s = time.monotonic()
    asyncio.run(scene())
    assert time.monotonic() - start_s < 10

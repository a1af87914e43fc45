"""The pace of a start: an eighth of a core that others want, and no pauses where the core is free."""

from pathlib import Path

import pytest

from penstock.core.machine.start_pace import StartPace, waited_for_core_ns

MS = 1_000_000


class Machine:
    """A clock, and what a process used and waited for."""

    def __init__(self) -> None:
        self.now_ns = 5_000 * MS
        self.cpu_ns = 70 * MS
        self.waited_ns = 30 * MS
        self.pace = StartPace(lambda: self.now_ns, lambda: self.cpu_ns, lambda: self.waited_ns)

    def work(self, *, cpu_ms: int, waited_ms: int) -> float:
        """Compute for some time beside others; return the pause after it in milliseconds, and sleep that long."""
        self.cpu_ns += cpu_ms * MS
        self.waited_ns += waited_ms * MS
        self.now_ns += (cpu_ms + waited_ms) * MS
        pause_s = self.pace.pause_s()
        self.now_ns += round(pause_s * 1e9)
        return pause_s * 1e3


def test_each_part_of_a_start_has_an_eighth_of_a_core_that_others_want() -> None:
    machine = Machine()
    assert machine.work(cpu_ms=5, waited_ms=10) == pytest.approx(40 - 15)
    # The pause before it gives it no more.
    assert machine.work(cpu_ms=10, waited_ms=10) == pytest.approx(80 - 20)
    # It had less than its share.
    assert machine.work(cpu_ms=2, waited_ms=30) == 0


def test_a_start_on_a_free_core_does_not_pause() -> None:
    machine = Machine()
    assert machine.work(cpu_ms=30, waited_ms=0) == 0
    # Others came.
    assert machine.work(cpu_ms=5, waited_ms=5) == pytest.approx(30)


def test_a_pause_is_bounded() -> None:
    assert Machine().work(cpu_ms=3_000, waited_ms=2) == pytest.approx(200)


def test_the_kernel_says_how_long_a_process_waited(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    assert waited_for_core_ns(file) == 0
    file.write_text("123456 7890 12\n")
    assert waited_for_core_ns(file) == 7890
    file.write_text("\n")
    assert waited_for_core_ns(file) == 0
    assert waited_for_core_ns() >= 0

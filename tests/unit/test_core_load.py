"""The idle time of the load generator's cores, and the figures that it makes worthless."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.bench import core_load
from penstock.bench.core_load import CoreLoad
from penstock.bench.streams.stream_benchmark import StreamBenchmark
from penstock.bench.streams.stream_generator import describe
from penstock.bench.streams.stream_sender import StreamLoadResult
from penstock.core.errors import BenchError


def counters(file: Path, cores: dict[int, tuple[int, int]]) -> None:
    """Busy and idle ticks of each core; half of the idle ones are waits for disks."""
    lines = [f"cpu{core} {busy} 0 0 {idle // 2} {idle - idle // 2} 0 0 0 7 7" for core, (busy, idle) in cores.items()]
    file.write_text("\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "intr 5 6", "cpufreq"]))


def test_the_idle_share_is_of_the_named_cores_from_the_beginning_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "stat"
    monkeypatch.setattr(core_load, "STAT", file)
    counters(file, {0: (100, 100), 1: (50, 0), 10: (0, 0)})
    one, both = CoreLoad(frozenset({1})), CoreLoad(frozenset({0, 10}))
    assert math.isnan(one.idle_share())
    counters(file, {0: (140, 120), 1: (60, 30), 10: (20, 120)})
    assert one.idle_share() == 0.75
    assert both.idle_share() == 140 / 200


def test_the_cores_of_this_machine_are_partly_idle() -> None:
    load = CoreLoad()
    share = load.idle_share()
    assert math.isnan(share) or 0 <= share <= 1


def result(idle: float) -> StreamLoadResult:
    counts = dict.fromkeys(("offered", "lost", "repeated", "opened", "refused", "checked"), 0)
    return StreamLoadResult(
        **counts, streams=8, latency_s=np.full(4, 0.01), broken={}, difference=0.0, late_s=0.0, idle=idle
    )


@pytest.mark.parametrize(
    ("idle", "said"),
    [
        (0.34, "cores were idle for 34%"),
        (0.05, "idle for 5% alone: its own delays may be in this"),
        (math.nan, "10.0 ms"),
    ],
)
def test_the_idle_share_stands_beside_the_latency(idle: float, said: str) -> None:
    assert describe(result(idle)).endswith(said)


def test_a_figure_of_busy_cores_is_not_recorded() -> None:
    given: dict[str, Any] = dict.fromkeys(("workload", "bundle", "cpus", "server_cpus", "url"))
    benchmark = StreamBenchmark(
        **given, seconds=1.0, processes=1, options=(), within_ms=50.0, percentile=98.0, say=lambda _: None
    )
    benchmark.check_idle()
    benchmark.idle = 0.2
    benchmark.check_idle()
    benchmark.idle = 0.19
    with pytest.raises(BenchError, match="idle for 19% of the time, and a figure that is recorded needs 20%"):
        benchmark.check_idle()

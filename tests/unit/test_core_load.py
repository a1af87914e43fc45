"""The idle time of the load generator's cores, and the figures that it makes worthless."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.bench import core_load
from penstock.bench.core_load import CoreLoad
from penstock.bench.streams import stream_benchmark
from penstock.bench.streams.stream_benchmark import StreamBenchmark
from penstock.bench.streams.stream_generator import describe
from penstock.bench.streams.stream_result import StreamLoadResult
from penstock.bench.streams.stream_sender import StreamWorkload
from penstock.core.errors import BenchError
from penstock.core.spec import TensorSpec


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
    counts = dict.fromkeys(("offered", "lost", "repeated", "refused", "checked"), 0)
    return StreamLoadResult(
        **counts,
        streams=8,
        opened=8,
        latency_s=np.full(4, 0.01),
        broken={},
        difference=0.0,
        late_s=np.zeros(4),
        idle=idle,
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


def test_streams_that_were_never_opened_are_said() -> None:
    assert "8 streams: p50 10.0, p98 10.0, p99 10.0, p100 10.0 ms; 3 not opened" in describe(
        replace(result(math.nan), opened=5)
    )


def trial(streams: int, idle: float, latency_s: float = 0.01) -> StreamLoadResult:
    return replace(result(idle), streams=streams, opened=streams, latency_s=np.full(4, latency_s))


def benchmark_of(trials: list[StreamLoadResult], monkeypatch: pytest.MonkeyPatch, said: list[str]) -> StreamBenchmark:
    left = iter(trials)
    monkeypatch.setattr(stream_benchmark, "measure_streams", lambda *_, **__: next(left))
    sound = TensorSpec(dtype="int16", shape=(4,), meaning="sound")
    return StreamBenchmark(
        workload=StreamWorkload(url="", model="hark", input=sound, sounds=np.zeros((1, 4), np.int16), period_s=0.02),
        bundle=None,
        seconds=1.0,
        processes=1,
        cpus=None,
        server_cpus=None,
        options=(),
        url="here:1",
        within_ms=50.0,
        percentile=98.0,
        say=said.append,
    )


REFUSED = "idle for 19% of the time, and a figure needs 20%.*--cpu and --server-cpu, or send fewer streams"


def test_busy_cores_give_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = benchmark_of([trial(8, 0.5), trial(8, 0.19)], monkeypatch, [])
    with pytest.raises(BenchError, match=REFUSED):
        benchmark.measure_at([8], repeat=2)
    unknown = benchmark_of([trial(8, math.nan)], monkeypatch, []).measure_at([8], repeat=1)
    assert unknown.median == pytest.approx(10)


def test_busy_cores_give_no_number_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    benchmark = benchmark_of([trial(1, 0.19), trial(2, 0.5, latency_s=0.2)], monkeypatch, said)
    with pytest.raises(BenchError, match=REFUSED):
        benchmark.find_max(1, 1, naive=False)
    assert not any("at most" in line for line in said)


def test_a_sender_that_is_late_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    late = replace(trial(8, 0.5), late_s=np.array([0.001] * 97 + [0.003] * 3), cpu_s=0.4)
    assert describe(late).endswith("cores were idle for 50%, it sent 3.00 ms late (p99)")
    refused = r"sent chunks 3.00 ms late \(p99\), and a figure within 50 ms allows 2.5 ms: its own delays"
    with pytest.raises(BenchError, match=refused):
        benchmark_of([trial(8, 0.5), late], monkeypatch, []).measure_at([8], repeat=2)
    with pytest.raises(BenchError, match=refused):
        benchmark_of([replace(late, streams=1, opened=1), trial(2, 0.5, latency_s=0.2)], monkeypatch, []).find_max(
            1, 1, naive=False
        )


def test_the_idle_share_stands_beside_the_most_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    benchmark = benchmark_of([trial(1, 0.4), trial(2, 0.1, latency_s=0.2)], monkeypatch, said)
    assert benchmark.find_max(1, 1, naive=False).median == 1
    assert said[-1] == "at most 1 stream with p98 within 50 ms; the generator's cores were idle for 40%"

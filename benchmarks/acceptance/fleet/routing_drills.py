"""Servers behind a proxy: requests lost by restarts and kills, the proxy's time, and a server at half speed."""

import statistics
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.acceptance.fleet.routing_load import EndlessLoad, lost_of
from benchmarks.acceptance.fleet.routing_proxies import AS_DEPLOYED, PROXIES, Changes, running_proxy
from benchmarks.acceptance.fleet.routing_servers import RoutedServers, free_ports, routed_servers, write_paced
from penstock.bench.load.generator import Load, LoadResult, measure
from penstock.bench.load.golden_target import golden_target
from penstock.core.errors import BenchError

SERVERS = 4
ROLLING, KILLS = 20, 20
RATE = 200.0
LEAVE_S = 1.5
OPTIONS = ("--latency-ms", "1000", "--leave-s", str(LEAVE_S))

# The p50 with and without a proxy.
REPEAT, P50_S = 5, 4.0

# Four servers of one row a batch; the last takes twice as long.
PACES_S = (0.01, 0.01, 0.01, 0.02)
BUDGET_MS = 250.0
# Time in which weights settle, and time that is measured, at each rate.
SETTLE_S, MEASURED_S = 12.0, 6.0
WITHIN = 0.99
LOWEST, HIGHEST, STEP = 120.0, 360.0, 10.0

Say = Callable[[str], None]


def lost(rolling: int = ROLLING, kills: int = KILLS) -> list[float]:
    """Return the requests without a right answer over all drills, for each proxy.

    Args:
        rolling: Rolling restarts: of each of the servers in turn.
        kills: Servers killed with SIGKILL, and started again.

    Raises:
        BenchError: A proxy is not installed, or no load came through.
    """
    return [float(lost_behind(proxy, rolling=rolling, kills=kills)) for proxy in PROXIES]


def lost_behind(proxy: str, *, rolling: int, kills: int, rate: float = RATE, count: int = SERVERS) -> int:
    """Return the requests without a right answer, over restarts and kills of servers behind one proxy."""
    with behind(proxy, paces_s=(0.0,) * count) as (servers, url, bundle):
        with EndlessLoad(golden_target(url, bundle), rate) as load:
            for _ in range(rolling):
                for index in range(count):
                    servers.restart(index)
                    servers.await_requests(index)
            for number in range(kills):
                servers.kill(number % count)
                servers.start(number % count)
                servers.await_requests(number % count)
        result = load.result
    if len(result.latency_s) < rate:
        raise BenchError(f"the drill had no load: {len(result.latency_s)} answers.")
    return lost_of(result)


def added_ms() -> list[float]:
    """Return what each proxy adds to the p50, for each repetition, in milliseconds.

    Raises:
        BenchError: A proxy is not installed, or answers were wrong.
    """
    added: list[float] = []
    for proxy in PROXIES:
        with behind(proxy) as (servers, url, bundle):
            load = Load(rate=RATE, connections=16, seconds=P50_S)
            for _ in range(REPEAT):
                direct = golden_target(f"http://127.0.0.1:{servers.backends[0].port}", bundle)
                without, through = (_p50_ms(measure(target, load)) for target in (direct, golden_target(url, bundle)))
                added.append(through - without)
    return added


def half_speed() -> list[float]:
    """Return the goodput by load report over that of round robin, for each proxy.

    Goodput is the highest rate at which 99% of the requests are answered within the budget, without second attempts in
    either case, so that it is the choice of the server that is compared.

    Raises:
        BenchError: A proxy is not installed, or answers were wrong.
    """
    ratios: list[float] = []
    for proxy in PROXIES:
        by_report, by_turns = (
            goodput(proxy, Changes(load_report=report, second_attempts=False)) for report in (True, False)
        )
        ratios.append(by_report / by_turns)
    return ratios


def goodput(proxy: str, changes: Changes = AS_DEPLOYED) -> float:
    """Find the highest rate at which 99% of the requests are answered within the budget, one server at half speed."""
    options = ("--latency-ms", str(BUDGET_MS), "--max-batch", "1")
    with behind(proxy, options=options, paces_s=PACES_S, changes=changes) as (_, url, bundle):
        target = golden_target(url, bundle)

        def holds(rate: float) -> bool:
            load = Load(rate=rate, connections=96, seconds=MEASURED_S, warm_up_s=SETTLE_S)
            return measure(target, load).share_within(BUDGET_MS) >= WITHIN

        low, high = LOWEST, HIGHEST
        while high - low > STEP:
            middle = (low + high) / 2
            low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@contextmanager
def behind(
    proxy: str,
    *,
    options: tuple[str, ...] = OPTIONS,
    paces_s: tuple[float, ...] = (0.0,) * SERVERS,
    changes: Changes = AS_DEPLOYED,
) -> Generator[tuple[RoutedServers, str, Path]]:
    """Run servers behind a proxy; yields them, the proxy's URL and the bundle."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_paced(Path(folder))
        with (
            routed_servers(bundle, options, paces_s) as servers,
            running_proxy(proxy, free_ports(1)[0], servers.backends, changes) as url,
        ):
            yield servers, url, bundle


def _p50_ms(result: LoadResult) -> float:
    if result.wrong or result.failed:
        raise BenchError(f"{result.wrong} answers were wrong and {result.failed} failed.")
    return statistics.median(result.latency_s.tolist()) * 1e3

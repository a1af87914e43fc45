"""Servers behind a proxy: requests lost by restarts and kills, the proxy's time, and a server at half speed."""

import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import typer

from benchmarks.acceptance.figures import Repetitions
from benchmarks.acceptance.fleet.routing_load import EndlessLoad, lost_of
from benchmarks.acceptance.fleet.routing_proxies import AS_DEPLOYED, PROXIES, Changes, running_proxy
from benchmarks.acceptance.fleet.routing_servers import RoutedServers, free_ports, routed_servers, write_paced
from penstock.bench.load.generator import Load, LoadResult, measure
from penstock.bench.load.golden_target import golden_target
from penstock.bench.load.sender import Target
from penstock.core.errors import BenchError

SERVERS = 4
ROLLING, KILLS = 20, 20
# Where the rate is not what is measured.
RATE = 200.0
LEAVE_S = 1.5
LATENCY_MS = 1000.0
OPTIONS = ("--latency-ms", str(LATENCY_MS), "--leave-s", str(LEAVE_S))

# The rate of the drills: a share of the highest that holds, in steps. A rate holds where every request is answered, 99%
# within the budget from when they are due, so that the client keeps up too, while another server of the same bundle
# starts and ends, as in a drill.
WANTED_RATE, LOWEST_RATE, GROWTH, SHARE = 5000.0, 100.0, 1.3, 0.7
PROBE_S = 8.0

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


def lost(rolling: int = ROLLING, kills: int = KILLS) -> Repetitions:
    """Return the requests without a right answer over all drills, for each proxy.

    Args:
        rolling: Rolling restarts: of each of the servers in turn.
        kills: Servers killed with SIGKILL, and started again.

    Raises:
        BenchError: A proxy is not installed, or no load came through.
    """
    values: list[float] = []
    notes: list[str] = []
    for proxy in PROXIES:
        with behind(proxy) as (servers, url, bundle):
            highest = highest_rate(golden_target(url, bundle), bundle)
            rate = min(WANTED_RATE, SHARE * highest)
            values.append(float(_lost_by_drills(servers, golden_target(url, bundle), rolling, kills, rate)))
        reason = f", {SHARE:g} of the {highest:.0f} that this machine gives while a server starts"
        notes.append(f"{proxy} at {rate:.0f} requests/s{reason if rate < WANTED_RATE else ''}")
        typer.echo(f"{notes[-1]}: {values[-1]:g} lost")
    return Repetitions(values, "; ".join(notes))


def lost_behind(proxy: str, *, rolling: int, kills: int, rate: float = RATE, count: int = SERVERS) -> int:
    """Return the requests without a right answer, over restarts and kills of servers behind one proxy."""
    with behind(proxy, paces_s=(0.0,) * count) as (servers, url, bundle):
        return _lost_by_drills(servers, golden_target(url, bundle), rolling, kills, rate)


def highest_rate(target: Target, bundle: Path, wanted: float = WANTED_RATE / SHARE) -> float:
    """Find the highest rate that holds, in steps, while another server starts and ends.

    Args:
        target: The proxy.
        bundle: The bundle of the other server.
        wanted: Where the search ends.

    Raises:
        BenchError: Not even the lowest rate holds.
    """
    rate = 0.0
    following = LOWEST_RATE
    with _another_server(bundle):
        while rate < wanted and _holds(target, following):
            rate, following = following, min(following * GROWTH, wanted)
    if not rate:
        raise BenchError(f"this machine does not answer {LOWEST_RATE:g} requests/s while a server starts.")
    return rate


def _holds(target: Target, rate: float) -> bool:
    with EndlessLoad(target, rate) as load:
        time.sleep(PROBE_S)
    result = load.result
    p99_ms = float(np.percentile(result.latency_s, 99)) * 1e3 if result.latency_s.size else math.inf
    typer.echo(f"{rate:.0f} requests/s: p99 {p99_ms:.0f} ms, {lost_of(result)} not answered")
    return lost_of(result) == 0 and p99_ms <= LATENCY_MS


@contextmanager
def _another_server(bundle: Path) -> Generator[None]:
    """Start and end a server that is behind no proxy, until the block ends."""
    over = threading.Event()

    def restart() -> None:
        while not over.is_set():
            with routed_servers(bundle, OPTIONS, (0.0,)):
                pass

    with ThreadPoolExecutor(1) as pool:
        restarts = pool.submit(restart)
        try:
            yield
        finally:
            over.set()
            restarts.result()


def _lost_by_drills(servers: RoutedServers, target: Target, rolling: int, kills: int, rate: float) -> int:
    count = len(servers.backends)
    with EndlessLoad(target, rate) as load:
        for _ in range(rolling):
            for index in range(count):
                servers.restart(index)
                servers.await_requests(index)
        for number in range(kills):
            servers.kill(number % count)
            servers.start(number % count)
            servers.await_requests(number % count)
    if len(load.result.latency_s) < rate:
        raise BenchError(f"the drill had no load: {len(load.result.latency_s)} answers.")
    return lost_of(load.result)


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

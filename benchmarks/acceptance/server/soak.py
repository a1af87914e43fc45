"""A long load on a server whose processes are killed in turn: lost, wrong and hung requests, and growth of memory."""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import numpy as np

from benchmarks.acceptance.server.churn import ChurnResult, run_churn
from penstock.bench.load.generator import Load, find_goodput, measure
from penstock.bench.load.golden_target import golden_target
from penstock.bench.load.sender import Target
from penstock.bench.process_usage import SUPERVISOR, ProcessUsage, client_ports, read_usage, worker_pids
from penstock.bench.server_process import running_server
from penstock.core.errors import BenchError

SAMPLE_S = 1.0
# A connection of a killed front-end breaks within this time after the kill.
BREAK_LIMIT_S = 2.0
# A process's memory is compared from this age on, or from this share of the whole run if that is shorter.
WARM_UP_S = 60.0
WARM_UP_SHARE = 0.2
# The median of this many samples is compared.
COMPARED_SAMPLES = 10
GOODPUT_SECONDS = 3.0
DRAIN_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakSettings:
    """Load and kills of a soak.

    Args:
        bundle: The bundle to serve.
        seconds: Duration of the load.
        rate: Requests a second; None for a share of the server's goodput.
        load: That share.
        frontends: Front-end processes, at least 1.
        kill_every_s: Seconds between two kills.
        budget_ms: The server's latency budget.
        seed: Seed of the arrivals and of the kills.
    """

    bundle: Path
    seconds: float
    rate: float | None = None
    load: float = 0.8
    frontends: int = 2
    kill_every_s: float = 60.0
    budget_ms: float = 50.0
    seed: int = 0

    def __post_init__(self) -> None:
        for good, problem in (
            (self.seconds >= 10, f"the soak lasts {self.seconds:g} s; it must last at least 10."),
            (self.rate is None or self.rate > 0, f"the rate is {self.rate}; it must be above 0."),
            (0 < self.load <= 1, f"the load is {self.load:g}; it must be above 0, to 1."),
            (self.frontends >= 1, "a soak kills processes of their own; give --frontends 1 or more."),
            (self.kill_every_s > 0, f"there are {self.kill_every_s:g} s between kills; it must be above 0."),
        ):
            if not good:
                raise BenchError(problem)

    @property
    def warm_up_s(self) -> float:
        """The age from which a process's memory is compared."""
        return min(WARM_UP_S, WARM_UP_SHARE * self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One `kill -9`: the role, the time, and the client ports of the connections that it closed."""

    role: str
    at_s: float
    ports: frozenset[int]


@dataclass(slots=True)
class ProcessSamples:
    """Usages of one process, with its age in seconds at each."""

    role: str
    start_s: float
    usages: list[tuple[float, ProcessUsage]] = field(default_factory=list[tuple[float, ProcessUsage]])


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakResult:
    """Result of a soak.

    Args:
        requests: Outcomes of the requests.
        kills: The kills.
        lost_by_kills: Requests on connections of killed front-ends.
        lost: Requests on other connections that broke.
        growth: Memory of all processes at the end over that of the first ones after the same warm-up, minus 1.
        first: Usage of each role's first process after its warm-up.
        last: Usage of each role's last process at the end.
        rate: Requests a second that were offered.
    """

    requests: ChurnResult
    kills: tuple[Kill, ...]
    lost_by_kills: int
    lost: int
    growth: float
    first: dict[str, ProcessUsage]
    last: dict[str, ProcessUsage]
    rate: float


def run_soak(settings: SoakSettings, say: Callable[[str], None]) -> SoakResult:
    """Serve, put the load on, kill and sample.

    Raises:
        BenchError: An answer was wrong, a request hung, failed, or was lost otherwise than by a kill of its front-end;
            or the server did not come back after a kill.
    """
    options = ["--frontends", str(settings.frontends), "--latency-ms", f"{settings.budget_ms:g}"]
    with running_server(settings.bundle, options) as server:
        target = golden_target(server.url, settings.bundle)
        rate = settings.rate or _rate(settings, target, say)
        say(f"{rate:,.0f} requests/s for {settings.seconds:g} s, a kill every {settings.kill_every_s:g} s")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            sending = pool.submit(run_churn, target, rate, settings.seconds, settings.seed)
            monitor = _Monitor(settings, server.process.pid, target.port, say)
            monitor.run_until_done(sending)
            requests = sending.result()
        server.process.terminate()
        if server.process.wait(DRAIN_LIMIT_S) != 0:
            raise BenchError(f"the server ended with status {server.process.returncode} after SIGTERM.")
    by_kill = [_broken_by_kill(when_s, port, monitor.kills) for when_s, port in requests.broken]
    first, last = monitor.compared()
    result = SoakResult(
        requests=requests,
        kills=tuple(monitor.kills),
        lost_by_kills=sum(by_kill),
        lost=len(by_kill) - sum(by_kill),
        growth=_memory_bytes(last) / _memory_bytes(first) - 1,
        first=first,
        last=last,
        rate=rate,
    )
    _refuse_if_bad(result)
    return result


def _rate(settings: SoakSettings, target: Target, say: Callable[[str], None]) -> float:
    """The chosen share of the server's goodput."""
    load = Load(rate=None, connections=64, seconds=GOODPUT_SECONDS)
    highest = measure(target, load).answered_a_second * 1.3
    load = replace(load, connections=256)
    goodput, _ = find_goodput(target, load, budget_ms=settings.budget_ms, highest=highest, say=say)
    return settings.load * goodput


def _broken_by_kill(when_s: float, port: int, kills: list[Kill]) -> bool:
    return any(port in kill.ports and 0 <= when_s - kill.at_s < BREAK_LIMIT_S for kill in kills)


def _memory_bytes(usages: dict[str, ProcessUsage]) -> int:
    return sum(usage.memory_bytes for usage in usages.values())


def _refuse_if_bad(result: SoakResult) -> None:
    requests = result.requests
    bad = {
        "wrong answers": requests.wrong,
        "requests that hung": requests.hung,
        "requests that failed": requests.failed,
        "requests lost on connections of processes that were not killed": result.lost,
        "requests never sent, because every connection was in use": requests.unsent,
    }
    found = ", ".join(f"{count:,} {what}" for what, count in bad.items() if count)
    if found:
        raise BenchError(f"of {requests.offered:,} requests there were {found}; there must be none.")


@final
class _Monitor:
    """Samples every process once a second, and kills one at intervals."""

    def __init__(self, settings: SoakSettings, supervisor: int, port: int, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._supervisor = supervisor
        self._port = port
        self._say = say
        self._random = random.Random(settings.seed)
        self._samples: dict[int, ProcessSamples] = {}
        self._roles = {"engine", *(f"front-end {index}" for index in range(settings.frontends))}
        self.kills: list[Kill] = []

    def run_until_done(self, sending: "Future[ChurnResult]") -> None:
        """Sample and kill as long as the load lasts; leave the last killed process time to warm up again."""
        settings = self._settings
        start_s = time.monotonic()
        margin_s = settings.warm_up_s + min(COMPARED_SAMPLES * SAMPLE_S, settings.warm_up_s)
        kill_s, last_kill_s = start_s + margin_s, start_s + settings.seconds - margin_s
        while not sending.done():
            self._sample()
            if kill_s <= time.monotonic() < last_kill_s:
                self._kill()
                kill_s += settings.kill_every_s
            time.sleep(SAMPLE_S)

    def compared(self) -> tuple[dict[str, ProcessUsage], dict[str, ProcessUsage]]:
        """Return the usage of the first and of the last process of each role, after the same warm-up.

        Raises:
            BenchError: A role has no process that ran for that long.
        """
        first: dict[str, ProcessUsage] = {}
        last: dict[str, ProcessUsage] = {}
        warm_up_s = self._settings.warm_up_s
        for role in sorted({*self._roles, SUPERVISOR}):
            own = [each.usages for each in self._samples.values() if each.role == role]
            warm = [found for each in own if (found := [usage for age_s, usage in each if age_s >= warm_up_s])]
            if not warm:
                raise BenchError(f"no process of {role} ran for {warm_up_s:g} s; kill less often.")
            first[role], last[role] = _median(warm[0][:COMPARED_SAMPLES]), _median(warm[-1][-COMPARED_SAMPLES:])
        return first, last

    def _sample(self) -> None:
        now_s = time.monotonic()
        for role, pid in {**worker_pids(self._supervisor), SUPERVISOR: self._supervisor}.items():
            samples = self._samples.setdefault(pid, ProcessSamples(role, now_s))
            usage = read_usage(pid)
            if usage is not None:
                samples.usages.append((now_s - samples.start_s, usage))

    def _kill(self) -> None:
        workers = worker_pids(self._supervisor)
        if workers.keys() != self._roles:
            raise BenchError(f"of {sorted(self._roles)} only {sorted(workers)} run; the server did not come back.")
        role = self._random.choice(sorted(workers))
        pid = workers[role]
        # Stopped first, so that the set of accepted connections is exact.
        os.kill(pid, signal.SIGSTOP)
        ports = frozenset[int]() if role == "engine" else client_ports(pid, self._port)
        self.kills.append(Kill(role=role, at_s=time.monotonic(), ports=ports))
        os.kill(pid, signal.SIGKILL)
        self._say(f"killed {role} (process {pid}) with {len(ports)} connections")


def _median(usages: list[ProcessUsage]) -> ProcessUsage:
    names = ("memory_bytes", "descriptors", "threads")
    return ProcessUsage(**{name: int(np.median([getattr(usage, name) for usage in usages])) for name in names})

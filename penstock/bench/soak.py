"""A server under load for a long time, whose processes are killed one after the other: does it forget, leak or hang?"""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import numpy as np

from penstock.bench.churn import Churn, Churned, run_churn
from penstock.bench.load import Load, find_goodput, measure
from penstock.bench.processes import SUPERVISOR, Use, children, client_ports, use_of
from penstock.bench.target import golden_target
from penstock.core.errors import BenchError

SAMPLE_S = 1.0
# A connection of a killed front-end breaks within so long after the kill.
BREAKS_S = 2.0
# A process's memory is compared once it has run for so long, or for this share of the whole run if that is shorter.
WARM_UP_S = 60.0
WARM_UP_SHARE = 0.2
# Samples of which the median is compared.
COMPARED = 10
GOODPUT_SECONDS = 3.0
STARTS_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a soak does.

    Args:
        bundle: What is served.
        seconds: How long the load lasts.
        rate: Requests a second; None for a share of what the server can carry.
        load: That share.
        frontends: Front-end processes, at least 1.
        kill_every_s: Seconds between two kills.
        budget_ms: The server's latency budget.
        seed: Of the arrivals and of who is killed.
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
            (self.frontends >= 1, "a soak needs processes that can be killed; give --frontends 1 or more."),
            (self.kill_every_s > 0, f"there are {self.kill_every_s:g} s between kills; it must be above 0."),
        ):
            if not good:
                raise BenchError(problem)

    @property
    def warm_up_s(self) -> float:
        """The age from which a process's memory counts."""
        return min(WARM_UP_S, WARM_UP_SHARE * self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One `kill -9`: whom, when, and the clients whose connections it took along, by their ports."""

    role: str
    at_s: float
    ports: frozenset[int]


@dataclass(slots=True)
class Life:
    """The samples of one process of a role: its age in seconds, and what it used."""

    process: int
    role: str
    started_s: float
    ages_s: list[float] = field(default_factory=list[float])
    uses: list[Use] = field(default_factory=list[Use])


@dataclass(frozen=True, kw_only=True, slots=True)
class Soaked:
    """What came of a soak.

    Args:
        churned: What became of the requests.
        kills: Who was killed.
        lost_by_kills: Requests on connections of killed front-ends.
        lost: Requests on other connections that broke.
        growth: Memory of all processes at the end over that of the first ones after the same warm-up, minus 1.
        first: What each role's first process used after its warm-up.
        last: What each role's last process used at the end.
        rate: Requests a second that were offered.
    """

    churned: Churned
    kills: tuple[Kill, ...]
    lost_by_kills: int
    lost: int
    growth: float
    first: dict[str, Use]
    last: dict[str, Use]
    rate: float


def soak(plan: Plan, say: Callable[[str], None]) -> Soaked:
    """Serve, put the load on, kill, watch.

    Raises:
        BenchError: An answer was wrong, a request hung, failed, or was lost otherwise than by a kill of its front-end;
            or the server did not come back after a kill.
    """
    with _server(plan) as (supervisor, url):
        target = golden_target(url, plan.bundle)
        rate = plan.rate
        if rate is None:
            load = Load(rate=None, connections=64, seconds=GOODPUT_SECONDS)
            highest = measure(target, load).answered_a_second * 1.3
            load = replace(load, connections=256)
            rate = plan.load * find_goodput(target, load, budget_ms=plan.budget_ms, highest=highest, say=say)[0]
        say(f"{rate:,.0f} requests/s for {plan.seconds:g} s, a kill every {plan.kill_every_s:g} s")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as pool:
            churn = Churn(target=target, rate=rate, seconds=plan.seconds, seed=plan.seed)
            sending = pool.submit(run_churn, churn)
            watch = _Watch(plan, supervisor, target.port, say)
            watch.until(sending)
            churned = sending.result()
    broken = [_by_kill(when_s, port, watch.kills) for when_s, port in churned.broken]
    first, last = watch.compared()
    soaked = Soaked(
        churned=churned,
        kills=tuple(watch.kills),
        lost_by_kills=sum(broken),
        lost=len(broken) - sum(broken),
        growth=_memory(last) / _memory(first) - 1,
        first=first,
        last=last,
        rate=rate,
    )
    _refuse_if_bad(soaked)
    return soaked


def _by_kill(when_s: float, port: int, kills: list[Kill]) -> bool:
    return any(port in kill.ports and 0 <= when_s - kill.at_s < BREAKS_S for kill in kills)


def _memory(uses: dict[str, Use]) -> int:
    return sum(use.memory_bytes for use in uses.values())


def _refuse_if_bad(soaked: Soaked) -> None:
    churned = soaked.churned
    bad = {
        "wrong answers": churned.wrong,
        "requests that hung": churned.hung,
        "requests that failed": churned.failed,
        "requests lost on connections of processes that were not killed": soaked.lost,
        "requests never sent, because every connection was in use": churned.unsent,
    }
    found = ", ".join(f"{count:,} {what}" for what, count in bad.items() if count)
    if found:
        raise BenchError(f"of {churned.offered:,} requests there were {found}; there must be none.")


@contextmanager
def _server(plan: Plan) -> Generator[tuple[int, str]]:
    command = [sys.executable, "-m", "penstock", "serve", str(plan.bundle), "--port", "0"]
    command += ["--frontends", str(plan.frontends), "--latency-ms", f"{plan.budget_ms:g}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if "http://" not in said:
                raise BenchError("the server did not start; run 'penstock serve' to see why.")
            yield process.pid, said.split()[-1].rstrip("/")
            process.terminate()
            if process.wait(STARTS_S) != 0:
                raise BenchError(f"the server ended with status {process.returncode} when it was told to drain.")
        finally:
            process.kill()


@final
class _Watch:
    """Samples every process once a second, and kills one every now and then."""

    def __init__(self, plan: Plan, supervisor: int, port: int, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._port = port
        self._say = say
        self._random = random.Random(plan.seed)
        self._lives: dict[int, Life] = {}
        self._roles = {"engine", *(f"front-end {index}" for index in range(plan.frontends))}
        self.kills: list[Kill] = []

    def until(self, sending: "Future[Churned]") -> None:
        """Watch and kill as long as the load lasts; whoever is killed last has time to warm up again."""
        plan = self._plan
        start_s = time.monotonic()
        kill_s = start_s + plan.warm_up_s + min(COMPARED * SAMPLE_S, plan.warm_up_s)
        last_kill_s = start_s + plan.seconds - plan.warm_up_s - min(COMPARED * SAMPLE_S, plan.warm_up_s)
        while not sending.done():
            self._sample()
            if kill_s <= time.monotonic() < last_kill_s:
                self._kill()
                kill_s += plan.kill_every_s
            time.sleep(SAMPLE_S)

    def compared(self) -> tuple[dict[str, Use], dict[str, Use]]:
        """What the first and the last process of each role used, after the same warm-up.

        Raises:
            BenchError: A role has no process that ran for that long.
        """
        first: dict[str, Use] = {}
        last: dict[str, Use] = {}
        for role in sorted({*self._roles, SUPERVISOR}):
            settled = [uses for life in self._lives.values() if life.role == role and (uses := self._settled(life))]
            if not settled:
                raise BenchError(f"no process of {role} ran for {self._plan.warm_up_s:g} s; kill less often.")
            first[role], last[role] = _median(settled[0][:COMPARED]), _median(settled[-1][-COMPARED:])
        return first, last

    def _settled(self, life: Life) -> list[Use]:
        return [use for age_s, use in zip(life.ages_s, life.uses, strict=True) if age_s >= self._plan.warm_up_s]

    def _sample(self) -> None:
        now_s = time.monotonic()
        for role, process in {**children(self._supervisor), SUPERVISOR: self._supervisor}.items():
            life = self._lives.setdefault(process, Life(process, role, now_s))
            use = use_of(process)
            if use is not None:
                life.ages_s.append(now_s - life.started_s)
                life.uses.append(use)

    def _kill(self) -> None:
        there = children(self._supervisor)
        if there.keys() != self._roles:
            raise BenchError(f"of {sorted(self._roles)} only {sorted(there)} run; the server did not come back.")
        role = self._random.choice(sorted(there))
        process = there[role]
        # Stopped first, so that what it has accepted is known exactly.
        os.kill(process, signal.SIGSTOP)
        ports = frozenset[int]() if role == "engine" else client_ports(process, self._port)
        self.kills.append(Kill(role=role, at_s=time.monotonic(), ports=ports))
        os.kill(process, signal.SIGKILL)
        self._say(f"killed {role} (process {process}) with {len(ports)} connections")


def _median(uses: list[Use]) -> Use:
    def middle(name: str) -> int:
        return int(np.median([getattr(use, name) for use in uses]))

    return replace(
        uses[0], memory_bytes=middle("memory_bytes"), descriptors=middle("descriptors"), threads=middle("threads")
    )

"""A run: what a server carries, its quiet latency at a share of that, and the same beside each expensive input."""

import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import numpy as np

from penstock.bench.isolation.attacker import Attack, attack, place
from penstock.bench.isolation.carried_rate import CARRIED_P99_MS, LATE_P99_MS, LEAST_REQUESTS, carried
from penstock.bench.isolation.expensive_inputs import APP, ExpensiveInput, expensive_inputs, post
from penstock.bench.isolation.well_behaved import Observed, WellBehaved, percentile_ms, well_behaved
from penstock.bench.load.generator import Floats, Load, measure
from penstock.bench.load.sender import Target
from penstock.bench.server_process import ServerProcess, running_server
from penstock.bench.versioned_app import EXAMPLES, write_live, write_version
from penstock.core.errors import BenchError
from penstock.core.wording.counted import counted

CLOSED_LOOP_S = 1.0
# Times without an attacker: before the first input and after so many.
QUIET_EVERY = 10
# An attack begins so long after its order, for the two processes to be ready.
AHEAD_S = 0.05
# A time in which the clients themselves were too late is measured again, up to so many times in all.
AGAIN = 2
# An input above this ratio, of so many of the worst, is measured so many times again, each of so many seconds at least
# and between two times without an attacker, because the speed of a machine changes, and a pause of it delays any input.
# Times around which the server did not carry the rate do not count, where there are others; in all there are so many.
CHECKED_RATIO, CHECKED, TIMES, LEAST_S, MOST_TIMES = 2.0, 24, 5, 1.0, 8
# Between two inputs: loads of this duration until the p99 is quiet again, for so long at most.
SETTLE_S, SETTLED_RATIO, MAX_SETTLE_S = 0.15, 1.5, 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolationSettings:
    """Settings of a run.

    Args:
        seed: Seed of the arrivals and of the order of the inputs.
        seconds: Duration of the load beside each input.
        connections: Connections of the clients that behave well.
        load: Their share of what the server can carry.
        rate: Their requests a second instead; None to measure what the server carries.
        only: Names of inputs, or beginnings of them; all if empty.
        frontends: Front-end processes; None for the server's default.
        latency_ms: The latency budget.
        server_cpus: Cores of the server; None to choose, see `placement`.
        client_cpus: Cores of the clients and of the attacker; None to choose.
    """

    seed: int = 0
    seconds: float = 1.0
    connections: int = 200
    load: float = 0.7
    rate: float | None = None
    only: tuple[str, ...] = ()
    frontends: int | None = None
    latency_ms: float = 500.0
    server_cpus: frozenset[int] | None = None
    client_cpus: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if not (0 < self.load < 1 and self.seconds > 0 and self.connections > 0):
            raise BenchError(
                f"--load is {self.load:g}, --connections {self.connections} and --seconds {self.seconds:g}; give a "
                f"load between 0 and 1, and the others above 0."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Requests of the others that were due during one time.

    Args:
        name: The input; `quiet` for none.
        requests: Requests of others that were due.
        p99_ms: 99th percentile of their latency; a request without a right answer counts as infinite.
        refused: Those refused, failed or never answered.
        late_p99_ms: 99th percentile of the lateness of the clients' own process.
        attacker_bytes: Bytes that the attacker sent.
        settled_s: Time until the latency was quiet again.
        quiet_p99_ms: 99th percentile without an attacker, with which `p99_ms` is compared.
    """

    name: str
    requests: int
    p99_ms: float
    refused: int
    late_p99_ms: float = 0.0
    attacker_bytes: int = 0
    settled_s: float = 0.0
    quiet_p99_ms: float = math.nan

    @property
    def ratio(self) -> float:
        """The p99 beside the input over the quiet one."""
        return self.p99_ms / self.quiet_p99_ms


@dataclass(frozen=True, slots=True)
class Between:
    """A time beside an input, between two without an attacker.

    Args:
        before: What the clients saw before.
        beside: Beside the input.
        after: And afterwards.
        attacker_bytes: Bytes that the attacker sent.
        settled_s: Time until the latency was quiet again.
    """

    before: Observed
    beside: Observed
    after: Observed
    attacker_bytes: int
    settled_s: float

    @property
    def carried(self) -> bool:
        """True if the server carried the rate without an attacker."""
        return max(self.before.p99_ms, self.after.p99_ms) <= CARRIED_P99_MS


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolationResult:
    """Outcome of a run.

    Args:
        settings: Its settings.
        rate: Requests a second of the others.
        clients_busy: Share of the time in which the clients' process worked, without an attacker.
        quiet: Without an attacker.
        inputs: Beside each input, the worst first.
    """

    settings: IsolationSettings
    rate: float
    clients_busy: float
    quiet: Beside
    inputs: tuple[Beside, ...]

    @property
    def worst_ratio(self) -> float:
        """The largest ratio over all inputs."""
        return max(each.ratio for each in self.inputs)

    @property
    def refused(self) -> int:
        """Requests of others refused beside all inputs."""
        return sum(each.refused for each in self.inputs)


def run_isolation(settings: IsolationSettings, say: Callable[[str], None]) -> IsolationResult:
    """Measure the others' latency beside each input.

    Args:
        settings: What to do.
        say: Called with a sentence for each step.

    Raises:
        BenchError: There is no such input, an answer was wrong, or the machine is too busy.
    """
    inputs = chosen_inputs(settings)
    server_cpus, client_cpus = placement(settings, sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="penstock-isolation-") as folder:
        directory, sources = Path(folder) / "models", Path(folder) / "sources"
        write_version(directory / "steady", sources, 1)
        write_live(directory / "listener", sources)
        options = ["--models", str(directory), "--latency-ms", f"{settings.latency_ms:g}", "--device", "cpu"]
        options += ["--executor", "torch"]
        if settings.frontends is not None:
            options += ["--frontends", str(settings.frontends)]
        with running_server(None, options, cpus=server_cpus) as server:
            target = _target(server)
            _wait_ready(server, target)
            highest = 0.0
            if settings.rate is None:
                load = Load(rate=None, connections=settings.connections, seconds=CLOSED_LOOP_S, cpus=client_cpus)
                highest = measure(target, load).answered_a_second
            with (
                well_behaved(target, settings.connections, client_cpus, settings.seed) as clients,
                ProcessPoolExecutor(
                    1, multiprocessing.get_context("spawn"), initializer=place, initargs=(client_cpus,)
                ) as attacker,
            ):
                rate = settings.rate or settings.load * carried(clients, highest, say)
                each = f"{counted(len(inputs), 'input')}, {settings.seconds:g} s each"
                say(f"{rate:,.0f} requests/s of the others, {each}.")
                run = _Run(settings, target, rate, clients, attacker, say)
                return run.beside_all(inputs)


def chosen_inputs(settings: IsolationSettings) -> list[ExpensiveInput]:
    """Return the inputs of a run in the order of its seed.

    Raises:
        BenchError: There is no input of a name.
    """
    known = expensive_inputs()
    for name in settings.only:
        if not any(each.name.startswith(name) for each in known):
            families = sorted({each.name.partition("/")[0] for each in known})
            raise BenchError(f"there is no input {name!r}; a name begins with one of {', '.join(families)}.")
    found = [each for each in known if not settings.only or each.name.startswith(settings.only)]
    random.Random(settings.seed).shuffle(found)
    return found


def placement(settings: IsolationSettings, cores: Sequence[int]) -> tuple[frozenset[int] | None, frozenset[int] | None]:
    """Choose the cores of the server and of the clients: half of all each, the rest where one is given."""
    server, clients = settings.server_cpus, settings.client_cpus
    if len(cores) == 1:
        return server, clients
    if server is None:
        server = frozenset(cores[: len(cores) // 2] if clients is None else cores) - (clients or frozenset())
    if clients is None:
        clients = frozenset(cores) - server
    return server or None, clients or None


@final
@dataclass(eq=False)
class _Run:
    """The measurements of one server, one after another."""

    settings: IsolationSettings
    target: Target
    rate: float
    clients: WellBehaved
    attacker: ProcessPoolExecutor
    say: Callable[[str], None]
    _quiet: list[Observed] = field(default_factory=list[Observed], init=False)

    def beside_all(self, inputs: Sequence[ExpensiveInput]) -> IsolationResult:
        # The process imports before the first attack is timed.
        self.attacker.submit(abs, 0).result()
        found: list[Beside] = []
        for at, each in enumerate(inputs):
            if at % QUIET_EVERY == 0:
                self._quiet.append(self._in_time(lambda: (self._send(self.settings.seconds), 0))[0])
                if not math.isfinite(self._quiet_p99_ms):
                    raise BenchError(
                        "1% or more of the requests were refused without an attacker; the machine is too busy, or give "
                        "a smaller --load."
                    )
            found.append(self._beside(each))
        found = [replace(each, quiet_p99_ms=self._quiet_p99_ms) for each in found]
        self._check_again(found, inputs)
        self.say(f"Without an attacker: p99 {', '.join(f'{each.p99_ms:.1f}' for each in self._quiet)} ms")
        return IsolationResult(
            settings=self.settings,
            rate=self.rate,
            clients_busy=statistics.mean(each.busy for each in self._quiet),
            quiet=summed("quiet", self._quiet),
            inputs=tuple(sorted(found, key=lambda each: (-each.ratio, -each.refused))),
        )

    @property
    def _quiet_p99_ms(self) -> float:
        if not self._quiet:
            return CARRIED_P99_MS
        return percentile_ms(np.concatenate([each.latency_s for each in self._quiet]))

    def _beside(self, sent: ExpensiveInput) -> Beside:
        observed, count = self._in_time(lambda: self._attacked(sent, self.settings.seconds))
        return summed(sent.name, [observed], attacker_bytes=count, settled_s=self._settle())

    def _check_again(self, found: list[Beside], inputs: Sequence[ExpensiveInput]) -> None:
        worst = sorted(range(len(found)), key=lambda at: -found[at].ratio)[:CHECKED]
        for at in worst:
            if found[at].ratio > CHECKED_RATIO:
                checked = self._compared(inputs[at], found[at])
                self.say(
                    f"{checked.name}: {found[at].ratio:.1f} times quiet, and {checked.ratio:.1f} when compared again."
                )
                found[at] = checked

    def _compared(self, sent: ExpensiveInput, before: Beside) -> Beside:
        """Measure beside an input several times, each between two times without an attacker."""
        seconds = max(LEAST_S, self.settings.seconds)
        times: list[Between] = []
        while sum(each.carried for each in times) < TIMES and len(times) < MOST_TIMES:
            quiet = self._send(seconds)
            beside, attacker_bytes = self._in_time(lambda: self._attacked(sent, seconds))
            settled_s = self._settle()
            times.append(Between(quiet, beside, self._send(seconds), attacker_bytes, settled_s))
        return compared(before, times)

    def _in_time(self, measured: Callable[[], tuple[Observed, int]]) -> tuple[Observed, int]:
        """Repeat a measurement in which the clients' own process was held up, as by another one of this machine."""
        for _ in range(AGAIN - 1):
            observed, count = measured()
            if observed.late_p99_ms <= LATE_P99_MS:
                return observed, count
            self._settle()
        return measured()

    def _attacked(self, sent: ExpensiveInput, seconds: float) -> tuple[Observed, int]:
        begin_s = time.monotonic() + AHEAD_S
        window = Attack(input=sent, begin_s=begin_s, end_s=begin_s + seconds)
        sending = self.attacker.submit(attack, self.target.host, self.target.port, window)
        observed = self._send(seconds, begin_s)
        return observed, sending.result()

    def _send(self, seconds: float, begin_s: float | None = None) -> Observed:
        return self.clients.send(self.rate, seconds, begin_s)

    def _settle(self) -> float:
        """Wait until the latency is quiet again; return how long that took."""
        begin_s = time.monotonic()
        while True:
            passed_s = time.monotonic() - begin_s
            seen = self.clients.send(self.rate, SETTLE_S)
            if passed_s > MAX_SETTLE_S or seen.p99_ms <= SETTLED_RATIO * self._quiet_p99_ms:
                return passed_s


def compared(before: Beside, times: Sequence[Between]) -> Beside:
    """Compare all times beside an input with all times around them.

    Args:
        before: What was seen beside it before; only its counts remain.
        times: The times. Those around which the rate was not carried count only where there are no others.
    """
    counted = [each for each in times if each.carried] or times
    quiet = summed("quiet", [seen for each in counted for seen in (each.before, each.after)])
    return replace(
        summed(before.name, [each.beside for each in counted]),
        quiet_p99_ms=quiet.p99_ms,
        requests=before.requests + sum(len(each.beside.due_s) for each in times),
        refused=before.refused + sum(each.beside.refused for each in times),
        attacker_bytes=before.attacker_bytes + sum(each.attacker_bytes for each in times),
        settled_s=max(before.settled_s, *(each.settled_s for each in times)),
    )


def summed(name: str, seen: Sequence[Observed], *, attacker_bytes: int = 0, settled_s: float = 0.0) -> Beside:
    """Sum what was seen during one or several times.

    Raises:
        BenchError: There were too few requests for a percentile.
    """
    latency_s: Floats = np.concatenate([each.latency_s for each in seen])
    if len(latency_s) < LEAST_REQUESTS:
        raise BenchError(
            f"only {counted(len(latency_s), 'request was', 'requests were')} due beside {name}, too few for a p99; "
            f"give more --seconds."
        )
    return Beside(
        name=name,
        requests=len(latency_s),
        p99_ms=percentile_ms(latency_s),
        refused=sum(each.refused for each in seen),
        late_p99_ms=percentile_ms(np.concatenate([each.late_s for each in seen])),
        attacker_bytes=attacker_bytes,
        settled_s=settled_s,
    )


def _target(server: ServerProcess) -> Target:
    host, _, port = server.url.rpartition("/")[2].rpartition(":")
    kind = "application/octet-stream"
    return Target(
        host=host,
        port=int(port),
        requests=tuple(post(APP, row.tobytes(), kind, Accept=kind) for row in EXAMPLES),
        answers=np.concatenate([2 * EXAMPLES, np.ones((len(EXAMPLES), 1), np.float32)], 1),
        tolerance=0.0,
    )


def _wait_ready(server: ServerProcess, target: Target) -> None:
    import http.client

    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    raise BenchError(f"the server was not ready in 60 s: {server.log_text()[-500:]}")

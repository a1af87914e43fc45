"""A run: the capacity of a server, its quiet latency at a share of that, and the same beside each expensive input."""

import math
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.bench.isolation.attacker import Attack, attack
from penstock.bench.isolation.expensive_inputs import APP, ExpensiveInput, expensive_inputs, post
from penstock.bench.load.generator import CONNECT_S, STRAGGLERS_S, Floats, Load, measure, poisson
from penstock.bench.load.sender import Sender, SenderJob, Target
from penstock.bench.server_process import ServerProcess, running_server
from penstock.bench.versioned_app import EXAMPLES, write_live, write_version
from penstock.core.errors import BenchError

CAPACITY_S = 2.0
WARM_UP_S = 1.0
QUIET_SHARE = 0.12
# Between two inputs: what the one left waiting is not counted for the next.
GAP_SHARE = 0.3
LEAST_S = 0.2
LEAST_REQUESTS = 20
# Processes that send, and the start of the server.
AHEAD_S = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolationSettings:
    """Settings of a run.

    Args:
        seed: Seed of the arrivals and of the order of the inputs.
        seconds: Duration of the quiet time and all inputs together.
        connections: Connections of the clients that behave well.
        load: Their share of what the server can carry.
        only: Names of inputs, or beginnings of them; all if empty.
        frontends: Front-end processes; None for the server's default.
        latency_ms: The latency budget.
        server_cpus: Cores of the server; None for any.
        client_cpus: Cores of the clients; None for any.
    """

    seed: int = 0
    seconds: float = 45.0
    connections: int = 200
    load: float = 0.7
    only: tuple[str, ...] = ()
    frontends: int | None = None
    latency_ms: float = 500.0
    server_cpus: frozenset[int] | None = None
    client_cpus: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if not (0 < self.load < 1 and self.seconds > 0 and self.connections > 0):
            raise BenchError(
                f"the load is {self.load:g}, {self.connections} connections, {self.seconds:g} s; give a load between "
                f"0 and 1, and the others above 0."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """Requests of the others that were due during one time.

    Args:
        name: The input; `quiet` for none.
        requests: Requests of others that were due.
        p99_ms: 99th percentile of their latency; a request without a right answer counts as infinite.
        refused: Those refused, failed or never answered.
        attacker_bytes: Bytes that the attacker sent.
    """

    name: str
    requests: int
    p99_ms: float
    refused: int
    attacker_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class IsolationResult:
    """Outcome of a run.

    Args:
        settings: Its settings.
        capacity: Answers a second that the server can carry.
        quiet: Without an attacker.
        inputs: Beside each input, the worst first.
    """

    settings: IsolationSettings
    capacity: float
    quiet: Beside
    inputs: tuple[Beside, ...]

    def ratio(self, beside: Beside) -> float:
        """Return the p99 beside an input over the quiet one."""
        return beside.p99_ms / self.quiet.p99_ms

    @property
    def worst_ratio(self) -> float:
        """The largest ratio over all inputs."""
        return max(map(self.ratio, self.inputs))

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
        BenchError: There is no such input, an answer was wrong, or the times are too short.
    """
    inputs = chosen_inputs(settings)
    with tempfile.TemporaryDirectory(prefix="penstock-isolation-") as folder:
        directory, sources = Path(folder) / "models", Path(folder) / "sources"
        write_version(directory / "steady", sources, 1)
        write_live(directory / "listener", sources)
        options = ["--models", str(directory), "--latency-ms", f"{settings.latency_ms:g}", "--device", "cpu"]
        options += ["--executor", "torch"]
        if settings.frontends is not None:
            options += ["--frontends", str(settings.frontends)]
        with running_server(None, options, cpus=settings.server_cpus) as server:
            target = _target(server)
            _wait_ready(server, target)
            load = Load(
                rate=None,
                connections=settings.connections,
                seconds=CAPACITY_S,
                cpus=settings.client_cpus,
                warm_up_s=0.5,
            )
            capacity = measure(target, load).answered_a_second
            say(f"The server carries {capacity:,.0f} answers a second; the others use {settings.load:.0%} of them.")
            return _beside_all(settings, target, capacity, inputs, say)


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


def windows(seconds: float, count: int, start_s: float) -> tuple[float, list[tuple[float, float]]]:
    """Divide the time: return the end of the quiet part, and begin and end of each input.

    Raises:
        BenchError: There is too little time.
    """
    quiet_end_s = start_s + max(1.0, QUIET_SHARE * seconds)
    each_s = (start_s + seconds - quiet_end_s) / count
    if each_s < LEAST_S:
        raise BenchError(
            f"{seconds:g} s are too short for {count} inputs; give at least {count * LEAST_S / 0.8 + 1:.0f}."
        )
    gap_s = GAP_SHARE * each_s
    begins = [quiet_end_s + index * each_s for index in range(count)]
    return quiet_end_s, [(begin_s + gap_s, begin_s + each_s) for begin_s in begins]


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


def _beside_all(
    settings: IsolationSettings,
    target: Target,
    capacity: float,
    inputs: Sequence[ExpensiveInput],
    say: Callable[[str], None],
) -> IsolationResult:
    start_s = time.monotonic() + AHEAD_S + CONNECT_S * settings.connections
    measured_s = start_s + WARM_UP_S
    quiet_end_s, times = windows(settings.seconds, len(inputs), measured_s)
    load = Load(
        rate=settings.load * capacity,
        connections=settings.connections,
        seconds=settings.seconds,
        warm_up_s=WARM_UP_S,
        seed=settings.seed,
    )
    assert load.rate is not None
    job = SenderJob(
        target=target,
        due_s=start_s + poisson(load.rate, load, 0),
        start_s=start_s,
        measured_from_s=measured_s,
        end_s=measured_s + settings.seconds,
        connections=settings.connections,
        stragglers_s=STRAGGLERS_S,
        cpus=settings.client_cpus,
    )
    attacks = [Attack(input=each, begin_s=a, end_s=b) for each, (a, b) in zip(inputs, times, strict=True)]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        sending = pool.submit(send_and_time, job)
        attacking = pool.submit(attack, target.host, target.port, attacks)
        say(f"{len(inputs)} inputs, {times[0][1] - times[0][0]:.2f} s each")
        (due_s, latency_s), sent = sending.result(), attacking.result()
    quiet = beside("quiet", due_s, latency_s, measured_s, quiet_end_s)
    if not quiet.requests or not math.isfinite(quiet.p99_ms):
        raise BenchError(
            f"{quiet.refused:,} of {quiet.requests:,} requests were refused without an attacker; the machine is too "
            f"busy, or give a smaller --load."
        )
    found = [
        beside(each.input.name, due_s, latency_s, each.begin_s, each.end_s, count)
        for each, count in zip(attacks, sent, strict=True)
    ]
    worst_first = sorted(found, key=lambda each: (-each.p99_ms, -each.refused))
    return IsolationResult(settings=settings, capacity=capacity, quiet=quiet, inputs=tuple(worst_first))


def send_and_time(job: SenderJob) -> tuple[Floats, Floats]:
    """Send a job; return when each request was due and its latency in seconds, infinite without a right status.

    Raises:
        BenchError: An answer was wrong.
    """
    sender = Sender(job)
    sender.send_all()
    assert job.due_s is not None
    if wrong := job.target.count_wrong(
        [(which, body) for _, _, which, status, body in sender.finished if status == 200 and body]
    ):
        raise BenchError(f"{wrong:,} answers are wrong; a wrong answer has no latency.")
    latency_s = np.full(len(job.due_s), np.inf)
    for due_s, done_s, _, status, _ in sender.finished:
        if status == 200:
            latency_s[np.searchsorted(job.due_s, due_s)] = done_s - due_s
    return job.due_s, latency_s


def beside(name: str, due_s: Floats, latency_s: Floats, begin_s: float, end_s: float, sent: int = 0) -> Beside:
    """Sum the requests that were due in a time.

    Raises:
        BenchError: There were too few for a percentile.
    """
    chosen = latency_s[(due_s >= begin_s) & (due_s < end_s)]
    if len(chosen) < LEAST_REQUESTS:
        raise BenchError(f"only {len(chosen)} requests were due beside {name}; give more --seconds.")
    p99_s = float(np.percentile(chosen, 99, method="higher"))
    return Beside(
        name=name,
        requests=len(chosen),
        p99_ms=p99_s * 1e3,
        refused=int(np.isinf(chosen).sum()),
        attacker_bytes=sent,
    )

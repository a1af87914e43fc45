"""A run: a server, its clients, the faults of a seed one after another, and the check of every history."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.bench.chaos.chaos_history import ChaosHistory, Event
from penstock.bench.chaos.checker import Violation, check, failures, recoveries
from penstock.bench.chaos.clients import ClientsJob
from penstock.bench.chaos.compiled_clients import running_clients
from penstock.bench.chaos.control_process import Control
from penstock.bench.chaos.fault_schedule import KINDS, Planned, schedule
from penstock.bench.chaos.numbered_input import input_of
from penstock.bench.chaos.other_processes import OtherProcesses
from penstock.bench.chaos.planned_faults import Faults
from penstock.bench.chaos.small_disk import Disk, small_disk
from penstock.bench.chaos.subject import GUEST, STEADY, Models, Subject
from penstock.bench.isolation.expensive_inputs import post
from penstock.bench.load.generator import Load, measure
from penstock.bench.load.sender import Target
from penstock.bench.server_process import running_server
from penstock.core.errors import BenchError
from penstock.serve.control.fork_server import GATHER_S

START_LIMIT_S = 120.0
BACK_LIMIT_S = 30.0
QUIET_S = 0.5
WARM_UP_S, CAPACITY_S = 1.0, 3.0
# The rate of an overload, relative to that of a closed loop.
OVERLOAD = 2.0
LOADS = 3
# The server gives up a step of a load after this share of the time after which an operation is stuck.
LOAD_SHARE = 0.5
# Pause before each fault for the requests that have piled up: a tenth of a second of work takes half a second more at
# 80% load.
PILED_UP_S = 1.5
# A p99 of the clients' own lateness with which nothing is measured.
MAX_CLIENTS_LATE_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosSettings:
    """Settings of a run.

    Args:
        seed: Seed of the faults and the load.
        events: Most faults.
        seconds: No fault begins after this time.
        rate: Requests a second.
        connections: Most connections of the clients.
        frontends: Front-end processes of the server.
        latency_ms: Its latency budget.
        watchdog_s: Its watchdog's time.
        limit_s: An operation that is not answered in this time is stuck.
        kinds: The kinds of faults.
        server_cpus: Cores of the server; None for any.
        client_cpus: Cores of the clients; None for any.
        measure_lateness: Run a control process on the cores of the server and of the clients.
        from_whole: Each fault waits until every front-end accepts connections, and some time for what has piled up.
    """

    seed: int = 0
    events: int = 1_000_000
    seconds: float = 45.0
    rate: float = 150.0
    connections: int = 32
    frontends: int = 2
    latency_ms: float = 50.0
    watchdog_s: float = 30.0
    limit_s: float = 30.0
    kinds: tuple[str, ...] = KINDS
    server_cpus: frozenset[int] | None = None
    client_cpus: frozenset[int] | None = None
    measure_lateness: bool = False
    from_whole: bool = False

    def __post_init__(self) -> None:
        for name in ("events", "seconds", "rate", "connections", "frontends", "latency_ms", "watchdog_s", "limit_s"):
            if not getattr(self, name) > 0:
                raise BenchError(f"{name} is {getattr(self, name)}; it must be above 0.")


@dataclass(kw_only=True, slots=True)
class ChaosResult:
    """Outcome of a run.

    Args:
        settings: Its settings.
        histories: The history of each server, without the answers: a new one is started where one does not come back.
        violations: All violations.
        recovery: Each fault and the seconds until no request failed any more, beyond one load.
        requests: All requests.
        avoidable_5xx: Answers of 500 and more to requests for a model that was surely loaded.
        restarts: How often a new server had to be started.
        clients_late_s: How late the clients were in taking up a request, the worst 99th percentile of a history.
        others_cores: Mean number of cores that processes beside the run were seen to use, in the worst history. The
            control processes do not see them.
        over_budget: The worst lateness past the budget in milliseconds, beyond the control processes, and the fault
            before it; None if not measured.
    """

    settings: ChaosSettings
    histories: list[ChaosHistory] = field(default_factory=list[ChaosHistory])
    violations: list[Violation] = field(default_factory=list[Violation])
    recovery: list[tuple[Event, float]] = field(default_factory=list[tuple[Event, float]])
    requests: int = 0
    avoidable_5xx: int = 0
    restarts: int = 0
    clients_late_s: float = 0.0
    others_cores: float = 0.0
    over_budget: tuple[float, Event | None] | None = None

    @property
    def events(self) -> list[Event]:
        """All faults that were brought about or skipped."""
        return [event for history in self.histories for event in history.events]

    @property
    def worst(self) -> tuple[Event, float] | None:
        """The fault with the longest recovery."""
        return max(self.recovery, key=lambda pair: pair[1], default=None)

    @property
    def counts(self) -> dict[str, int]:
        """The number of violations of each kind that occurred."""
        return dict(Counter(violation.kind for violation in self.violations))

    def events_before(self, violation: Violation) -> int:
        """Return how many faults a schedule must have to reach the violation."""
        return 1 + max((event.number for event in self.events if event.begun_s <= violation.at_s), default=0)


def run_chaos(settings: ChaosSettings, say: Callable[[str], None]) -> ChaosResult:
    """Bring faults about until the events or the seconds are over.

    Args:
        settings: What to do.
        say: Called with a sentence for each fault.

    Raises:
        BenchError: The server did not start, no fault began in the time, or lateness was to be measured by clients that
            could not keep up themselves.
    """
    result = ChaosResult(settings=settings)
    planned = schedule(settings.seed, min(settings.events, int(settings.seconds * 50) + 1), settings.kinds)
    left_s = settings.seconds
    with _prepared(settings) as disk:
        models = Models(disk)
        left = planned
        while left and left_s > 0:
            left = _serve(settings, disk, models, left, left_s, result, say)
            # The starts of servers do not count: each history begins when its server is ready.
            left_s = settings.seconds - sum(history.over_s - history.began_s for history in result.histories)
            if left and left_s > 0:
                result.restarts += 1
                models.mend()
    if not result.recovery:
        raise BenchError(f"not one fault began within {settings.seconds:g} s; give more --seconds.")
    if settings.measure_lateness:
        _check_clients(result.clients_late_s)
    return result


def _check_clients(late_s: float) -> None:
    if late_s > MAX_CLIENTS_LATE_S:
        raise BenchError(f"the clients themselves are {late_s * 1e3:.1f} ms late (p99); give a lower rate.")


@contextmanager
def _prepared(settings: ChaosSettings) -> Generator[Disk]:
    """Make a disk, and run this process on the cores of the clients: its requests are a client's, too."""
    before = os.sched_getaffinity(0)
    try:
        # A server without cores of its own would inherit them.
        if settings.server_cpus and settings.client_cpus:
            os.sched_setaffinity(0, settings.client_cpus)
        with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as folder, small_disk(Path(folder) / "disk") as disk:
            yield disk
    finally:
        os.sched_setaffinity(0, before)


def measured_rate(settings: ChaosSettings, share: float) -> ChaosSettings:
    """Return the settings with a rate that is a share of the most right answers a second to the clients of a run.

    Raises:
        BenchError: The share is not between 0 and 1, or the server did not start.
    """
    if not 0 < share < 1:
        raise BenchError(f"the load is {share:g}; give a share between 0 and 1.")
    with (
        _prepared(settings) as disk,
        _served(settings, disk, Models(disk)) as subject,
        _controls(settings),
    ):
        target = Target(
            host=subject.host,
            port=subject.port,
            requests=(post(f"/v1/apps/{STEADY}", json.dumps(input_of(0)).encode()),),
            answers=None,
            tolerance=0.0,
        )
        load = Load(
            rate=None,
            connections=settings.connections,
            seconds=CAPACITY_S,
            cpus=settings.client_cpus,
            warm_up_s=WARM_UP_S,
            sender="auto",
        )
        # Clients that open a connection now and then, as those of a run do, are carried at a lower rate.
        job = _job(replace(settings, rate=OVERLOAD * measure(target, load).answered_a_second), subject)
        with running_clients(job) as clients:
            time.sleep(WARM_UP_S)
            begin_s = time.monotonic()
            time.sleep(CAPACITY_S)
            end_s = time.monotonic()
            outcome = clients.stop()
        _check_clients(outcome.late_s)
        carried = sum(answer.status == 200 and begin_s <= answer.ended_s < end_s for answer in outcome.answers)
        return replace(settings, rate=share * carried / (end_s - begin_s))


@contextmanager
def _served(settings: ChaosSettings, disk: Disk, models: Models) -> Generator[Subject]:
    """Run a server that is ready and rests."""
    with (
        running_server(None, _options(settings, disk, models), cpus=settings.server_cpus) as server,
        Subject(server, models, settings.limit_s, settings.frontends) as subject,
    ):
        if not subject.wait_back(START_LIMIT_S):
            raise BenchError(f"the server was not ready in {START_LIMIT_S:g} s: {server.log_text()[-500:]}")
        subject.wait_settled(START_LIMIT_S)
        yield subject


@contextmanager
def _controls(settings: ChaosSettings) -> Generator[list[Control]]:
    """Run control processes on the cores of the server and of the clients, if lateness is measured."""
    cores = {settings.server_cpus, settings.client_cpus} if settings.measure_lateness else ()
    controls = [Control(cpus) for cpus in cores]
    try:
        yield controls
    finally:
        for control in controls:
            control.stop()


def _job(settings: ChaosSettings, subject: Subject) -> ClientsJob:
    return ClientsJob(
        host=subject.host,
        port=subject.port,
        models={STEADY: 0.8, GUEST: 0.2},
        rate=settings.rate,
        connections=settings.connections,
        seed=settings.seed,
        cpus=settings.client_cpus,
    )


def _options(settings: ChaosSettings, disk: Disk, models: Models) -> list[str]:
    return [
        *("--models", str(models.directory), "--frontends", str(settings.frontends), "--cache", str(disk.folder)),
        *("--latency-ms", f"{settings.latency_ms:g}", "--watchdog-s", f"{settings.watchdog_s:g}"),
        *("--executor", "torch", "--device", "cpu"),
        # A load that hangs is answered before it counts as stuck.
        *("--load-timeout-s", f"{settings.limit_s * LOAD_SHARE:g}"),
    ]


def _serve(
    settings: ChaosSettings,
    disk: Disk,
    models: Models,
    planned: list[Planned],
    left_s: float,
    result: ChaosResult,
    say: Callable[[str], None],
) -> list[Planned]:
    """Serve until a fault leaves something stuck; check the history; return what is left to be done."""
    with _served(settings, disk, models) as subject:
        history = _begin(subject, models)
        with _controls(settings) as controls, running_clients(_job(settings, subject)) as clients:
            time.sleep(QUIET_S)
            end_s = history.began_s + left_s
            faults, others = Faults(subject, disk, settings.watchdog_s), OtherProcesses(os.getpid())
            done = _bring_about(settings, faults, subject, planned, end_s, history, say, others)
            time.sleep(QUIET_S)
            history.over_s = time.monotonic()
            outcome = clients.stop()
        history.answers = outcome.answers
        result.clients_late_s = max(result.clients_late_s, outcome.late_s)
        result.others_cores = max(result.others_cores, others.cores)
    history.operations += subject.operations
    history.readiness = subject.readiness
    _take(result, history, controls)
    return planned[done:]


def _begin(subject: Subject, models: Models) -> ChaosHistory:
    for _ in range(LOADS):
        subject.load(STEADY)
    load_s = min(one.ended_s - one.sent_s for one in subject.operations) + _import_seconds(models)
    # The imports for later restarts begin after this time.
    time.sleep(GATHER_S)
    subject.wait_settled(START_LIMIT_S)
    return ChaosHistory(started=dict(models.on_disk), began_s=time.monotonic(), over_s=0.0, load_s=load_s)


def _import_seconds(models: Models) -> float:
    """Return how long a new process takes to import the application, which a load in one includes."""
    file = models.sources / f"v{models.on_disk[STEADY]}" / "app.py"
    begin_s = time.monotonic()
    subprocess.run([sys.executable, str(file)], check=True)
    return time.monotonic() - begin_s


def _bring_about(
    settings: ChaosSettings,
    faults: Faults,
    subject: Subject,
    planned: list[Planned],
    end_s: float,
    history: ChaosHistory,
    say: Callable[[str], None],
    others: OtherProcesses,
) -> int:
    """Return how many were done: all, or up to the one after which something is stuck."""
    done = 0
    for each in planned:
        time.sleep(each.pause_s + settings.from_whole * PILED_UP_S)
        if time.monotonic() >= end_s:
            break
        others.look()
        event = faults.bring_about(each, left_s=end_s - time.monotonic())
        history.events.append(event)
        done += 1
        say(f"{event.number}: {event.kind}: {(event.skipped and f'skipped, {event.skipped}') or event.detail}")
        is_stuck = any(one.status == 0 for one in subject.operations)
        if is_stuck or not subject.wait_back(BACK_LIMIT_S, whole=settings.from_whole):
            say("The server is stuck; another one is started." if is_stuck else "The server did not come back.")
            return done
    # The seconds are over: nothing is left.
    return len(planned) if done < len(planned) else done


def _take(result: ChaosResult, history: ChaosHistory, controls: list[Control]) -> None:
    result.histories.append(history)
    # A walk over all answers, of which there can be millions.
    failed = failures(history)
    result.violations += check(history)
    result.recovery += [(event, max(0.0, seconds - history.load_s)) for event, seconds in recoveries(history, failed)]
    result.requests += len(history.answers)
    result.avoidable_5xx += sum(answer.status >= 500 for answer in failed)
    if controls:
        over = _over_budget(history, result.settings.latency_ms / 1e3, controls)
        result.over_budget = max(result.over_budget or over, over, key=lambda pair: pair[0])
    # Millions of them: the next history needs the memory.
    history.answers = []


def _over_budget(history: ChaosHistory, budget_s: float, controls: list[Control]) -> tuple[float, Event | None]:
    over_ms, worst = 0.0, None
    for answer in history.answers:
        late_s = answer.ended_s - answer.due_s - budget_s
        if late_s * 1e3 <= over_ms or answer.end != "answer" or answer.status != 200:
            continue
        late_s -= sum(each.worst_s(answer.due_s, answer.ended_s) for each in controls)
        if late_s * 1e3 > over_ms:
            over_ms, worst = late_s * 1e3, answer
    if worst is None:
        return 0.0, None
    before = [event for event in history.events if event.begun_s <= worst.ended_s]
    return over_ms, before[-1] if before else None

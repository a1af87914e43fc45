"""A run: a server, its clients, the faults of a seed one after another, and the check of every history."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from penstock.bench.chaos.chaos_history import ChaosHistory, Event, RequestEnd
from penstock.bench.chaos.chaos_result import ChaosResult, ChaosSettings
from penstock.bench.chaos.checker import check, failures, recoveries
from penstock.bench.chaos.control_process import Control
from penstock.bench.chaos.fault_schedule import Planned, schedule
from penstock.bench.chaos.lateness import Lateness, is_within, lateness
from penstock.bench.chaos.other_processes import OtherProcesses
from penstock.bench.chaos.planned_faults import Faults
from penstock.bench.chaos.quiet_times import QuietTimes
from penstock.bench.chaos.run_load import RunLoad, check_clients
from penstock.bench.chaos.small_disk import Disk, small_disk
from penstock.bench.chaos.subject import STEADY, Models, Subject
from penstock.bench.server_process import running_server
from penstock.core.errors import BenchError
from penstock.serve.control.fork_server import GATHER_S

START_LIMIT_S = 120.0
BACK_LIMIT_S = 30.0
QUIET_S = 0.5
LOADS = 3
# The server gives up a step of a load after this share of the time after which an operation is stuck.
LOAD_SHARE = 0.5
# Pause before each fault for the requests that have piled up: a tenth of a second of work takes half a second more at
# 80% load.
PILED_UP_S = 1.5
# A machine that pauses for this share of the budget makes requests late, with or without faults.
PAUSED_SHARE = 0.5


def run_chaos(settings: ChaosSettings, say: Callable[[str], None]) -> ChaosResult:
    """Bring faults about until the events or the seconds are over.

    Args:
        settings: What to do.
        say: Called with a sentence for each fault.

    Raises:
        BenchError: The server did not start, no fault began in the time, or lateness was to be measured by clients that
            could not keep up themselves, or of a server that never kept its budget.
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
        check_clients(result.clients_late_s)
        if result.pairs and result.late_pairs == result.pairs and not result.violations:
            raise BenchError(
                f"in none of {result.pairs} pairs of times with and without faults did the server keep its budget "
                f"without faults; give a lower load or rate."
            )
    return result


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
        with _controls(settings) as controls, RunLoad(settings, subject, say) as load:
            time.sleep(QUIET_S)
            end_s = history.began_s + left_s
            faults, others = Faults(subject, disk, settings.watchdog_s), OtherProcesses(os.getpid())
            quiet = (
                QuietTimes(subject, load, history.quiet, settings.server_cpus) if settings.measure_lateness else None
            )
            done = _bring_about(settings, faults, subject, planned, end_s, history, say, others, quiet)
            if quiet is not None:
                quiet.end()
            time.sleep(QUIET_S)
            history.over_s = time.monotonic()
            outcome = load.stop()
        history.answers = outcome.answers
        result.rates += load.rates
        result.clients_late_s = max(result.clients_late_s, outcome.late_s)
        result.others_cores = max(result.others_cores, others.cores)
        result.busy = result.busy if quiet is None else quiet.busy
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
    quiet: QuietTimes | None,
) -> int:
    """Return how many were done: all, or up to the one after which something is stuck."""
    done = 0
    for each in planned:
        if quiet is not None and not quiet.before(done, len(planned) - done, end_s):
            break
        time.sleep(each.pause_s + settings.from_whole * PILED_UP_S)
        if quiet is None and time.monotonic() >= end_s:
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
        if quiet is not None:
            quiet.after(done, is_last=done == len(planned))
    # The seconds are over: nothing is left.
    return len(planned) if done < len(planned) else done


def _take(result: ChaosResult, history: ChaosHistory, controls: list[Control]) -> None:
    result.histories.append(history)
    # A walk over all answers, of which there can be millions.
    failed = failures(history)
    result.violations += check(history)
    result.recovery += [(event, max(0.0, seconds - history.load_s)) for event, seconds in recoveries(history, failed)]
    result.requests += len(history.answers)
    budget_s = result.settings.latency_ms / 1e3
    spans: list[tuple[float, float]] = []
    if controls:
        judged = lateness(history.answers, history.quiet, history.events, budget_s, controls)
        spans = judged.spans
        result.beside_faults = judged.beside.joined(result.beside_faults or Lateness())
        result.without_faults = judged.without.joined(result.without_faults or Lateness())
        result.pairs += len(history.quiet)
        result.late_pairs += judged.left_out
        result.left_out = judged.beside_left_out.joined(result.left_out)
    for answer in failed:
        if answer.status >= 500:
            pause_s = max((each.longest_s(answer.due_s, answer.ended_s) for each in controls), default=0.0)
            if pause_s >= PAUSED_SHARE * budget_s:
                result.paused_5xx += 1
                result.failed.append(_sentence(answer, history.events, f"beside a pause of {pause_s * 1e3:.0f} ms"))
                continue
            begun = any(event.begun_s <= answer.ended_s for event in history.events)
            quiet = not begun or is_within(spans, answer.due_s)
            result.avoidable_5xx += not quiet
            result.without_faults_5xx += quiet
            result.failed.append(_sentence(answer, history.events, "in a time without faults" if quiet else ""))
    # Millions of them: the next history needs the memory.
    history.answers = []


def _sentence(answer: RequestEnd, events: list[Event], when: str) -> str:
    before = [event for event in events if event.begun_s <= answer.ended_s]
    if before and not when:
        last = before[-1]
        when = f"{answer.ended_s - last.begun_s:.3f} s after the begin of {last.number}: {last.kind}: {last.detail}"
    seconds = answer.ended_s - answer.sent_s
    return (
        f"request {answer.number} to {answer.model}: {answer.status} after {seconds * 1e3:.0f} ms, {when}: "
        f"{answer.sentence.strip()}"
    )

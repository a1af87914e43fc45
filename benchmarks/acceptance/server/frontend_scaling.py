"""Requests a second of several front-end processes over those of one, each front-end on a core of its own.

One engine runs a network that costs next to nothing, so that the front-ends are the limit. Beside it, the yardstick of
`benchmarks/peers` serves the same network from as many processes on the same cores: its ratio shows how far the
machine itself scales.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np

from benchmarks.acceptance.figures import Repetitions
from benchmarks.acceptance.score.null_network import write_bundle
from benchmarks.peers.golden_requests import HOST, checked_target
from benchmarks.peers.servers import CACHE, ROOT, select_servers
from penstock.bench.compiled_program import checked_kind
from penstock.bench.core_load import CoreLoad
from penstock.bench.load.generator import CONNECT_S, START_AHEAD_S, Load, measure
from penstock.bench.load.golden_target import golden_target
from penstock.bench.load.sender import Target
from penstock.bench.process_usage import worker_pids
from penstock.bench.server_process import ServerProcess, running_server
from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import BenchError

FRONTENDS = 8
# For each front-end: enough for it to stay busy while its other requests are in a batch or in the generator.
CONNECTIONS = 128
# The sender takes a little more than half of a front-end's time for a request.
FRONTENDS_A_SENDER = 2
WARM_UP_S = 0.5
YARDSTICK = "yardstick"
YARDSTICK_BATCH = 128
# With less idle time on its cores, the generator may be the limit.
MIN_SENDER_IDLE = 0.1
# With more idle time on its core, one front-end is not the limit, and the ratio to its rate would be too high.
MAX_FRONTEND_IDLE = 0.1
TOPOLOGY = Path("/sys/devices/system/cpu")

Say = Callable[[str], None]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CoreSplit:
    """The cores of each part of the measurement.

    Args:
        frontends: The core of each front-end.
        engine: The core of the engine and of the supervisor.
        senders: The cores of the load generator, a process on each.
    """

    frontends: tuple[int, ...]
    engine: int
    senders: tuple[int, ...]

    def first(self, frontends: int) -> "CoreSplit":
        """Return the cores of the first front-ends, with senders in proportion."""
        senders = max(1, round(len(self.senders) * frontends / len(self.frontends)))
        return replace(self, frontends=self.frontends[:frontends], senders=self.senders[:senders])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One load on one server.

    Args:
        rate: Right answers a second.
        frontend_idle: Idle share of the cores of the front-ends.
        engine_idle: Idle share of the core of the engine.
        sender_idle: Idle share of the cores of the load generator.
    """

    rate: float
    frontend_idle: float
    engine_idle: float
    sender_idle: float

    @property
    def description(self) -> str:
        """The rate and the idle shares in words."""
        return (
            f"{self.rate:,.0f}/s, idle: front-ends {self.frontend_idle:.0%}, engine {self.engine_idle:.0%}, "
            f"senders {self.sender_idle:.0%}"
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingRuns:
    """The repetitions of one server.

    Args:
        one: Those with one front-end.
        all: Those with a front-end on each core.
    """

    one: list[Run]
    all: list[Run]

    @property
    def ratios(self) -> list[float]:
        """The rate on all cores over that on one, for each repetition."""
        return [every.rate / one.rate for one, every in zip(self.one, self.all, strict=True)]


def frontends_ratio(repeat: int, seconds: float, say: Say) -> Repetitions:
    """Return the requests a second of eight front-ends over those of one, for each repetition.

    Args:
        repeat: Repetitions.
        seconds: Duration of each of the four loads.
        say: Called with a sentence for each load.

    Raises:
        BenchError: There are too few cores or no C++ compiler, an answer was wrong, or the front-ends were not the
            limit.
    """
    cores = split_cores(one_thread_first(os.sched_getaffinity(0)), FRONTENDS)
    penstock, yardstick = compare(cores, repeat, seconds, say)
    check_limit(penstock)
    note = f"{described(penstock)}; the yardstick's processes on the same cores: {described(yardstick)}"
    return Repetitions(penstock.ratios, note)


def split_cores(cores: Sequence[int], frontends: int) -> CoreSplit:
    """Give each front-end a core, one core to the engine, and at most as many as the front-ends to the generator.

    Args:
        cores: The cores of this process, those for front-ends first.
        frontends: Number of front-ends.

    Raises:
        BenchError: There are too few cores.
    """
    senders = cores[frontends + 1 : 2 * frontends + 1]
    needed = -(-frontends // FRONTENDS_A_SENDER)
    if len(senders) < needed:
        raise BenchError(
            f"{frontends} front-ends are measured on {frontends + 1 + needed} cores or more: one for each, one for the "
            f"engine, {needed} for the load generator; this process may use {len(cores)}."
        )
    return CoreSplit(frontends=tuple(cores[:frontends]), engine=cores[frontends], senders=tuple(senders))


def one_thread_first(cores: set[int], topology: Path = TOPOLOGY) -> list[int]:
    """Sort cores so that one hardware thread of each physical core comes first.

    Args:
        cores: Numbers of cores.
        topology: Folder of the kernel's description of each.
    """

    def place(core: int) -> tuple[int, int]:
        file = topology / f"cpu{core}" / "topology" / "thread_siblings_list"
        siblings = _listed(file.read_text()) if file.is_file() else [core]
        return len([other for other in siblings if other < core and other in cores]), core

    return sorted(cores, key=place)


def _listed(text: str) -> list[int]:
    """Parse a list of the kernel, such as `0,8` or `0-3`."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def check_limit(runs: ScalingRuns) -> None:
    """Refuse a ratio that the front-ends did not limit.

    Raises:
        BenchError: The generator's cores were nearly busy, or that of the one front-end was idle.
    """
    sender_idle = _median([run.sender_idle for run in runs.all])
    if sender_idle < MIN_SENDER_IDLE:
        raise BenchError(
            f"the load generator's cores were idle for {sender_idle:.0%} of the time, so that it may be the limit; "
            "give it more cores."
        )
    frontend_idle = _median([run.frontend_idle for run in runs.one])
    if frontend_idle > MAX_FRONTEND_IDLE:
        raise BenchError(
            f"the core of the one front-end was idle for {frontend_idle:.0%} of the time, so that its rate is not its "
            "limit; open more connections."
        )


def described(runs: ScalingRuns) -> str:
    """Return the median rates, ratio and idle shares in words."""
    one, every = runs.one, runs.all
    idle = {
        "one front-end": [run.frontend_idle for run in one],
        "all front-ends": [run.frontend_idle for run in every],
        "engine": [run.engine_idle for run in every],
        "senders": [run.sender_idle for run in every],
    }
    limited = _median(idle["senders"]) < MIN_SENDER_IDLE
    return (
        f"{_median([run.rate for run in one]):,.0f} to {_median([run.rate for run in every]):,.0f} requests/s, "
        f"{_median(runs.ratios):.2f} times as many; idle: "
        + ", ".join(f"{name} {_median(shares):.0%}" for name, shares in idle.items())
        + ", so that the senders may be the limit" * limited
    )


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def compare(
    cores: CoreSplit, repeat: int, seconds: float, say: Say, connections: int = CONNECTIONS
) -> tuple[ScalingRuns, ScalingRuns]:
    """Measure Penstock and the yardstick, each on the first front-end's core and on those of all, in alternation.

    All four servers run all the time; those without a load are idle.

    Args:
        cores: The cores.
        repeat: Repetitions.
        seconds: Duration of each load.
        say: Called with a sentence for each load.
        connections: Connections for each front-end.

    Returns:
        The runs of Penstock and those of the yardstick.

    Raises:
        BenchError: There is no C++ compiler, a server did not start, or an answer was wrong.
    """
    checked_kind("compiled")
    found = {name: ScalingRuns(one=[], all=[]) for name in ("Penstock", YARDSTICK)}
    serves = {"Penstock": _penstock, YARDSTICK: _yardsticks}
    parts = [cores.first(1), cores]
    with tempfile.TemporaryDirectory(prefix="penstock-frontends-") as folder, ExitStack() as stack:
        bundle = write_bundle(Path(folder) / "null")
        targets = {
            (name, part): stack.enter_context(serve(bundle, parts[part]))
            for name, serve in serves.items()
            for part in range(len(parts))
        }
        for (_, part), target in targets.items():
            measure(target, _load(parts[part], WARM_UP_S, connections))
        for repetition in range(repeat):
            for (name, part), target in targets.items():
                run = _measured(target, _load(parts[part], seconds, connections), parts[part])
                (found[name].one, found[name].all)[part].append(run)
                processes = len(parts[part].frontends)
                say(f"{repetition + 1} of {repeat}: {name}, front-ends: {processes}: {run.description}")
    return found["Penstock"], found[YARDSTICK]


def _load(cores: CoreSplit, seconds: float, connections: int) -> Load:
    return Load(
        rate=None,
        connections=connections * len(cores.frontends),
        seconds=seconds,
        warm_up_s=WARM_UP_S,
        processes=len(cores.senders),
        cpus=frozenset(cores.senders),
        sender="compiled",
    )


def _measured(target: Target, load: Load, cores: CoreSplit) -> Run:
    groups = (cores.frontends, (cores.engine,), cores.senders)
    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(measure, target, load)
        time.sleep(START_AHEAD_S + CONNECT_S * load.connections + load.warm_up_s)
        loads = [CoreLoad(frozenset(group)) for group in groups]
        time.sleep(load.seconds)
        frontend_idle, engine_idle, sender_idle = (each.idle_share() for each in loads)
        rate = answered.result().answered_a_second
    return Run(rate=rate, frontend_idle=frontend_idle, engine_idle=engine_idle, sender_idle=sender_idle)


@contextmanager
def _penstock(bundle: Path, cores: CoreSplit) -> Generator[Target]:
    options = ("--device", "cpu", "--frontends", str(len(cores.frontends)), "--cache", str(CACHE))
    with running_server(bundle, options, cpus=frozenset({cores.engine})) as server:
        _pin(server, cores.frontends)
        yield golden_target(server.url, bundle)


def _pin(server: ServerProcess, cores: Sequence[int]) -> None:
    """Give each front-end a core of its own."""
    pids = worker_pids(server.process.pid)
    for number, core in enumerate(cores):
        for thread in Path(f"/proc/{pids[f'front-end {number}']}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def _yardsticks(bundle: Path, cores: CoreSplit) -> Generator[Target]:
    """Run a process of the yardstick on the core of each front-end, all on one port."""
    [server] = select_servers([YARDSTICK])
    with ExitStack() as stack:
        # Not listening, it only keeps the port.
        held = stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((HOST, 0))
        port = held.getsockname()[1]
        # With the socket that keeps it, more than one has the port.
        sharing = 1 + len(cores.frontends)
        arguments = [str(bundle.resolve()), f"--port={port}", f"--http={sharing}", f"--max-batch={YARDSTICK_BATCH}"]
        processes = [stack.enter_context(_pinned_yardstick(core, arguments)) for core in cores.frontends]
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise BenchError("the yardstick did not start; see its message above.")
        yield checked_target(server, read_bundle(bundle).manifest.name, bundle, port)


@contextmanager
def _pinned_yardstick(core: int, arguments: Sequence[str]) -> Generator[subprocess.Popen[bytes]]:
    # In this environment: uvloop and httptools are all that the yardstick needs.
    module = [sys.executable, "-m", "benchmarks.peers.yardstick.server"]
    with subprocess.Popen([*module, *arguments], stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            os.sched_setaffinity(process.pid, {core})
            yield process
        finally:
            process.kill()

"""Penstock beside Mosec, LitServe and Triton on one GPU: the same network, requests and search.

python -m benchmarks.peers.gpu [--only NAME ...] [--device cuda|cpu] [--model resnet50] [--limit-s 300]

Each peer serves `gpu_network.py`. Its first tuning is measured in full; each further one has to keep the budget at a
higher rate than the best before it, or is dropped after one trial. Every result is printed as it comes.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from benchmarks.acceptance.server import gpu_serving
from benchmarks.models.write import ONE_SHOT, write_bundle
from benchmarks.peers.golden_requests import checked_target
from benchmarks.peers.gpu_network import SIZES
from benchmarks.peers.peer_process import make_environment, running
from benchmarks.peers.servers import HOME, ROOT, select_servers
from penstock.bench.compiled_program import SenderKind
from penstock.bench.load.generator import Load, NoRateWithinBudget, find_goodput, measure
from penstock.bench.load.golden_target import golden_target
from penstock.bench.load.sender import Target
from penstock.bench.server_process import running_server
from penstock.core.errors import BenchError, PenstockError
from penstock.runtime.gpu.precision import TOLERANCES

BUDGET_MS = gpu_serving.BUDGET_MS
PRECISION = gpu_serving.PRECISION
SECONDS = 2.0
CLOSED_CONNECTIONS = 128
CONNECTIONS = 1024
# Above the rate of the closed loop, whose batches are smaller.
HIGHEST_OVER_CLOSED = 1.3
STEP = 1.04
# For Penstock and the peers alike: the cores are shared with the server.
SENDER: SenderKind = "auto"
LIMIT_S = 300.0
COMPILE_S = 200.0
# Of one more tuning of a server: its start, and one trial.
TUNING_S = 30.0

Say = Callable[[str], None]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTuning:
    """Settings of a peer.

    Args:
        max_batch: The largest batch.
        max_wait_ms: Wait for a batch to fill.
        workers: Processes that run the network.
        http: Processes or threads that read requests, where the server can be told.
        max_queue: Requests that wait before more are refused, where the server can be told.
        timeout_ms: A request that waited longer is refused, where the server can be told.
    """

    max_batch: int
    max_wait_ms: float = 0.0
    workers: int = 1
    http: int = 1
    max_queue: int = 1024
    timeout_ms: float = 2000.0

    def options(self) -> list[str]:
        """The options of server.py."""
        names = ("max_batch", "max_wait_ms", "workers", "http", "max_queue", "timeout_ms")
        return [f"--{name.replace('_', '-')}={getattr(self, name):g}" for name in names]


# The most promising first, because the others are left out where time is short.
TUNINGS = {
    "mosec": (
        GpuTuning(max_batch=128, max_wait_ms=1, workers=2),
        GpuTuning(max_batch=128, max_wait_ms=5),
        GpuTuning(max_batch=64, max_wait_ms=1, workers=3),
    ),
    "litserve": (
        GpuTuning(max_batch=64, max_wait_ms=2, workers=2, http=6),
        GpuTuning(max_batch=128, max_wait_ms=5, http=4),
        GpuTuning(max_batch=32, max_wait_ms=1, workers=3, http=8),
    ),
    "triton": (
        GpuTuning(max_batch=128, max_wait_ms=1, workers=2, http=8),
        GpuTuning(max_batch=128, max_wait_ms=2, http=8),
        GpuTuning(max_batch=64, max_wait_ms=1, workers=3, http=6),
    ),
}
PACKAGES = {"mosec": "mosec", "litserve": "litserve", "triton": "pytriton"}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPeer:
    """A peer with one tuning.

    Args:
        name: Its folder.
        device: `"cuda"` or `"cpu"`.
        tuning: Its settings.
    """

    name: str
    device: str
    tuning: GpuTuning

    @property
    def label(self) -> str:
        """Its name in tables."""
        return select_servers([self.name])[0].label

    @property
    def path(self) -> str:
        """URL path of a request."""
        return select_servers([self.name])[0].path

    @property
    def headers(self) -> str:
        """More lines of a request's head."""
        return select_servers([self.name])[0].headers

    @property
    def environment(self) -> Path:
        """The log is beside it."""
        return HOME / f"gpu-{self.name}"

    def command(self, model: str, bundle: Path, port: int) -> list[str]:
        """Return the command that serves a bundle."""
        server = select_servers([self.name])[0]
        here = importlib.util.find_spec(PACKAGES[self.name]) is not None
        python = sys.executable if here else str(server.environment / "bin/python")
        options = [f"--port={port}", f"--device={self.device}", *self.tuning.options()]
        return [python, str(server.folder / "server.py"), str(bundle), *options]


@final
@dataclass(slots=True)
class Best:
    """The best rate of a server so far.

    Args:
        rate: Requests a second; 0 for none.
        tuning: Settings that gave it.
    """

    rate: float = 0.0
    tuning: GpuTuning | None = None


def compare(model: str, device: str, names: Sequence[str], *, limit_s: float, say: Say) -> dict[str, Best]:
    """Measure Penstock and peers on one device; return the highest rate of each within the budget.

    Args:
        model: An application of `benchmarks/models/gpu_networks.py`, or `cnn` or `mlp` to try the way on a processor.
        device: `"cuda"` or `"cpu"`.
        names: Names of the peers; `"penstock"` for Penstock.
        limit_s: No further tuning is begun where it would end later.
        say: Called with a sentence for each result.

    Raises:
        BenchError: An answer of Penstock was wrong, or it keeps no rate.
    """
    # SIGTERM, as `timeout` sends it, ends the servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_s = time.monotonic() + limit_s
    best = {name: Best() for name in names}
    bundle = _bundle(model)
    peers = [name for name in names if name != "penstock"]
    if peers and device == "cuda":
        _compile_ahead(bundle, say)
    for turn in range(max(len(tunings) for tunings in TUNINGS.values())):
        for name in peers:
            if turn < len(TUNINGS[name]):
                peer = GpuPeer(name=name, device=device, tuning=TUNINGS[name][turn])
                if turn and time.monotonic() + TUNING_S > end_s:
                    say(f"{peer.label}, {peer.tuning}: not measured, because {limit_s:g} s are over")
                else:
                    _measure_peer(peer, model, bundle, best[name], say)
        if not turn and "penstock" in names:
            best["penstock"] = Best(_penstock(model, device, bundle, say))
            say(f"Penstock: {best['penstock'].rate:,.0f}/s")
    return best


def ratio_of(best: dict[str, Best], say: Say) -> float:
    """Return Penstock's rate over that of the best peer.

    Raises:
        BenchError: No peer gave a rate.
    """
    peers = {name: found for name, found in best.items() if name != "penstock" and found.rate > 0}
    if not peers or "penstock" not in best:
        raise BenchError("no peer kept the budget at any rate, or Penstock was left out; there is nothing to compare.")
    for name, found in peers.items():
        say(f"{name}: {found.rate:,.0f}/s with {found.tuning}")
    name = max(peers, key=lambda each: peers[each].rate)
    ratio = best["penstock"].rate / peers[name].rate
    say(f"Penstock {best['penstock'].rate:,.0f}/s, {ratio:.2f} times {name}")
    return ratio


def _bundle(model: str) -> Path:
    folder = HOME / "bundles" / model
    folder.parent.mkdir(parents=True, exist_ok=True)
    return write_bundle(model, folder).folder if model in ONE_SHOT else gpu_serving.write_bundle(model, folder)


def _compile_ahead(bundle: Path, say: Say) -> None:
    """Fill torch's cache on disk, every batch size in a process of its own, so that servers start in seconds."""
    start_s = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.peers.gpu_network", str(bundle)]
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "3"}

    def compile_size(size: int) -> None:
        done = subprocess.run(
            [*command, str(size)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMPILE_S,
        )
        if done.returncode != 0:
            raise BenchError(f"the peers' network of {size} rows cannot be compiled: {done.stderr[-1000:]}")

    with ThreadPoolExecutor(len(SIZES)) as pool:
        list(pool.map(compile_size, SIZES))
    say(f"compiled for the peers, {len(SIZES)} batch sizes: {time.monotonic() - start_s:.0f} s")


def _measure_peer(peer: GpuPeer, model: str, bundle: Path, best: Best, say: Say) -> None:
    """Raise a peer's best rate if this tuning can; a server that fails says why, and the others go on."""
    start_s = time.monotonic()
    say(f"{peer.label}, {peer.tuning}")
    try:
        with running(peer, model, bundle, None) as port:
            relative = TOLERANCES[PRECISION] if peer.device == "cuda" else 0.0
            target = checked_target(peer, model, bundle, port, relative)
            say(f"  answers are the golden ones after {time.monotonic() - start_s:.0f} s")
            rate = search(target, best.rate, lambda text: say(f"  {text}"))
    except BenchError as error:
        say(f"  {peer.label} gave no rate: {error}")
        return
    if rate > best.rate:
        best.rate, best.tuning = rate, peer.tuning
    say(f"  {peer.label}: {rate:,.0f}/s within {BUDGET_MS} ms, {time.monotonic() - start_s:.0f} s in all")


def search(target: Target, known: float, say: Say) -> float:
    """Search the highest Poisson rate within the budget, above a known one; return 0 if there is none.

    Raises:
        BenchError: An answer was wrong, or none came.
    """
    processes = max(1, (os.cpu_count() or 1) * 3 // 8)
    load = Load(
        rate=None,
        connections=CLOSED_CONNECTIONS,
        seconds=SECONDS,
        processes=processes,
        warm_up_s=0.5,
        sender=SENDER,
    )
    open_load = replace(load, connections=CONNECTIONS)
    if known:
        trial = measure(target, replace(open_load, rate=STEP * known), none_answered=True)
        say(f"{STEP * known:,.0f}/s: {trial.share_within(BUDGET_MS):.2%} within {BUDGET_MS} ms")
        if trial.share_within(BUDGET_MS) < 0.99:
            return 0.0
    closed = measure(target, load).answered_a_second
    say(f"closed loop of {CLOSED_CONNECTIONS}: {closed:,.0f}/s")
    best, highest = STEP * known, max(HIGHEST_OVER_CLOSED * closed, 1.3 * known)
    try:
        # Again, where the closed loop did not show what the server can do.
        while best < highest:
            found, _ = find_goodput(
                target,
                open_load,
                budget_ms=BUDGET_MS,
                lowest=best,
                highest=highest,
                say=say,
                attempts=gpu_serving.ATTEMPTS,
            )
            best, highest = found, 2 * found if found > 0.9 * highest else 0.0
    except NoRateWithinBudget as error:
        say(str(error))
    return best


def _penstock(model: str, device: str, bundle: Path, say: Say) -> float:
    if device == "cuda":
        with gpu_serving.served(model) as (server, target, load):
            return gpu_serving.goodput(server, target, load)
    with running_server(bundle, ("--device", "cpu", "--latency-ms", str(BUDGET_MS))) as server:
        return search(golden_target(server.url, bundle), 0.0, say)


def main() -> None:
    """Read the command line, compare and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.gpu", description=__doc__)
    parser.add_argument("--only", action="append", choices=("penstock", *TUNINGS), help="may be given several times")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="no further tuning is begun after it")
    given = parser.parse_args()
    names = given.only or ["penstock", *TUNINGS]

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        names = installed(names, say)
        best = compare(given.model, given.device, names, limit_s=given.limit_s, say=say)
        if "penstock" in best and len(best) > 1:
            ratio_of(best, say)
    except PenstockError as error:
        sys.exit(str(error))


def installed(names: Sequence[str], say: Say) -> list[str]:
    """Return the names whose packages are there, after installing what an index has; say what is left out."""
    there: list[str] = []
    for name in names:
        if name != "penstock" and importlib.util.find_spec(PACKAGES[name]) is None:
            try:
                make_environment(select_servers([name])[0], say)
            except BenchError as error:
                say(f"{name} is left out: {error}")
                continue
        there.append(name)
    return there


if __name__ == "__main__":
    main()

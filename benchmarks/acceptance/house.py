"""Figures of the refactoring: time of the tests, abolished words, and CPU of a request beside an older commit."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.acceptance.report.results import ROOT
from benchmarks.peers.golden_requests import checked_target
from benchmarks.peers.servers import PENSTOCK
from penstock.bench.load.generator import Load, find_goodput, measure
from penstock.bench.server_process import cpu_seconds, model_stats, running_server
from penstock.core.errors import BenchError

BASELINE = "d910c77"
MODEL = "cnn"
SERVER_CORE, LOAD_CORE = 0, 1
CLOSED_CONNECTIONS, OPEN_CONNECTIONS = 64, 2048
BUDGET_MS = 50.0
# Above the closed loop's rate, where larger batches form.
HIGHEST_OVER_CLOSED = 1.3
# A pause of the virtual machine fails any server's trial: a rate is too high once it failed twice.
ATTEMPTS = 2

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerCost:
    """One repetition with the server of one source tree.

    Args:
        cpu_us: User and system time a request, in microseconds, in the closed loop.
        p99_ms: p99 of the latency in the closed loop.
        goodput: Highest Poisson rate with 99% of all requests answered within 50 ms; NaN if it was not measured.
    """

    cpu_us: float
    p99_ms: float
    goodput: float


def ratio_to_baseline(name: str, repeat: int, seconds: float, say: Say) -> list[float]:
    """Return a field of `ServerCost` over that of the baseline, for each repetition; all fields share one run.

    Args:
        name: The field.
        repeat: Repetitions of the comparison, the two trees in alternation.
        seconds: Duration of each load.
        say: Called with a sentence for each repetition.
    """
    pairs = compare_with_baseline(repeat, seconds, say, goodput=name == "goodput")
    return [getattr(new, name) / getattr(old, name) for new, old in pairs]


def old_words() -> list[float]:
    """Return the number of findings of the lint of abolished words.

    Raises:
        BenchError: The lint failed.
    """
    command = [sys.executable, ".ci/lint_words.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.splitlines() or [""])[-1]
    count, _, unit = last.partition(" ")
    if unit != "findings" or not count.isdecimal():
        raise BenchError(f".ci/lint_words.py ended with {last!r} and not with a count: {done.stderr[-300:]}")
    return [float(count)]


@cache
def compare_with_baseline(
    repeat: int, seconds: float, say: Say, *, goodput: bool
) -> list[tuple[ServerCost, ServerCost]]:
    """Measure the server of this tree and that of the baseline commit in alternation.

    Args:
        repeat: Repetitions.
        seconds: Duration of each load.
        say: Called with a sentence for each repetition.
        goodput: Measure the goodput too, which takes a minute for each server.

    Returns:
        This tree's and the baseline's figures of each repetition.

    Raises:
        BenchError: There are fewer than two cores, the baseline cannot be checked out, or an answer was wrong.
    """
    if not {SERVER_CORE, LOAD_CORE} <= os.sched_getaffinity(0):
        raise BenchError("the comparison needs cores 0 and 1, one for the server and one for the load.")
    with tempfile.TemporaryDirectory(prefix="penstock-house-") as name, _worktree(Path(name)) as old_tree:
        folders = {ROOT: Path(name) / "new", old_tree: Path(name) / "old"}
        for tree, folder in folders.items():
            _write_bundle(tree, folder)
        pairs: list[tuple[ServerCost, ServerCost]] = []
        for repetition in range(repeat):
            # The order alternates too, so that a drift of the machine's speed meets both.
            trees = list(folders) if repetition % 2 == 0 else list(reversed(folders))
            costs = {tree: _server_cost(tree, folders, seconds, repetition, goodput=goodput) for tree in trees}
            pairs.append((costs[ROOT], costs[old_tree]))
            say(f"{repetition + 1} of {repeat}: {_describe(*pairs[-1])}")
    return pairs


def _server_cost(tree: Path, folders: dict[Path, Path], seconds: float, seed: int, *, goodput: bool) -> ServerCost:
    folder = folders[tree]
    options = ["--frontends", "0", "--latency-ms", f"{BUDGET_MS:g}", "--cache", str(folder / "cache")]
    bundle = folder / MODEL
    with running_server(bundle, options, cpus=frozenset({SERVER_CORE}), environment=_environment(tree)) as server:
        # Both trees write the same network from the same seed, but only bundles of this tree can be read here.
        target = checked_target(PENSTOCK, MODEL, folders[ROOT] / MODEL, urlsplit(server.url).port or 80)
        load = Load(
            rate=None, connections=CLOSED_CONNECTIONS, seconds=seconds, cpus=frozenset({LOAD_CORE}), seed=1000 * seed
        )
        count, cpu_s = _requests(server.url), cpu_seconds(server.process.pid)
        closed = measure(target, load)
        # Over the whole load, warm-up included: the server counts its own requests.
        cpu_us = (cpu_seconds(server.process.pid) - cpu_s) / (_requests(server.url) - count) * 1e6
        rate = math.nan
        if goodput:
            rate, _ = find_goodput(
                target,
                replace(load, connections=OPEN_CONNECTIONS),
                budget_ms=BUDGET_MS,
                highest=closed.answered_a_second * HIGHEST_OVER_CLOSED,
                attempts=ATTEMPTS,
            )
    return ServerCost(cpu_us=cpu_us, p99_ms=closed.percentile_ms(99), goodput=rate)


def _requests(url: str) -> int:
    return model_stats(url, MODEL)["inference_count"]


def _describe(new: ServerCost, old: ServerCost) -> str:
    return (
        f"CPU {new.cpu_us:.1f} us a request (before {old.cpu_us:.1f}), p99 {new.p99_ms:.2f} ms "
        f"(before {old.p99_ms:.2f})"
        + ("" if math.isnan(new.goodput) else f", goodput {new.goodput:,.0f}/s (before {old.goodput:,.0f})")
    )


@contextmanager
def _worktree(folder: Path) -> Generator[Path]:
    tree = folder / "tree"
    added = subprocess.run(
        ["git", "worktree", "add", "--detach", "--quiet", str(tree), BASELINE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if added.returncode:
        raise BenchError(f"commit {BASELINE} cannot be checked out ({added.stderr.strip()}); fetch the whole history.")
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=False)


def _write_bundle(tree: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.models.write", "--to", str(folder), "--only", MODEL]
    environment = os.environ | _environment(tree)
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"{tree} does not write the {MODEL} bundle: {done.stderr.strip()[-300:]}")


def _environment(tree: Path) -> dict[str, str]:
    # Without the safe path, the current folder would come before the tree.
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}

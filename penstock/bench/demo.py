"""`penstock bench demo`: train the digits, bundle them, serve them, and measure the server.

The same server with batches of one is measured under the same load. The load is an open loop at a rate found by trials,
and each latency counts from when its request was due.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.bench.load.generator import Load, LoadResult, measure
from penstock.bench.load.golden_target import golden_target
from penstock.bench.server_process import ServerProcess, running_server
from penstock.core.errors import BenchError

PORT = 8000
CLOSED_CONNECTIONS = 64
OPEN_CONNECTIONS = 256
WARM_UP_S = 0.5
TRIAL_S = 2.0
PERCENTILES = (50, 98, 99)
# The first rate to try as a share of the closed loop's rate, the factor of the next trial, and the number of trials.
FIRST_SHARE, STEP_DOWN, TRIALS = 0.75, 0.8, 10
CARRIED = 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOutcome:
    """Result of one load on one server.

    Args:
        figures: The clients' figures.
        mean_batch: Mean rows a batch.
    """

    figures: dict[str, float]
    mean_batch: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """Results of the demo.

    Args:
        accuracy: Accuracy on the held-out digits, a fraction.
        training_s: Seconds of training.
        rate: Requests a second that were offered.
        budget_ms: The latency budget of both servers.
        batching: Result of the server with its default batches.
        single: Result of the server with batches of one.
        seconds: Duration of the whole demo.
    """

    accuracy: float
    training_s: float
    rate: float
    budget_ms: float
    batching: LoadOutcome
    single: LoadOutcome
    seconds: float


def split_cores() -> tuple[frozenset[int], frozenset[int]]:
    """Give the first core to the server and the others to the load, disjoint where there are two."""
    first, *others = sorted(os.sched_getaffinity(0))
    return frozenset({first}), frozenset(others or {first})


def train(run: Path, epochs: float | None) -> dict[str, Any]:
    """Train the digits into `run` as a user does, and return its run.json."""
    command = [sys.executable, "-m", "penstock", "train", "digits", "--out", str(run)]
    command += [] if epochs is None else ["--epochs", str(epochs)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        status = process.wait()
    finally:
        # The training ends with the demo, and all that it started with it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if status:
        raise BenchError(f"the training ended with status {status}; see its message above.")
    return json.loads((run / "run.json").read_bytes())


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadDriver:
    """Puts loads on servers of one bundle and shows the progress.

    Args:
        bundle: The bundle whose golden examples are sent and compared.
        cpus: Cores of the load.
        budget_ms: The latency budget.
        console: Console of the progress bar.
    """

    bundle: Path
    cpus: frozenset[int]
    budget_ms: float
    console: Console

    def drive(self, server: ServerProcess, label: str, seconds: float, *, rate: float | None) -> LoadOutcome:
        """Put one load on a server, open loop at a rate or closed loop without."""
        load = Load(
            rate=rate,
            connections=OPEN_CONNECTIONS if rate else CLOSED_CONNECTIONS,
            seconds=seconds,
            warm_up_s=WARM_UP_S,
            cpus=self.cpus,
        )
        text = f"{label}, {seconds:g} s"
        if not self.console.is_terminal:
            self.console.print(text)
        # The load comes from processes of its own, so that the spinner does not disturb it.
        with self.console.status(text):
            server.start_sampling()
            result = measure(golden_target(server.url, self.bundle), load)
        return LoadOutcome(figures=_figures(result, self.budget_ms), mean_batch=server.usage().batch_rows)

    def carried_rate(self, server: ServerProcess) -> float:
        """Lower the rate from the closed loop's until the server answers nearly all requests within the budget.

        Raises:
            BenchError: None of the rates keeps the budget.
        """
        closed = self.drive(server, "As fast as 64 connections go", TRIAL_S, rate=None)
        rate = FIRST_SHARE * closed.figures["answered_a_second"]
        for _ in range(TRIALS):
            trial = self.drive(server, f"Trying {rate:,.0f} requests/s", TRIAL_S, rate=rate)
            if trial.figures["share_within"] >= CARRIED:
                return rate
            rate *= STEP_DOWN
        raise BenchError(
            f"the server does not carry even {rate:,.0f} requests/s within {self.budget_ms:g} ms on this machine."
        )


def _figures(result: LoadResult, budget_ms: float) -> dict[str, float]:
    """Figures of a load; latencies in milliseconds, infinity as the largest float, which JSON can hold."""
    percentiles = {f"p{percent}_ms": result.percentile_ms(percent) for percent in PERCENTILES}
    return {
        "offered": result.offered,
        "answered_a_second": result.answered_a_second,
        "share_within": result.share_within(budget_ms),
        "refused": result.refused,
        "failed": result.failed + result.lost,
        "checked": result.checked,
        **{name: min(value, sys.float_info.max) for name, value in percentiles.items()},
    }


def show(report: DemoReport, run: Path, console: Console, *, shares_core: bool) -> None:
    """Print the report."""
    batching, single = report.batching, report.single
    table = Table(title=f"{report.rate:,.0f} requests/s offered at random moments, budget {report.budget_ms:g} ms")
    for column in ("", "batches by the budget", "batches of one"):
        table.add_column(column, justify="right" if column else "left")
    formats = {
        "answered_a_second": ("requests/s answered", "{:,.0f}"),
        "share_within": (f"within {report.budget_ms:g} ms, of all offered", "{:.2%}"),
        "p50_ms": ("latency p50, ms", "{:.2f}"),
        "p98_ms": ("latency p98, ms", "{:.2f}"),
        "p99_ms": ("latency p99, ms", "{:.2f}"),
        "refused": ("refused at once", "{:,.0f}"),
        "failed": ("failed", "{:,.0f}"),
    }
    table.add_row("mean batch", f"{batching.mean_batch:.1f}", f"{single.mean_batch:.1f}")
    for name, (title, form) in formats.items():
        table.add_row(title, form.format(batching.figures[name]), form.format(single.figures[name]))
    console.print()
    console.print(f"Held-out accuracy {report.accuracy:.2%}, trained in {report.training_s:.1f} s", highlight=False)
    console.print(table)
    shared = "; it shared it with the load" if shares_core else ""
    console.print(f"One server process on one core{shared}.", highlight=False)
    console.print("Latencies are of right answers, counted from when each request was due.", highlight=False)
    console.print(f"{batching.figures['checked']:,.0f} answers were compared with the golden ones.", highlight=False)
    for name, place in {"Bundle": "bundle", "Plot": "curves.png", "Figures": "demo.json"}.items():
        console.print(f"{name + ':':9}{run / place}", highlight=False, soft_wrap=True)
    console.print(f"All of it took {report.seconds:.0f} s.", highlight=False)


def run_demo(run: Path, *, epochs: float | None, seconds: float, budget_ms: float) -> None:
    """Train, serve, measure, report; in a terminal, serve on until Ctrl-C. A signal ends every child first.

    Args:
        run: The run's folder; a run that exists is replaced.
        epochs: A shorter training, for tests.
        seconds: Duration of each server's measurement.
        budget_ms: The latency budget of both servers.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    console = Console()
    try:
        _run_demo(run, epochs, seconds, budget_ms, console)
    except KeyboardInterrupt:
        console.print("\nStopped.")


def _run_demo(run: Path, epochs: float | None, seconds: float, budget_ms: float, console: Console) -> None:
    start_s = time.monotonic()
    server_cpus, load_cpus = split_cores()
    _clear(run)
    console.print("[bold]1. Training a convolutional network on handwritten digits")
    trained = train(run, epochs)
    bundle = run / "bundle"
    options = ["--latency-ms", f"{budget_ms:g}"]
    console.print(f"[bold]2. Serving the bundle on core {min(server_cpus)}, measured from core {min(load_cpus)}")
    with running_server(bundle, [*options, "--port", str(_free_port(PORT))], cpus=server_cpus) as server:
        driver = LoadDriver(bundle=bundle, cpus=load_cpus, budget_ms=budget_ms, console=console)
        rate = driver.carried_rate(server)
        batching = driver.drive(server, f"Batches by the budget: {rate:,.0f} requests/s", seconds, rate=rate)
        console.print("[bold]3. The same server with batches of one")
        with running_server(bundle, [*options, "--max-batch", "1"], cpus=server_cpus) as single_server:
            single = driver.drive(single_server, f"Batches of one: {rate:,.0f} requests/s", seconds, rate=rate)
        report = DemoReport(
            accuracy=trained["metrics"]["test_accuracy"],
            training_s=trained["seconds"],
            rate=rate,
            budget_ms=budget_ms,
            batching=batching,
            single=single,
            seconds=time.monotonic() - start_s,
        )
        (run / "demo.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
        show(report, run, console, shares_core=server_cpus == load_cpus)
        if console.is_terminal:
            console.print(f"Page:    [bold]{server.url}/[/]  Draw a digit. Ctrl-C ends the server.")
            signal.pause()
        console.print(f"Page:    run 'penstock serve {bundle}' and open the address that it prints", soft_wrap=True)


def _clear(run: Path) -> None:
    if run.exists() and any(run.iterdir()):
        if not (run / "run.json").is_file():
            raise BenchError(f"{run} is not a run; move it away or name another folder with --out.")
        shutil.rmtree(run)


def _free_port(wanted: int) -> int:
    """The wanted port if it is free, else 0 for any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return 0
    return wanted

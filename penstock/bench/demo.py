"""The main job in one command, `make demo`: train the digits, bundle them, serve them, and measure the server.

The same server held to batches of one is measured beside it, under the same load. The load is open: requests come at
random moments at a rate that was found by trying, and each latency counts from the moment at which its request was due.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.core.errors import BenchError, PenstockError

BUDGET_MS = 50
PORT = 8000
CLOSED_CONNECTIONS = 64
OPEN_CONNECTIONS = 256
WARM_UP_S = 0.5
TRIAL_S = 2.0
# The first rate that is tried, as a share of what the closed loop reached, and how far down the next trial goes.
FIRST_SHARE, STEP_DOWN, TRIALS = 0.75, 0.8, 10
CARRIED = 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class Cores:
    """Which cores work on what: never the same ones where there are two.

    Args:
        server: Of the server.
        load: Of the load generator.
    """

    server: tuple[int, ...]
    load: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one server made of the load.

    Args:
        figures: Of its clients, see `penstock.bench.drive.figures`.
        mean_batch: Rows of a batch, on average.
    """

    figures: dict[str, float]
    mean_batch: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that the demo found.

    Args:
        accuracy: On the digits that were held out from everything, a fraction.
        training_s: Seconds of training.
        rate: Requests a second that were offered.
        budget_ms: The latency budget of both servers.
        batching: Of the server as it is.
        single: Of the server held to batches of one.
        seconds: Of the whole demo.
    """

    accuracy: float
    training_s: float
    rate: float
    budget_ms: float
    batching: Outcome
    single: Outcome
    seconds: float


def split_cores() -> Cores:
    """The first core for the server and the others for the load."""
    first, *others = sorted(os.sched_getaffinity(0))
    return Cores(server=(first,), load=tuple(others) or (first,))


@contextmanager
def child(command: Sequence[str], cores: Sequence[int] = (), **streams: Any) -> Generator[subprocess.Popen[str]]:
    """A process in a group of its own, which is ended, with all that it started, at the end.

    Args:
        command: What `python -m` runs.
        cores: Where it runs; empty for anywhere.
        streams: Where its output goes, as for `subprocess.Popen`.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, text=True, start_new_session=True, **streams
        )
    finally:
        os.sched_setaffinity(0, before)
    try:
        yield process
    finally:
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            # The group outlives its leader where a worker does.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def train(run: Path, epochs: float | None) -> dict[str, Any]:
    """Train the digits into `run` as a user would, and give what its run.json says."""
    command = ["penstock", "train", "digits", "--out", str(run)]
    with child(command + ([] if epochs is None else ["--epochs", str(epochs)])) as process:
        if process.wait():
            raise BenchError(f"the training ended with status {process.returncode}; what it said stands above.")
    return json.loads((run / "run.json").read_bytes())


@contextmanager
def served(bundle: Path, cores: Cores, *, port: int, budget_ms: float, max_batch: int | None = None) -> Generator[str]:
    """A `penstock serve` on the server's core; gives its URL.

    Raises:
        BenchError: It did not start; its own sentence stands above.
    """
    command = ["penstock", "serve", str(bundle), "--port", str(port), "--latency-ms", str(budget_ms)]
    command += [] if max_batch is None else ["--max-batch", str(max_batch)]
    with child(command, cores.server, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        announcement = process.stdout.readline()
        if "http://" not in announcement:
            raise BenchError("the server did not start; what it said stands above.")
        yield announcement.split()[-1].rstrip("/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """Puts loads on servers of one bundle and shows how far it is.

    Args:
        bundle: Whose golden examples are asked, and whose answers are checked.
        cores: Where the load comes from.
        budget_ms: Within which an answer counts.
        console: Where the progress is shown.
    """

    bundle: Path
    cores: Cores
    budget_ms: float
    console: Console

    def drive(self, url: str, what: str, seconds: float, *, rate: float | None) -> Outcome:
        """One load, open at a rate or closed without; `what` says which, for the progress bar."""
        command = ["penstock.bench.drive", url, str(self.bundle), "--cpus", ",".join(map(str, self.cores.load))]
        command += ["--connections", str(OPEN_CONNECTIONS if rate else CLOSED_CONNECTIONS)]
        command += ["--seconds", str(seconds), "--warm-up-s", str(WARM_UP_S), "--budget-ms", str(self.budget_ms)]
        command += ["--rate", str(rate)] if rate else []
        before = _batches(url)
        with child(command, stdout=subprocess.PIPE) as process:
            self._show(process, what, seconds)
            assert process.stdout is not None
            printed = process.stdout.read()
            if process.wait():
                raise BenchError("the load generator gave no figures; what it said stands above.")
        rows, batches = (after - earlier for after, earlier in zip(_batches(url), before, strict=True))
        return Outcome(figures=json.loads(printed), mean_batch=rows / max(batches, 1))

    def carried_rate(self, url: str) -> float:
        """A rate of which the server answers nearly all within the budget: down from what the closed loop reaches.

        Raises:
            BenchError: Not one of the rates tried is carried.
        """
        closed = self.drive(url, "As fast as 64 connections go", TRIAL_S, rate=None)
        rate = FIRST_SHARE * closed.figures["answered_a_second"]
        for _ in range(TRIALS):
            trial = self.drive(url, f"Trying {rate:,.0f} requests/s", TRIAL_S, rate=rate)
            if trial.figures["share_within"] >= CARRIED:
                return rate
            rate *= STEP_DOWN
        raise BenchError(
            f"the server carries not even {rate:,.0f} requests/s within {self.budget_ms:g} ms on this machine."
        )

    def _show(self, process: subprocess.Popen[str], what: str, seconds: float) -> None:
        if not self.console.is_terminal:
            self.console.print(f"{what}, {seconds:g} s")
            process.wait()
            return
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        with Progress(*columns, console=self.console) as progress:
            # The generator starts its processes, waits until they are ready, and warms up.
            task = progress.add_task(what, total=seconds + WARM_UP_S + 2.0)
            while process.poll() is None:
                time.sleep(0.1)
                progress.advance(task, 0.1)
            progress.update(task, completed=seconds + WARM_UP_S + 2.0)


def _batches(url: str) -> tuple[int, int]:
    """Rows and batches that a server has run since its start."""
    with urlopen(f"{url}/v2/models/digits/stats", timeout=10) as answer:
        stats = json.loads(answer.read())["model_stats"][0]
    return stats["inference_count"], stats["execution_count"]


def show(report: Report, run: Path, cores: Cores, console: Console) -> None:
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
    shared = "; it shared it with the load" if cores.server == cores.load else ""
    console.print(f"One server process on one core{shared}.", highlight=False)
    console.print("Latencies are of right answers, counted from when each request was due.", highlight=False)
    console.print(f"{batching.figures['checked']:,.0f} answers were compared with the golden ones.", highlight=False)
    for name, place in {"Bundle": "bundle", "Plot": "curves.png", "Figures": "demo.json"}.items():
        console.print(f"{name + ':':9}{run / place}", highlight=False, soft_wrap=True)
    console.print(f"All of it took {report.seconds:.0f} s.", highlight=False)


def demonstrate(run: Path, *, epochs: float | None, seconds: float, budget_ms: float, console: Console) -> None:
    """Train, serve, measure, report; in a terminal, serve on until Ctrl-C.

    Args:
        run: The run's folder; a run that is there is replaced.
        epochs: A shorter training, for tests.
        seconds: How long each of the two servers is measured.
        budget_ms: The latency budget of both.
        console: Where all this is shown.
    """
    began = time.monotonic()
    cores = split_cores()
    _clear(run)
    console.print("[bold]1. Training a convolutional network on handwritten digits")
    trained = train(run, epochs)
    bundle = run / "bundle"
    with ExitStack() as stack:
        console.print(f"[bold]2. Serving the bundle on core {cores.server[0]}, measured from core {cores.load[0]}")
        url = stack.enter_context(served(bundle, cores, port=_free_port(PORT), budget_ms=budget_ms))
        driver = Driver(bundle=bundle, cores=cores, budget_ms=budget_ms, console=console)
        rate = driver.carried_rate(url)
        batching = driver.drive(url, f"Batches by the budget: {rate:,.0f} requests/s", seconds, rate=rate)
        console.print("[bold]3. The same server held to batches of one")
        with served(bundle, cores, port=0, budget_ms=budget_ms, max_batch=1) as single_url:
            single = driver.drive(single_url, f"Batches of one: {rate:,.0f} requests/s", seconds, rate=rate)
        report = Report(
            accuracy=trained["metrics"]["test_accuracy"],
            training_s=trained["seconds"],
            rate=rate,
            budget_ms=budget_ms,
            batching=batching,
            single=single,
            seconds=time.monotonic() - began,
        )
        (run / "demo.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
        show(report, run, cores, console)
        if console.is_terminal:
            console.print(f"Page:    [bold]{url}/[/]  Draw a digit. Ctrl-C ends the server.")
            signal.pause()
        console.print(f"Page:    run 'penstock serve {bundle}' and open the address that it prints", soft_wrap=True)


def _clear(run: Path) -> None:
    if run.exists() and any(run.iterdir()):
        if not (run / "run.json").is_file():
            raise BenchError(f"{run} holds something that is not a run; move it away or name another with --out.")
        shutil.rmtree(run)


def _free_port(wanted: int) -> int:
    """The wanted port if nobody listens on it, else 0 for any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return 0
    return wanted


def main() -> None:
    """Run the demo. A mistake is one sentence and status 2; a signal ends every child first."""
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.demo", description="The main job in one command.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the run's folder, replaced if it is there")
    parser.add_argument("--epochs", type=float, help="a shorter training")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each server is measured")
    parser.add_argument("--budget-ms", type=float, default=BUDGET_MS, help="the latency budget of the servers")
    given = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    console = Console()
    try:
        demonstrate(given.out, epochs=given.epochs, seconds=given.seconds, budget_ms=given.budget_ms, console=console)
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        console.print("\nStopped.")


if __name__ == "__main__":
    main()

"""Training throughput of several GPUs over one: strong scaling at one global batch, weak scaling at one batch a GPU.

Every speed-up is over the fastest method on one GPU in the same run, ours or a peer's.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.acceptance.train.train_case import METHODS, MODELS, TrainingCase
from penstock.bench.measurement import Comparison, Measurement, make_measurement
from penstock.core.errors import BenchError
from penstock.train.parallel.launch import free_port

# The target of the worst ratio to captured DDP covers these.
WORST_MODELS, WORST_BATCHES = ("alexnet", "vgg16", "resnet50", "vit_b16"), (256, 1024)
# Limit for one case; compiling a large network takes a minute or more.
LIMIT_S = 240.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """Result of one case on some number of processes.

    Args:
        case: The case.
        processes: GPUs, or processes on the CPU.
        rates: Examples a second over all processes, one for each repetition.
        losses: Loss of the first and of the last step, over the global batch.
        memory_gb: Peak memory of the first GPU.
        ready_s: Time until the measured steps.
        error: The reason for a missing result, or None.
    """

    case: TrainingCase
    processes: int
    rates: list[float]
    losses: list[float]
    memory_gb: float | None = None
    ready_s: float = 0.0
    error: str | None = None

    @property
    def rate(self) -> float:
        """The median of the repetitions."""
        return float(np.median(self.rates)) if self.rates else 0.0


def run_cases(
    cases: Sequence[TrainingCase],
    processes: int,
    *,
    device: str,
    seconds: float,
    repeat: int,
    say: Say,
    limit_s: float = LIMIT_S,
) -> Iterator[CaseResult]:
    """Measure cases one after the other, in one process group as long as none fails.

    Args:
        cases: The cases.
        processes: Ranks of the group.
        device: `"cuda"` or `"cpu"`.
        seconds: Approximate duration of each repetition.
        repeat: Number of repetitions.
        say: Called with a sentence for each case.
        limit_s: A case that takes longer is ended, and the next one tried.
    """
    left = list(cases)
    while left:
        group = _WorkerGroup(left, processes, device, seconds, repeat)
        try:
            for fields in group.lines(limit_s):
                case = left.pop(0)
                fields.pop("case")
                fields.pop("steps")
                found = CaseResult(case=case, **fields)
                say(_sentence(found))
                yield found
        finally:
            group.end()
        if left:
            case = left.pop(0)
            say(f"  {case.model}, {case.batch:,}, {processes} x {device}, {case.label}: {group.error()}")
            yield CaseResult(case=case, processes=processes, rates=[], losses=[], error=group.error())


def _sentence(found: CaseResult) -> str:
    case, unit = found.case, MODELS[found.case.model].unit
    low, high = (float(np.percentile(found.rates, share)) for share in (10, 90))
    memory = "" if found.memory_gb is None else f", {found.memory_gb:.1f} GB"
    return (
        f"  {case.model}, {case.batch:,}, {found.processes}, {case.label}: {found.rate:,.0f} {unit}/s "
        f"({low:,.0f} to {high:,.0f}){memory}, loss {found.losses[0]:.3f} to {found.losses[1]:.3f}, "
        f"ready in {found.ready_s:.0f} s"
    )


class _WorkerGroup:
    """The worker processes of one group of cases."""

    def __init__(self, cases: Sequence[TrainingCase], processes: int, device: str, seconds: float, repeat: int) -> None:
        port, cases_json = free_port(), json.dumps([asdict(case) for case in cases])
        # Required by torch's notes on capturing DistributedDataParallel.
        environment = os.environ | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        if any(case.changes.get("deterministic") for case in cases):
            # cuBLAS is deterministic only with its own workspace, which it reads before its first product.
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        words = [sys.executable, "-m", "benchmarks.acceptance.train.train_worker"]
        self._errors = [open(os.memfd_create("errors"), "w+") for _ in range(processes)]  # noqa: SIM115
        self._processes = [
            subprocess.Popen(
                [*words, str(rank), str(processes), str(port), device, cases_json, str(seconds), str(repeat)],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=self._errors[rank],
                env=environment,
            )
            for rank in range(processes)
        ]
        self._messages: list[list[str]] = []
        self._late = False

    def lines(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """Yield the lines of rank 0 until it ends, another rank fails, or no line comes within the limit."""
        first = self._processes[0].stdout
        assert first is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(first, selectors.EVENT_READ)
            line_s = time.monotonic()
            while True:
                if waiting.select(timeout=0.5):
                    line = first.readline()
                    if not line:
                        return
                    line_s = time.monotonic()
                    if line.startswith(b"{"):
                        yield json.loads(line)
                elif time.monotonic() - line_s > limit_s:
                    self._late = True
                    return
                elif any(process.poll() not in (0, None) for process in self._processes):
                    return

    def end(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for errors in self._errors:
            errors.seek(0)
            # NCCL's warnings at its end are not the reason of a failure.
            self._messages.append(
                [line for line in errors.read().splitlines() if line.strip() and "Warning: " not in line]
            )
            errors.close()

    def error(self) -> str:
        """Return the reason why the next case has no result, after `end`."""
        if self._late:
            return "no result within the time limit"
        for process, messages in zip(self._processes, self._messages, strict=True):
            if process.returncode not in (0, -9) and messages:
                return messages[-1][:300]
        return "its processes ended without a message"


def best(
    found: Iterable[CaseResult], *, processes: int, model: str, batch: int, method: str | None = None
) -> CaseResult:
    """Return the fastest result of a network at a global batch.

    Raises:
        BenchError: There is none.
    """
    fitting = [
        each
        for each in found
        if each.rates
        and (each.processes, each.case.model, each.case.batch) == (processes, model, batch)
        and method in (None, each.case.method)
    ]
    if not fitting:
        raise BenchError(
            f"{model} at batch {batch} on {processes} was not measured{f' as {method}' if method else ''}."
        )
    return max(fitting, key=lambda each: each.rate)


def measurements_of(found: Sequence[CaseResult], command: str, where: str) -> list[Measurement]:
    """Return a measurement for each case, the speed-ups over one GPU, and the ratios to the peers.

    Args:
        found: All results of one run.
        command: The command that repeats it.
        where: The device in words, as `"GPUs"`.
    """
    lines: list[Measurement] = []
    for each in found:
        model = MODELS[each.case.model]
        if each.rates:
            line = make_measurement(
                each.rates,
                workload=f"{model.title}, global batch {each.case.batch:,}, {each.processes} {where}, "
                f"{each.case.label}",
                metric=f"{model.unit} a second",
                unit=f"{model.unit}/s",
                command=command,
            )
            lines.append(line)
    keys = dict.fromkeys((each.case.model, each.case.batch, each.processes) for each in found if each.rates)
    for model, batch, processes in keys:
        if processes > 1:
            lines += _ratios(found, model, batch, processes, command, where)
    lines += _worst(found, command, where)
    return lines


def _worst(found: Sequence[CaseResult], command: str, where: str) -> list[Measurement]:
    """The worst ratio to captured DDP, if all networks and batches of the target were measured."""
    most = max((each.processes for each in found), default=1)
    ratios: dict[str, float] = {}
    for model in WORST_MODELS:
        for batch in WORST_BATCHES:
            try:
                ours = best(found, processes=most, model=model, batch=batch, method="penstock")
                theirs = best(found, processes=most, model=model, batch=batch, method="captured ddp")
            except BenchError:
                return []
            ratios[f"{MODELS[model].title} at {batch:,}"] = ours.rate / theirs.rate
    name = min(ratios, key=lambda each: ratios[each])
    return [
        make_measurement(
            [ratios[name]],
            id="train.worst_vs_captured_ddp",
            workload=f"{', '.join(ratios)}, {most} {where}; the worst is {name}",
            metric="ratio of examples a second",
            unit="ratio",
            command=command,
        )
    ]


_STRONG = {
    ("alexnet", 1024): "train.alexnet.strong_1024_x{}",
    ("alexnet", 256): "train.alexnet.strong_256_x{}",
    ("resnet50", 1024): "train.resnet50.strong_1024_x{}",
    ("resnet50", 256): "train.resnet50.strong_256_x{}",
}


def _ratios(
    found: Sequence[CaseResult], model: str, batch: int, processes: int, command: str, where: str
) -> list[Measurement]:
    title, lines = MODELS[model].title, list[Measurement]()
    try:
        ours = best(found, processes=processes, model=model, batch=batch, method="penstock")
    except BenchError:
        return []
    compared = [("one", 1, batch, None), ("one of weak", 1, batch // processes, None)]
    compared += [(method, processes, batch, method) for method in METHODS[1:]]
    for name, theirs_on, theirs_batch, method in compared:
        try:
            theirs = best(found, processes=theirs_on, model=model, batch=theirs_batch, method=method)
        except BenchError:
            continue
        ratio = ours.rate / theirs.rate
        beside = f"{theirs.processes} {where}, batch {theirs.case.batch:,}, {theirs.case.label}"
        lines.append(
            make_measurement(
                [rate / theirs.rate for rate in ours.rates],
                id=_target(name, model, batch, processes),
                workload=f"{title}, global batch {batch:,}, {processes} {where}, {ours.case.label}, over {beside}",
                metric="ratio of examples a second",
                unit="ratio",
                command=command,
                peer=Comparison(name=beside, median=theirs.rate, ratio=ratio),
            )
        )
    return lines


def _target(name: str, model: str, batch: int, processes: int) -> str | None:
    if name == "one" and (model, batch) in _STRONG and processes in (4, 8):
        return _STRONG[model, batch].format(processes)
    if name == "one of weak" and (model, batch, processes) == ("alexnet", 1024, 8):
        return "train.alexnet.weak_128_x8"
    if (model, batch) == ("alexnet", 256):
        return {"ddp": "train.alexnet.vs_eager_ddp_256", "captured ddp": "train.alexnet.vs_captured_ddp_256"}.get(name)
    return "train.head_1_4m_vs_ddp" if (name, model) == ("ddp", "head_1_4m") else None


def draw(found: Sequence[CaseResult], picture: Path) -> None:
    """Draw the speed-up over the fastest method on one GPU, beside linear scaling."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys((each.case.model, each.case.batch) for each in found if each.rates))
    keys = [
        key for key in keys if any(each.processes == 1 and (each.case.model, each.case.batch) == key for each in found)
    ]
    if not keys:
        raise BenchError("nothing was measured on one GPU; the speed-ups need it.")
    figure = Figure(figsize=(4.2 * len(keys), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    counts = sorted({each.processes for each in found})
    for place, (model, batch) in enumerate(keys, 1):
        axes = figure.add_subplot(1, len(keys), place)
        axes.plot(counts, counts, color="0.7", linestyle=":", label="linear")
        base = best(found, processes=1, model=model, batch=batch).rate
        for method in METHODS:
            points = [
                (count, best(found, processes=count, model=model, batch=batch, method=method).rate / base)
                for count in counts
                if any(
                    each.rates
                    and (each.case.model, each.case.batch, each.case.method, each.processes)
                    == (model, batch, method, count)
                    for each in found
                )
            ]
            axes.plot([count for count, _ in points], [ratio for _, ratio in points], marker="o", label=method)
        axes.set_title(f"{MODELS[model].title}, global batch {batch:,}")
        axes.set_xlabel("GPUs")
        axes.set_ylabel("times one GPU")
        axes.set_xticks(counts)
        axes.grid(alpha=0.3)
        if place == 1:
            axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)

"""How much faster several GPUs train than one: the same networks at one batch size (strong) or one a GPU (weak).

Every speed-up is over the fastest of all ways on one GPU that were measured in the same run, whoever's it is.
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

from penstock.bench.results import Line, Peer, line_of
from penstock.bench.train_case import MODELS, WAYS, Case
from penstock.core.errors import BenchError
from penstock.train.launch import free_port

# Over which the worst ratio to captured DDP is asked.
WORST_MODELS, WORST_BATCHES = ("alexnet", "vgg16", "resnet50", "vit_b16"), (256, 1024)
# Until a case is measured; compiling a large network takes a minute and more.
LIMIT_S = 240.0

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One case with so many processes.

    Args:
        case: What, and which way.
        processes: GPUs, or processes on the CPU.
        rates: Examples a second over all of them, of each repetition.
        losses: Of the first and of the last step, over the global batch.
        memory_gb: The most that the first GPU held.
        ready_s: Until the steps that were measured.
        error: Why there is nothing else, or None.
    """

    case: Case
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
    cases: Sequence[Case],
    processes: int,
    *,
    device: str,
    seconds: float,
    repeat: int,
    say: Say,
    limit_s: float = LIMIT_S,
) -> Iterator[Measured]:
    """Measure cases one after the other, in one group of processes for as long as none fails.

    Args:
        cases: Which.
        processes: How many take the steps together.
        device: `"cuda"` or `"cpu"`.
        seconds: How long each repetition takes, about.
        repeat: How many there are.
        say: Called with a sentence for each.
        limit_s: What takes longer than this is ended, and the next case tried.
    """
    left = list(cases)
    while left:
        said = _Group(left, processes, device, seconds, repeat)
        try:
            for fields in said.lines(limit_s):
                case = left.pop(0)
                fields.pop("case")
                fields.pop("steps")
                found = Measured(case=case, **fields)
                say(_sentence(found))
                yield found
        finally:
            said.end()
        if left:
            case = left.pop(0)
            say(f"  {case.model}, {case.batch:,}, {processes} x {device}, {case.label}: {said.why()}")
            yield Measured(case=case, processes=processes, rates=[], losses=[], error=said.why())


def _sentence(found: Measured) -> str:
    case, unit = found.case, MODELS[found.case.model].unit
    low, high = (float(np.percentile(found.rates, share)) for share in (10, 90))
    memory = "" if found.memory_gb is None else f", {found.memory_gb:.1f} GB"
    return (
        f"  {case.model}, {case.batch:,}, {found.processes}, {case.label}: {found.rate:,.0f} {unit}/s "
        f"({low:,.0f} to {high:,.0f}){memory}, loss {found.losses[0]:.3f} to {found.losses[1]:.3f}, "
        f"ready in {found.ready_s:.0f} s"
    )


class _Group:
    """Processes that measure cases together."""

    def __init__(self, cases: Sequence[Case], processes: int, device: str, seconds: float, repeat: int) -> None:
        port, asked = free_port(), json.dumps([asdict(case) for case in cases])
        # As torch's notes on capturing DistributedDataParallel ask for it.
        environment = os.environ | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        if any(case.changes.get("deterministic") for case in cases):
            # cuBLAS is deterministic only with a workspace of its own, which it looks for before its first product.
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        words = [sys.executable, "-m", "penstock.bench.train_worker"]
        self._errors = [open(os.memfd_create("errors"), "w+") for _ in range(processes)]  # noqa: SIM115
        self._processes = [
            subprocess.Popen(
                [*words, str(rank), str(processes), str(port), device, asked, str(seconds), str(repeat)],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=self._errors[rank],
                env=environment,
            )
            for rank in range(processes)
        ]
        self._said: list[list[str]] = []
        self._late = False

    def lines(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """What the first process says, until it ends, another one fails, or nothing comes for too long."""
        first = self._processes[0].stdout
        assert first is not None
        with selectors.DefaultSelector() as waiting:
            waiting.register(first, selectors.EVENT_READ)
            heard_s = time.monotonic()
            while True:
                if waiting.select(timeout=0.5):
                    line = first.readline()
                    if not line:
                        return
                    heard_s = time.monotonic()
                    if line.startswith(b"{"):
                        yield json.loads(line)
                elif time.monotonic() - heard_s > limit_s:
                    self._late = True
                    return
                elif any(process.poll() not in (0, None) for process in self._processes):
                    return

    def end(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for errors in self._errors:
            errors.seek(0)
            # What NCCL warns of at its end is no reason.
            self._said.append([line for line in errors.read().splitlines() if line.strip() and "Warning: " not in line])
            errors.close()

    def why(self) -> str:
        """Why the first case that is missing was not measured, after `end`."""
        if self._late:
            return "it was not measured in time"
        for process, said in zip(self._processes, self._said, strict=True):
            if process.returncode not in (0, -9) and said:
                return said[-1][:300]
        return "its processes ended without a word"


def ways(models: Iterable[str], batches: Iterable[int], *, compiled: Sequence[bool] = (False, True)) -> list[Case]:
    """Every way to train some networks at some batch sizes."""
    chosen = list(batches)
    return [
        Case(model=model, batch=batch, way=way, compiled=each)
        for model in models
        for batch in chosen
        for way in WAYS
        for each in compiled
    ]


def best(found: Iterable[Measured], *, processes: int, model: str, batch: int, way: str | None = None) -> Measured:
    """The fastest of some.

    Raises:
        BenchError: There is none.
    """
    fitting = [
        each
        for each in found
        if each.rates
        and (each.processes, each.case.model, each.case.batch) == (processes, model, batch)
        and way in (None, each.case.way)
    ]
    if not fitting:
        raise BenchError(f"{model} at batch {batch} on {processes} was not measured{f' as {way}' if way else ''}.")
    return max(fitting, key=lambda each: each.rate)


def lines_of(found: Sequence[Measured], command: str, where: str) -> list[Line]:
    """A line of data for each case, speed-ups over one GPU, and ratios to the peers.

    Args:
        found: All that was measured in one run.
        command: Which repeats it.
        where: The device, in words: `"GPUs"` say.
    """
    lines = [
        line_of(
            each.rates,
            id=None,
            workload=f"{MODELS[each.case.model].title}, global batch {each.case.batch:,}, {each.processes} {where}, "
            f"{each.case.label}",
            metric=f"{MODELS[each.case.model].unit} a second",
            unit=f"{MODELS[each.case.model].unit}/s",
            command=command,
        )
        for each in found
        if each.rates
    ]
    keys = dict.fromkeys((each.case.model, each.case.batch, each.processes) for each in found if each.rates)
    for model, batch, processes in keys:
        if processes > 1:
            lines += _ratios(found, model, batch, processes, command, where)
    lines += _worst(found, command, where)
    return lines


def _worst(found: Sequence[Measured], command: str, where: str) -> list[Line]:
    """The worst ratio to captured DDP, where all that it is asked over was measured on one number of GPUs."""
    most = max((each.processes for each in found), default=1)
    ratios: dict[str, float] = {}
    for model in WORST_MODELS:
        for batch in WORST_BATCHES:
            try:
                ours = best(found, processes=most, model=model, batch=batch, way="penstock")
                theirs = best(found, processes=most, model=model, batch=batch, way="captured ddp")
            except BenchError:
                return []
            ratios[f"{MODELS[model].title} at {batch:,}"] = ours.rate / theirs.rate
    name = min(ratios, key=lambda each: ratios[each])
    return [
        line_of(
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


def _ratios(found: Sequence[Measured], model: str, batch: int, processes: int, command: str, where: str) -> list[Line]:
    title, lines = MODELS[model].title, list[Line]()
    try:
        ours = best(found, processes=processes, model=model, batch=batch, way="penstock")
    except BenchError:
        return []
    compared = [("one", 1, batch, None), ("one of weak", 1, batch // processes, None)]
    compared += [(way, processes, batch, way) for way in WAYS[1:]]
    for name, theirs_on, theirs_batch, way in compared:
        try:
            theirs = best(found, processes=theirs_on, model=model, batch=theirs_batch, way=way)
        except BenchError:
            continue
        ratio = ours.rate / theirs.rate
        beside = f"{theirs.processes} {where}, batch {theirs.case.batch:,}, {theirs.case.label}"
        lines.append(
            line_of(
                [rate / theirs.rate for rate in ours.rates],
                id=_target(name, model, batch, processes),
                workload=f"{title}, global batch {batch:,}, {processes} {where}, {ours.case.label}, over {beside}",
                metric="ratio of examples a second",
                unit="ratio",
                command=command,
                peer=Peer(name=beside, median=theirs.rate, ratio=ratio),
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


def draw(found: Sequence[Measured], picture: Path) -> None:
    """Speed-up over the fastest way on one GPU, beside the line where nothing is lost."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys((each.case.model, each.case.batch) for each in found if each.rates))
    keys = [
        key for key in keys if any(each.processes == 1 and (each.case.model, each.case.batch) == key for each in found)
    ]
    if not keys:
        raise BenchError("nothing was measured on one GPU, over which the others' speed could be drawn.")
    figure = Figure(figsize=(4.2 * len(keys), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    counts = sorted({each.processes for each in found})
    for place, (model, batch) in enumerate(keys, 1):
        axes = figure.add_subplot(1, len(keys), place)
        axes.plot(counts, counts, color="0.7", linestyle=":", label="nothing lost")
        base = best(found, processes=1, model=model, batch=batch).rate
        for way in WAYS:
            points = [
                (count, best(found, processes=count, model=model, batch=batch, way=way).rate / base)
                for count in counts
                if any(
                    each.rates
                    and (each.case.model, each.case.batch, each.case.way, each.processes) == (model, batch, way, count)
                    for each in found
                )
            ]
            axes.plot([count for count, _ in points], [ratio for _, ratio in points], marker="o", label=way)
        axes.set_title(f"{MODELS[model].title}, global batch {batch:,}")
        axes.set_xlabel("GPUs")
        axes.set_ylabel("times one GPU")
        axes.set_xticks(counts)
        axes.grid(alpha=0.3)
        if place == 1:
            axes.legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)

"""Training throughput of several GPUs over one: strong scaling at one global batch, weak scaling at one batch a GPU.

Every speed-up is over the fastest method on one GPU in the same run, ours or a peer's.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

import numpy as np

from benchmarks.acceptance.train.rank_processes import RankGroup
from benchmarks.acceptance.train.train_case import METHODS, MODELS, TrainingCase
from penstock.bench.measurement import Comparison, Measurement, make_measurement
from penstock.core.errors import BenchError

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
        # Required by torch's notes on capturing DistributedDataParallel.
        environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        if any(case.changes.get("deterministic") for case in left):
            # cuBLAS is deterministic only with its own workspace, which it reads before its first product.
            environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        arguments = [device, json.dumps([asdict(case) for case in left]), str(seconds), str(repeat)]
        group = RankGroup("benchmarks.acceptance.train.train_worker", processes, arguments, environment)
        reason = ""
        try:
            for line in group.lines(limit_s):
                if line.startswith("{"):
                    found = CaseResult(case=left.pop(0), **json.loads(line))
                    say(_sentence(found))
                    yield found
        finally:
            reason = group.end()
        if left:
            case = left.pop(0)
            say(f"  {case.model}, {case.batch:,}, {processes} x {device}, {case.label}: {reason}")
            yield CaseResult(case=case, processes=processes, rates=[], losses=[], error=reason)


def _sentence(found: CaseResult) -> str:
    case, unit = found.case, MODELS[found.case.model].unit
    low, high = (float(np.percentile(found.rates, share)) for share in (10, 90))
    memory = "" if found.memory_gb is None else f", {found.memory_gb:.1f} GB"
    return (
        f"  {case.model}, {case.batch:,}, {found.processes}, {case.label}: {found.rate:,.0f} {unit}/s "
        f"({low:,.0f} to {high:,.0f}){memory}, loss {found.losses[0]:.3f} to {found.losses[1]:.3f}, "
        f"ready in {found.ready_s:.0f} s"
    )


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


def measurements_of(found: Sequence[CaseResult], where: str) -> list[Measurement]:
    """Return a measurement for each case, the speed-ups over one GPU, and the ratios to the peers.

    Args:
        found: All results of one run.
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
            )
            lines.append(line)
    keys = dict.fromkeys((each.case.model, each.case.batch, each.processes) for each in found if each.rates)
    for model, batch, processes in keys:
        if processes > 1:
            lines += _ratios(found, model, batch, processes, where)
    lines += _worst(found, where)
    return lines


def _worst(found: Sequence[CaseResult], where: str) -> list[Measurement]:
    """The worst ratio to captured DDP, if all networks and batches of the target were measured."""
    max_processes = max((each.processes for each in found), default=1)
    ratios: dict[str, float] = {}
    for model, batch in product(WORST_MODELS, WORST_BATCHES):
        try:
            ours, theirs = (
                best(found, processes=max_processes, model=model, batch=batch, method=method)
                for method in ("penstock", "captured ddp")
            )
        except BenchError:
            return []
        ratios[f"{MODELS[model].title} at {batch:,}"] = ours.rate / theirs.rate
    name = min(ratios, key=lambda each: ratios[each])
    return [
        make_measurement(
            [ratios[name]],
            id="train.worst_vs_captured_ddp",
            workload=f"{', '.join(ratios)}, {max_processes} {where}; the worst is {name}",
            metric="ratio of examples a second",
            unit="ratio",
        )
    ]


def _ratios(found: Sequence[CaseResult], model: str, batch: int, processes: int, where: str) -> list[Measurement]:
    lines: list[Measurement] = []
    compared = [("one", 1, batch, None), ("one of weak", 1, batch // processes, None)]
    compared += [(method, processes, batch, method) for method in METHODS[1:]]
    for name, theirs_on, theirs_batch, method in compared:
        try:
            ours = best(found, processes=processes, model=model, batch=batch, method="penstock")
            theirs = best(found, processes=theirs_on, model=model, batch=theirs_batch, method=method)
        except BenchError:
            continue
        beside = f"{theirs.processes} {where}, batch {theirs.case.batch:,}, {theirs.case.label}"
        workload = (
            f"{MODELS[model].title}, global batch {batch:,}, {processes} {where}, {ours.case.label}, over {beside}"
        )
        lines.append(
            make_measurement(
                [rate / theirs.rate for rate in ours.rates],
                id=_target(name, model, batch, processes),
                workload=workload,
                metric="ratio of examples a second",
                unit="ratio",
                peer=Comparison(name=beside, median=theirs.rate, ratio=ours.rate / theirs.rate),
            )
        )
    return lines


def _target(name: str, model: str, batch: int, processes: int) -> str | None:
    if name == "one" and model in ("alexnet", "resnet50") and batch in (256, 1024) and processes in (4, 8):
        return f"train.{model}.strong_{batch}_x{processes}"
    if name == "one of weak" and (model, batch, processes) == ("alexnet", 1024, 8):
        return "train.alexnet.weak_128_x8"
    if (model, batch) == ("alexnet", 256):
        return {"ddp": "train.alexnet.vs_eager_ddp_256", "captured ddp": "train.alexnet.vs_captured_ddp_256"}.get(name)
    return "train.head_1_4m_vs_ddp" if (name, model) == ("ddp", "head_1_4m") else None

"""`python -m benchmarks.acceptance train`."""

import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import BenchError


def train(
    gpus: Annotated[list[int] | None, typer.Option(help="Number of GPUs; may be given several times.")] = None,
    processes: Annotated[list[int] | None, typer.Option(help="Processes on the CPU instead.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A network; may be given several times.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Global batch; may be given several times.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="penstock, ddp or 'captured ddp'; all by default.")] = None,
    compiled: Annotated[bool | None, typer.Option(help="Only compiled or only eager; both by default.")] = None,
    cases: Annotated[Path | None, typer.Option(help="A JSON list of cases instead of all these.")] = None,
    seconds: Annotated[float, typer.Option(help="Duration of each repetition.")] = 0.6,
    repeat: Annotated[int, typer.Option(help="Repetitions.")] = 5,
    out: Annotated[Path | None, typer.Option(help="A file to which JSON lines are appended.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Append the measurements to benchmarks/results.")] = False,
) -> None:
    """Measure training throughput on some numbers of GPUs, beside tuned eager DDP and captured DDP."""
    from benchmarks.acceptance.report.results import record_result
    from benchmarks.acceptance.train.train_case import METHODS, MODELS, all_cases, read_cases
    from benchmarks.acceptance.train.train_scaling import CaseResult, measurements_of, run_cases

    if gpus and processes:
        raise BenchError("--gpus and --processes contradict each other; give one of them.")
    counts = gpus or processes or [1]
    if repeat < 1 or not seconds > 0 or any(count < 1 for count in counts):
        raise BenchError("--repeat, --seconds and the numbers of GPUs or processes must be above 0.")
    _check_known("network", model or [], MODELS)
    _check_known("method", method or [], METHODS)
    if cases is not None:
        chosen = read_cases(cases)
    else:
        chosen = all_cases(model or ["alexnet", "resnet50"], batch or [256], method or METHODS, compiled)
    if processes:
        chosen = [case for case in chosen if case.method != "captured ddp"]
    results: list[CaseResult] = []
    device = "cpu" if processes else "cuda"
    try:
        for count in counts:
            own = [case for case in chosen if not case.on or count in case.on]
            for result in run_cases(own, count, device=device, seconds=seconds, repeat=repeat, say=typer.echo):
                results.append(result)  # noqa: PERF402 - one by one, so that an interruption keeps those before it
    except KeyboardInterrupt:
        typer.echo("Interrupted; measured so far:")
    lines = measurements_of(results, "processes" if processes else "GPUs")
    for line in lines:
        if line.unit == "ratio":
            typer.echo(f"{line.workload}: {line.median:.3f}")
        if record:
            record_result(line, "training")
    if out is not None:
        with out.open("a") as sink:
            sink.writelines(json.dumps(asdict(line)) + "\n" for line in lines)


def _check_known(kind: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise BenchError(f"there is no {kind} {name!r}; choose among {', '.join(known)}.")

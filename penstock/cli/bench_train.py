"""`penstock bench train`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from penstock.core.errors import BenchError


def train(
    gpus: Annotated[list[int] | None, typer.Option(help="How many GPUs; may be given several times.")] = None,
    processes: Annotated[list[int] | None, typer.Option(help="Processes on the CPU instead.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A network; may be given several times.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Examples a step, over all GPUs together.")] = None,
    way: Annotated[list[str] | None, typer.Option(help="penstock, ddp or 'captured ddp'; all by default.")] = None,
    compiled: Annotated[bool | None, typer.Option(help="Compiled ways alone, or none; both by default.")] = None,
    cases: Annotated[Path | None, typer.Option(help="A JSON list of cases instead of all these.")] = None,
    seconds: Annotated[float, typer.Option(help="How long each repetition takes.")] = 0.6,
    repeat: Annotated[int, typer.Option(help="Repetitions, of which the median counts.")] = 5,
    out: Annotated[Path | None, typer.Option(help="A file to which JSON lines are appended.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the speed-ups are drawn (PNG or SVG).")] = None,
    record: Annotated[bool, typer.Option(help="Append the measurements to benchmarks/results.")] = False,
) -> None:
    """Measure how fast networks are trained on some numbers of GPUs, beside tuned and captured DDP."""
    from penstock.bench.results import append, own_command
    from penstock.bench.train_case import MODELS, WAYS, read_cases
    from penstock.bench.train_scaling import Measured, draw, lines_of, run_cases, ways

    if gpus and processes:
        raise BenchError("--gpus and --processes contradict each other; give one of them.")
    if repeat < 1 or not seconds > 0 or any(count < 1 for count in gpus or processes or []):
        raise BenchError("--repeat, --seconds and the numbers of GPUs or processes must be above 0.")
    strange = [name for name in model or [] if name not in MODELS]
    if strange:
        raise BenchError(f"there is no network {strange[0]!r}; choose among {', '.join(MODELS)}.")
    strange = [name for name in way or [] if name not in WAYS]
    if strange:
        raise BenchError(f"there is no way {strange[0]!r}; choose among {', '.join(WAYS)}.")
    chosen = ways(
        model or ["alexnet", "resnet50"], batch or [256], compiled=(False, True) if compiled is None else (compiled,)
    )
    chosen = [case for case in chosen if not way or case.way in way]
    if cases is not None:
        chosen = read_cases(cases)
    if processes:
        chosen = [case for case in chosen if case.way != "captured ddp"]
    if picture is not None and 1 not in (gpus or processes or [1]):
        raise BenchError("--picture draws what is faster than one; measure that as well, by --gpus 1.")
    found: list[Measured] = []
    device = "cpu" if processes else "cuda"
    try:
        for count in gpus or processes or [1]:
            own = [case for case in chosen if not case.on or count in case.on]
            for measured in run_cases(own, count, device=device, seconds=seconds, repeat=repeat, say=typer.echo):
                found.append(measured)  # noqa: PERF402 - one by one, so that an interruption keeps those before it
    except KeyboardInterrupt:
        typer.echo("Interrupted; what was measured until here:")
    lines = lines_of(found, own_command(), "processes" if processes else "GPUs")
    for line in lines:
        if line.unit == "ratio":
            typer.echo(f"{line.workload}: {line.median:.3f}")
        if record:
            append(line, "training")
    if out is not None:
        with out.open("a") as sink:
            sink.writelines(json.dumps(asdict(line)) + "\n" for line in lines)
    if picture is not None:
        draw(found, picture)

"""Figures of the foundation, the server, streams and training; what measures first checks that answers are right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.bench import demo_time, digits, drain, images, keywords, leaks, resume, startup, tick
from penstock.bench.report import read_targets
from penstock.bench.results import append, line_of
from penstock.core.errors import BenchError


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """How one figure is measured.

    Args:
        measure: Gives its repetitions.
        workload: What is measured, in words.
        metric: What the number is.
        unit: Its unit.
    """

    measure: Callable[[], list[float]]
    workload: str
    metric: str
    unit: str


SERVER: dict[str, Figure] = {
    "server.drain_lost": Figure(
        measure=drain.lost,
        workload="20 drills of SIGTERM under 64 connections in a closed loop, one process and two front-ends in turn",
        metric="requests that the server answered and their client did not get whole",
        unit="requests",
    ),
}


def tick_on_gpu() -> list[float]:
    """Milliseconds of a tick of 4,096 streams besides the network, of five runs."""
    from penstock.bench.stream_tick import besides_ms

    return besides_ms(4096)


STREAMS: dict[str, Figure] = {
    "keywords.word_error": Figure(
        measure=keywords.word_error,
        workload="penstock train keywords, seeds 0, 1, 2; the voices that are never learned from or chosen by",
        metric="word error rate, streamed in chunks of 80 ms",
        unit="fraction",
    ),
    "streams.leaks": Figure(
        measure=leaks.leaks,
        workload="100,000 streams over 64 slots, a fifth of them given up midway, each compared with itself alone",
        metric="streams that heard something else than alone",
        unit="leaks",
    ),
    "streams.tick_overhead_ms_4096": Figure(
        measure=tick_on_gpu,
        workload="one engine tick at 4,096 ready rows of 2,560 bytes: 5 x 2560 GRU + 2 convolutions, bf16",
        metric="wall time besides the network's own CUDA graph",
        unit="ms",
    ),
}


def parity() -> list[float]:
    """The largest relative error of several processes."""
    from penstock.bench.parity import worst

    return worst()


def checkpoint_stall() -> list[float]:
    """The share of a minute that a checkpoint costs the steps, of several."""
    from penstock.bench.checkpoints import lost_fractions

    return lost_fractions()


def converged(layout: str) -> Figure:
    """How well the digits are learned in one way."""

    def measure() -> list[float]:
        from penstock.bench.convergence import losses

        return losses(layout)

    return Figure(
        measure=measure,
        workload=f"penstock train digits, seeds 0 to 3, {layout}; the fixed third that is never chosen by",
        metric="test loss (smoothed cross-entropy)",
        unit="nats",
    )


def learned_in(precision: str, metric: Literal["test_loss", "test_accuracy"]) -> Figure:
    """How well the digits are learned on a GPU in some precision."""

    def measure() -> list[float]:
        from penstock.bench.convergence import on_gpu

        return on_gpu(precision, metric)

    said, unit = {
        "test_loss": ("test loss (smoothed cross-entropy)", "nats"),
        "test_accuracy": ("test accuracy", "fraction"),
    }[metric]
    return Figure(
        measure=measure,
        workload=f"penstock train digits, seeds 0 to 3, one GPU, {precision}; the fixed third that is never chosen by",
        metric=said,
        unit=unit,
    )


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
TRAINING: dict[str, Figure] = {
    "train.convergence.one": converged("one process"),
    "train.convergence.data": converged("data-parallel"),
    "train.convergence.hybrid": converged("hybrid"),
    "train.checkpoint_stall": Figure(
        measure=checkpoint_stall,
        workload="a network of 63 million weights by SGD with momentum, fp32, a batch of 16; 0.75 GB a checkpoint: "
        "weights, momentum, other best weights each time; each read back and compared",
        metric="wall time beyond that of as many steps without a checkpoint, of parts before and after, over a minute",
        unit="fraction",
    ),
    "train.parity": Figure(
        measure=parity,
        workload="a step of small networks in 21 cases: placements, chunks, dropout, uneven batches, clipping, "
        "accumulation, batch norm; 1, 2 and 4 processes by gloo, fp32",
        metric="largest relative error (norm of the difference over the norm) of the loss and of any parameter's "
        "gradient against one process in float64",
        unit="rel",
    ),
    # Last: where there is no GPU, all others are measured before that is said.
    **{f"train.precision.{each}": learned_in(each, "test_loss") for each in PRECISIONS},
    **{f"train.precision.{each}.accuracy": learned_in(each, "test_accuracy") for each in PRECISIONS},
}


FOUNDATION: dict[str, Figure] = {
    "import.ms": Figure(
        measure=startup.import_ms,
        workload="a fresh interpreter imports penstock, beside one that imports nothing",
        metric="wall time above an empty interpreter",
        unit="ms",
    ),
    "tick.calls_ratio": Figure(
        measure=tick.calls_ratio,
        workload="one engine tick over 4,096 slots of 784 bytes, the network left out",
        metric="Python and C calls at 4,096 ready rows over those at 1",
        unit="ratio",
    ),
    "tick.us_4096": Figure(
        measure=tick.us_4096,
        workload="one engine tick at 4,096 ready rows of 784 bytes, the network left out",
        metric="wall time",
        unit="us",
    ),
    "resume.same_hash": Figure(
        measure=resume.same_hash,
        workload="20 runs killed with SIGKILL at a random moment, then resumed",
        metric="share that ends with the undisturbed parameter hash",
        unit="fraction",
    ),
    "digits.accuracy": Figure(
        measure=digits.accuracy,
        workload="penstock train digits, seeds 0, 1, 2; the fixed third that is never chosen by",
        metric="held-out accuracy",
        unit="fraction",
    ),
    "digits.train_seconds": Figure(
        measure=digits.train_seconds,
        workload="penstock train digits, seeds 0, 1, 2",
        metric="wall time of the training",
        unit="s",
    ),
    "features.learned_vs_hog": Figure(
        measure=digits.learned_vs_hog,
        workload="linear classifiers on HOG and on the learned embedding, the same split; seeds 0, 1, 2",
        metric="error of HOG over error of the embedding",
        unit="ratio",
    ),
    "serve.start_over_torch": Figure(
        measure=startup.start_over_torch,
        workload="penstock serve of the digits: start to the first answer, minus the time of `import torch`",
        metric="wall time",
        unit="s",
    ),
    "serve.idle_overhead_ms": Figure(
        measure=startup.idle_overhead_ms,
        workload="one request at a time to the served digits, minus the network's own time",
        metric="p50",
        unit="ms",
    ),
    "demo.seconds": Figure(
        measure=demo_time.seconds,
        workload="make demo in a fresh clone, the packages cached",
        metric="wall time",
        unit="s",
    ),
}


DEVICE: dict[str, Figure] = {
    "device.images.accuracy": Figure(
        measure=images.accuracy,
        workload="penstock train images, seeds 0, 1, 2; views whose middle lies where none was that is learned "
        "from, of another photograph where there is one; some smeared, some stored as JPEG, which none was",
        metric="top-1 accuracy of the bundle",
        unit="fraction",
    ),
}


def measure_figures(
    figures: dict[str, Figure],
    issue: str,
    ids: list[str],
    *,
    record: bool,
    say: Callable[[str], None],
    options: str = "",
) -> None:
    """Measure some of the figures, or all.

    Args:
        figures: Of an issue.
        issue: Its name, which the file of results has too.
        ids: Which; all where empty.
        record: Append a line for each.
        say: Called with a sentence for each.
        options: What else the command is given that measures them.

    Raises:
        BenchError: There is no such figure, or one cannot be trusted.
    """
    unknown = [name for name in ids if name not in figures]
    if unknown:
        raise BenchError(f"there is no figure {', '.join(unknown)}; there are {', '.join(figures)}.")
    asked = {target.id for target in read_targets()}
    for name in ids or figures:
        figure = figures[name]
        values = figure.measure()
        line = line_of(
            values,
            id=name if name in asked else None,
            workload=figure.workload,
            metric=figure.metric,
            unit=figure.unit,
            command=f"penstock bench {'live' if issue == 'streams' else issue}{options} --only {name}",
        )
        say(f"{name}: median {line.median:.5g} {figure.unit} ({line.p10:.5g} to {line.p90:.5g}, {len(values)} runs)")
        if record:
            append(line, issue)

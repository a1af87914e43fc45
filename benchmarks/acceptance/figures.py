"""Every figure that needs no load generator, by the area whose results file it is recorded in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.acceptance import (
    accuracy,
    checkpoint_stall,
    convergence,
    drain,
    leaks,
    make_seconds,
    parity,
    resume,
    start_times,
    stream_tick,
    tick,
)
from benchmarks.acceptance.report import read_targets
from benchmarks.acceptance.results import record_result
from penstock.bench.measurement import make_measurement
from penstock.core.errors import BenchError


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureSpec:
    """A figure and the function that measures it.

    Args:
        measure: Returns its repetitions, after checking that answers are right.
        workload: What is measured, in words.
        metric: The meaning of the number.
        unit: Its unit.
    """

    measure: Callable[[], list[float]]
    workload: str
    metric: str
    unit: str


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
_HELD_OUT = "the fixed third that is never chosen by"


def _converged(layout: str) -> FigureSpec:
    return FigureSpec(
        measure=lambda: convergence.losses(layout),
        workload=f"penstock train digits, seeds 0 to 3, {layout}; {_HELD_OUT}",
        metric="test loss (smoothed cross-entropy)",
        unit="nats",
    )


def _in_precision(precision: str, metric: Literal["test_loss", "test_accuracy"]) -> FigureSpec:
    loss = metric == "test_loss"
    return FigureSpec(
        measure=lambda: convergence.on_gpu(precision, metric),
        workload=f"penstock train digits, seeds 0 to 3, one GPU, {precision}; {_HELD_OUT}",
        metric="test loss (smoothed cross-entropy)" if loss else "test accuracy",
        unit="nats" if loss else "fraction",
    )


FOUNDATION: dict[str, FigureSpec] = {
    "import.ms": FigureSpec(
        measure=start_times.import_ms,
        workload="a fresh interpreter imports penstock, beside one that imports nothing",
        metric="wall time above an empty interpreter",
        unit="ms",
    ),
    "tick.calls_ratio": FigureSpec(
        measure=tick.calls_ratio,
        workload="one engine tick over 4,096 slots of 784 bytes, without the network",
        metric="Python and C calls at 4,096 ready rows over those at 1",
        unit="ratio",
    ),
    "tick.us_4096": FigureSpec(
        measure=tick.us_4096,
        workload="one engine tick at 4,096 ready rows of 784 bytes, without the network",
        metric="wall time",
        unit="us",
    ),
    "resume.same_hash": FigureSpec(
        measure=resume.same_hash,
        workload="20 runs killed with SIGKILL at a random moment, then resumed",
        metric="share that ends with the parameter hash of an uninterrupted run",
        unit="fraction",
    ),
    "digits.accuracy": FigureSpec(
        measure=accuracy.digits_accuracy,
        workload=f"penstock train digits, seeds 0, 1, 2; {_HELD_OUT}",
        metric="held-out accuracy",
        unit="fraction",
    ),
    "digits.train_seconds": FigureSpec(
        measure=accuracy.digits_train_seconds,
        workload="penstock train digits, seeds 0, 1, 2",
        metric="wall time of the training",
        unit="s",
    ),
    "features.learned_vs_hog": FigureSpec(
        measure=accuracy.hog_error_ratio,
        workload="linear classifiers on HOG and on the learned embedding, the same split; seeds 0, 1, 2",
        metric="error of HOG over error of the embedding",
        unit="ratio",
    ),
    "serve.start_over_torch": FigureSpec(
        measure=start_times.start_over_torch,
        workload="penstock serve of the digits: start to the first answer, minus the time of `import torch`",
        metric="wall time",
        unit="s",
    ),
    "serve.idle_overhead_ms": FigureSpec(
        measure=start_times.idle_overhead_ms,
        workload="one request at a time to the served digits, minus the network's own time",
        metric="p50",
        unit="ms",
    ),
    "demo.seconds": FigureSpec(
        measure=make_seconds.demo_seconds,
        workload="make demo in a fresh clone, the packages cached",
        metric="wall time",
        unit="s",
    ),
}

SERVER: dict[str, FigureSpec] = {
    "server.drain_lost": FigureSpec(
        measure=drain.lost,
        workload="20 drills of SIGTERM under 64 connections in a closed loop, one process and two front-ends in turn",
        metric="requests that the server answered and that did not reach their client whole",
        unit="requests",
    ),
}

STREAMS: dict[str, FigureSpec] = {
    "keywords.word_error": FigureSpec(
        measure=accuracy.keywords_word_error,
        workload="penstock train keywords, seeds 0, 1, 2; on voices that are never learned from or chosen by",
        metric="word error rate, streamed in chunks of 80 ms",
        unit="fraction",
    ),
    "streams.leaks": FigureSpec(
        measure=leaks.leaks,
        workload="100,000 streams over 64 slots, a fifth of them cancelled midway, each compared with itself alone",
        metric="streams whose outputs differ from those of the stream alone",
        unit="leaks",
    ),
    "streams.tick_overhead_ms_4096": FigureSpec(
        measure=lambda: stream_tick.overhead_ms(4096),
        workload="one engine tick at 4,096 ready rows of 2,560 bytes: 5 x 2560 GRU + 2 convolutions, bf16",
        metric="wall time minus that of the network's own CUDA graph",
        unit="ms",
    ),
}

TRAINING: dict[str, FigureSpec] = {
    "train.convergence.one": _converged("one process"),
    "train.convergence.data": _converged("data-parallel"),
    "train.convergence.hybrid": _converged("hybrid"),
    "train.checkpoint_stall": FigureSpec(
        measure=checkpoint_stall.lost_fractions,
        workload="a network of 63 million weights by SGD with momentum, fp32, a batch of 16; 0.75 GB a checkpoint: "
        "weights, momentum, other best weights each time; each read back and compared",
        metric="wall time beyond that of as many steps without a checkpoint, of parts before and after, over a minute",
        unit="fraction",
    ),
    "train.parity": FigureSpec(
        measure=parity.worst,
        workload=f"a step of small networks in {len(parity.CASES)} cases: placements, chunks, dropout, uneven batches, "
        "clipping, accumulation, batch norm; 1, 2 and 4 processes by gloo, fp32",
        metric="largest relative error (norm of the difference over the norm) of the loss and of any parameter's "
        "gradient against one process in float64",
        unit="rel",
    ),
    # Last: without a GPU all others are measured before the error.
    **{f"train.precision.{each}": _in_precision(each, "test_loss") for each in PRECISIONS},
    **{f"train.precision.{each}.accuracy": _in_precision(each, "test_accuracy") for each in PRECISIONS},
}

DEVICE: dict[str, FigureSpec] = {
    "device.images.accuracy": FigureSpec(
        measure=accuracy.images_accuracy,
        workload="penstock train images, seeds 0, 1, 2; views whose centres are not among the training views, of "
        "another photograph where there is one; some blurred, some stored as JPEG, which training does not use",
        metric="top-1 accuracy of the bundle",
        unit="fraction",
    ),
}


def measure_figures(
    figures: Mapping[str, FigureSpec],
    area: str,
    ids: Sequence[str],
    *,
    record: bool,
    say: Callable[[str], None],
    options: str = "",
) -> None:
    """Measure some of the figures of an area, or all.

    Args:
        figures: The area's figures by id.
        area: Its command and results file.
        ids: Ids to measure; all if empty.
        record: Append each measurement to the results.
        say: Called with a sentence for each.
        options: Other options of the command that repeats them.

    Raises:
        BenchError: There is no such figure, or one cannot be trusted.
    """
    unknown = [name for name in ids if name not in figures]
    if unknown:
        raise BenchError(f"there is no figure {', '.join(unknown)}; there are {', '.join(figures)}.")
    targets = {target.id for target in read_targets()}
    for name in ids or figures:
        figure = figures[name]
        values = figure.measure()
        line = make_measurement(
            values,
            id=name if name in targets else None,
            workload=figure.workload,
            metric=figure.metric,
            unit=figure.unit,
            command=f"python -m benchmarks.acceptance {area}{options} --only {name}",
        )
        say(f"{name}: median {line.median:.5g} {figure.unit} ({line.p10:.5g} to {line.p90:.5g}, {len(values)} runs)")
        if record:
            record_result(line, area)

"""Step-time breakdown, from the device operations of each process.

A step's wall time is split into five parts that add up to it:

    compute          at least one kernel other than a collective ran
    communication    exposed communication: only collectives ran, and bytes moved
    imbalance        only collectives ran, and they waited for a slower process
    input            nothing ran, and the step waited for its batch
    launch           nothing ran, and the batch was there: the host was too slow, or did something else
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median_low
from typing import Any, Literal

from penstock.core.errors import TrainError
from penstock.core.wording.counted import counted
from penstock.train.profile.intervals import Span, Spans, common, length_ns, union, within, without

MS = 1e6
# Share of a step above which a part gets a sentence of advice.
ADVICE_SHARE = 0.1
ADVICE = {
    "communication": "the all-reduce of gradients takes longer than the computation beside it; larger batches, other "
    "placements or gradient_precision='bf16' make it less",
    "imbalance": "processes wait for a slower one; see whose share is the smallest",
    "input": "steps wait for their examples; decode them beforehand ('penstock shard'), or read with more workers",
    "launch": "there is nothing to do while the host prepares what is next; larger batches, compile=True or a CUDA "
    "graph make it less",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One operation of a device.

    Args:
        name: Name of the kernel, copy or operation.
        lane: Its stream or thread.
        kind: `"copy"` is the copy of a batch to the device.
        span: Its start and end, by the process's own clock.
    """

    name: str
    lane: str
    kind: Literal["compute", "collective", "copy"]
    span: Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The operations of one process's device in some steps.

    Args:
        rank: The rank of the process.
        steps: The time of each step on the device, from the end of the step before to its own end.
        work: All operations, also those before and after the steps; those of all ranks begin at the same step.
        waits: Times at which the host waited for a batch.
    """

    rank: int
    steps: tuple[Span, ...]
    work: tuple[Work, ...]
    waits: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivitySpans:
    """Times of each activity of a process's device.

    Args:
        compute: Kernels other than collectives ran.
        collective: Collectives ran.
        moving: Collectives moved bytes and did not wait for other ranks.
        waiting: The step waited for its batch, or a batch was copied to the device.
    """

    compute: Spans
    collective: Spans
    moving: Spans
    waiting: Spans


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """The wall time of steps, split into parts that add up to it, and the overlapped communication.

    Args:
        compute_ns: At least one kernel other than a collective ran.
        communication_ns: Exposed communication: only collectives ran, and bytes moved.
        imbalance_ns: Only collectives ran, and they waited for a slower process.
        input_ns: Nothing ran, and the step waited for its batch.
        launch_ns: Nothing ran, and the batch was there.
        overlapped_ns: Overlapped communication: collectives ran beside compute. It is contained in `compute_ns`.
    """

    compute_ns: int
    communication_ns: int
    imbalance_ns: int
    input_ns: int
    launch_ns: int
    overlapped_ns: int

    @property
    def wall_ns(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The five that add up, by name, in nanoseconds."""
        return {name: getattr(self, f"{name}_ns") for name in PARTS}


PARTS = ("compute", *ADVICE)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeBreakdown:
    """The time of some steps, by activity.

    Args:
        device: The devices, for people.
        batch_size: Examples a step, over all processes.
        shares: The parts of each step, by rank.
        undisturbed_ms: Duration of a step just before, without the profiler's overhead; None if not measured.
    """

    device: str
    batch_size: int
    shares: tuple[tuple[Shares, ...], ...]
    undisturbed_ms: float | None = None

    @property
    def mean(self) -> Shares:
        """The sum over all steps and processes."""
        return summed([share for own in self.shares for share in own])

    @property
    def step_ms(self) -> float:
        """The mean time of a step over steps and processes."""
        return self.mean.wall_ns / MS / sum(map(len, self.shares))

    def fraction(self, part: str) -> float:
        """Compute the fraction of a part in the step time."""
        return self.mean.parts[part] / max(self.mean.wall_ns, 1)

    def describe(self) -> str:
        """Format a table with a row per process, and advice on each large part."""
        count = len(self.shares[0])
        undisturbed = "" if self.undisturbed_ms is None else f"; {self.undisturbed_ms:.2f} ms without the profiler"
        head = (
            f"{counted(count, 'step')} of {counted(self.batch_size, 'example')} on {self.device}: "
            f"{self.step_ms:.2f} ms each{undisturbed}."
        )
        names = ["", "step", *PARTS, "overlapped"]
        rows = [names, *(_row(f"rank {rank}", summed(own), count) for rank, own in enumerate(self.shares))]
        if len(self.shares) > 1:
            rows.append(_row("mean", self.mean, count * len(self.shares)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        said = [
            f"{name} {self.fraction(name):.0%}: {advice}."
            for name, advice in ADVICE.items()
            if self.fraction(name) > ADVICE_SHARE
        ]
        return "\n".join([head, *table, *said])

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON fields: mean milliseconds, and the parts of each step in nanoseconds."""
        return {
            "device": self.device,
            "processes": len(self.shares),
            "steps": len(self.shares[0]),
            "batch_size": self.batch_size,
            "step_ms": self.step_ms,
            "undisturbed_ms": self.undisturbed_ms,
            "fractions": {name: self.fraction(name) for name in PARTS},
            "ranks": [[asdict(share) | {"wall_ns": share.wall_ns} for share in own] for own in self.shares],
        }


def breakdown_of(
    traces: Sequence[Trace], *, device: str, batch_size: int, undisturbed_ms: float | None = None
) -> StepTimeBreakdown:
    """Break down the steps of all processes.

    Args:
        traces: The traces of all processes, in the order of their ranks.
        device: The devices, for people.
        batch_size: Examples a step, over all processes.
        undisturbed_ms: Duration of a step without the profiler.

    Raises:
        TrainError: The processes did not take the same steps.
    """
    counts = {len(trace.steps) for trace in traces}
    if len(counts) != 1 or counts == {0}:
        raise TrainError(f"the traces are of {sorted(counts)} steps; profile the same steps in every process.")
    shares = tuple(
        tuple(split(step, activities) for step in trace.steps)
        for trace, activities in zip(traces, activities_of(traces), strict=True)
    )
    return StepTimeBreakdown(device=device, batch_size=batch_size, shares=shares, undisturbed_ms=undisturbed_ms)


def split(window: Span, activities: ActivitySpans) -> Shares:
    """Split a stretch of a process's time into its parts."""
    parts = parts_of(window, activities)
    return Shares(
        **{f"{name}_ns": length_ns(spans) for name, spans in parts.items()},
        overlapped_ns=length_ns(common(parts["compute"], within(activities.collective, window))),
    )


def parts_of(window: Span, activities: ActivitySpans) -> dict[str, Spans]:
    """Compute the times of each part of `split`; they are disjoint and cover the window."""
    compute, moving, waiting = (
        within(spans, window) for spans in (activities.compute, activities.moving, activities.waiting)
    )
    exposed = without(within(activities.collective, window), compute)
    idle = without(without([window], compute), exposed)
    return {
        "compute": compute,
        "communication": common(exposed, moving),
        "imbalance": without(exposed, moving),
        "input": common(idle, waiting),
        "launch": without(idle, waiting),
    }


def activities_of(traces: Sequence[Trace]) -> list[ActivitySpans]:
    """Compute the activities of each process.

    Raises:
        TrainError: The processes ran other collectives.
    """
    return [
        ActivitySpans(
            compute=union(work.span for work in trace.work if work.kind == "compute"),
            collective=union(work.span for work in trace.work if work.kind == "collective"),
            moving=moving,
            waiting=union([*trace.waits, *(work.span for work in trace.work if work.kind == "copy")]),
        )
        for trace, moving in zip(traces, moving_of(traces), strict=True)
    ]


def moving_of(traces: Sequence[Trace]) -> list[Spans]:
    """Compute the times at which collectives moved bytes and did not wait, by rank.

    A collective ends on all ranks at about the same time, and moves bytes once the last rank has arrived. That rank's
    kernel is the shortest; the excess of another rank's is waiting, at its beginning. No clocks are compared.

    Raises:
        TrainError: The processes ran other collectives.
    """
    by_name = [_collectives(trace) for trace in traces]
    counts = [{name: len(spans) for name, spans in own.items()} for own in by_name]
    for rank, count in enumerate(counts):
        if count != counts[0]:
            name = next(name for name in {**counts[0], **count} if count.get(name, 0) != counts[0].get(name, 0))
            raise TrainError(
                f"rank {rank} ran {count.get(name, 0)} of the collective {name!r} and rank 0 "
                f"{counts[0].get(name, 0)}; who waited for whom cannot be said. Profile whole steps, the same in all."
            )
    shortest = {
        name: [min(span.length_ns for span in same) for same in zip(*(own[name] for own in by_name), strict=True)]
        for name in (counts[0] if counts else {})
    }
    return [
        union(
            Span(span.end_ns - least_ns, span.end_ns)
            for name, spans in own.items()
            for span, least_ns in zip(spans, shortest[name], strict=True)
        )
        for own in by_name
    ]


def summed(shares: Sequence[Shares]) -> Shares:
    """Add up the shares of several steps."""
    return Shares(**{field.name: sum(getattr(share, field.name) for share in shares) for field in fields(Shares)})


def usual_step(trace: Trace) -> int:
    """Find the index of the step of median length."""
    lengths = [step.length_ns for step in trace.steps]
    return lengths.index(median_low(lengths))


def _collectives(trace: Trace) -> Mapping[str, list[Span]]:
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for work in sorted(trace.work, key=lambda work: work.span):
        if work.kind == "collective":
            found[work.name].append(work.span)
    return found


def _row(name: str, shares: Shares, steps: int) -> list[str]:
    whole = max(shares.wall_ns, 1)
    cells = [
        f"{part / MS / steps:.2f} ms {part / whole:4.0%}" for part in (*shares.parts.values(), shares.overlapped_ns)
    ]
    return [name, f"{shares.wall_ns / MS / steps:.2f} ms", *cells]

"""Reader of torch's profiler traces: the time of each kernel, and the step that launched it.

It reads the profiler's Chrome trace file, so that the breakdown counts what the trace viewer shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from penstock.core.errors import TrainError
from penstock.kernels.peer_memory import KERNELS
from penstock.train.profile.intervals import Span, Spans, union, without
from penstock.train.profile.step_time import Trace, Work

# Marks of a profiled run. Time between steps (a validation, for example) belongs to no step.
BATCH, STEP, ASIDE = "penstock: batch", "penstock: step", "penstock: aside"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
# As NCCL names its kernels, gloo its operations, and torch those that begin either on a CPU; and as ours are named.
_COLLECTIVE = ("nccl", "gloo:", "c10d::", *KERNELS)
NAME_LENGTH = 80

Event = Mapping[str, Any]


def read_trace(written: Mapping[str, Any], rank: int, *, on_gpu: bool, before: int = 0) -> Trace:
    """Read the device's operations in the marked steps of a trace.

    On a GPU these are kernels and copies, assigned to the step that launched them, because the device runs behind the
    host. On a CPU they are torch's operations.

    Args:
        written: The parsed trace file.
        rank: The rank of the process.
        on_gpu: True if it computes on a GPU.
        before: The number of marked steps to skip; at least one if there is a step before them.

    Raises:
        TrainError: The trace is not of a profiled run, or has no operations in a step.
    """
    events = [event for event in written.get("traceEvents", ()) if event.get("ph") == "X"]
    marks = {name: _marked(events, name) for name in (BATCH, STEP, ASIDE)}
    launched = _on_gpu(events) if on_gpu else _on_cpu(events, marks[BATCH] + marks[ASIDE])
    ends_ns = _ends_ns(marks[STEP], launched)
    steps = [Span(_begin_ns(ends_ns, index, marks), ends_ns[index]) for index in range(before, len(ends_ns))]
    return Trace(rank=rank, steps=tuple(steps), work=tuple(work for work, _ in launched), waits=tuple(marks[BATCH]))


def _begin_ns(ends_ns: Sequence[int], index: int, marks: Mapping[str, Sequence[Span]]) -> int:
    """Compute a step's start: the end of the one before, or of a pause between them."""
    started_ns = marks[STEP][index].start_ns
    asides_ns = [aside.end_ns for aside in marks[ASIDE] if aside.end_ns <= started_ns]
    # The very first one begins with its batch.
    before_ns = ends_ns[index - 1] if index else min(span.start_ns for span in (*marks[BATCH], *marks[STEP]))
    return max([before_ns, *asides_ns])


def _ends_ns(steps: Sequence[Span], launched: Sequence[tuple[Work, int]]) -> list[int]:
    """Compute the end of each step on the device."""
    last = [0] * len(steps)
    index = 0
    for work, launched_ns in sorted(launched, key=lambda one: one[1]):
        while index < len(steps) and steps[index].end_ns < launched_ns:
            index += 1
        if index < len(steps) and steps[index].start_ns <= launched_ns:
            last[index] = max(last[index], work.span.end_ns)
    if not last or not all(last):
        raise TrainError(
            f"the trace has {len(steps)} marked steps, of which {last.count(0)} did nothing that it knows of; profile "
            f"a run with 'penstock train --profile', where torch's profiler can see into the device. With "
            f"KINETO_LOG_LEVEL=1 in the environment it says what it cannot."
        )
    # A step's last kernel may end before another stream's of the step before.
    return [max(last[: index + 1]) for index in range(len(last))]


def _on_gpu(events: Sequence[Event]) -> list[tuple[Work, int]]:
    """Collect GPU operations with their launch times; those of a CUDA graph have the launch time of the graph."""
    launches_ns: dict[int, int] = {
        event["args"]["correlation"]: _span(event).start_ns
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    work: list[tuple[Work, int]] = []
    for event in (event for event in events if event.get("cat") in _ON_GPU):
        args = event.get("args", {})
        lane = f"stream {args.get('stream', event.get('tid'))}"
        # One that was launched before the profiler began is of no marked step.
        work.append((_work(event, lane), launches_ns.get(args.get("correlation"), -1)))
    return work


def _on_cpu(events: Iterable[Event], aside: Sequence[Span]) -> list[tuple[Work, int]]:
    """Collect torch's operations on the CPU, except reading of batches and pauses."""
    lanes: dict[Any, str] = {}
    found: list[Work] = []
    for event in events:
        name, span = event.get("name", ""), _span(event)
        if event.get("cat") != "cpu_op" and not name.startswith(_COLLECTIVE):
            continue
        if not any(other.start_ns <= span.start_ns and span.end_ns <= other.end_ns for other in aside):
            found.append(_work(event, lanes.setdefault(event.get("tid"), f"thread {len(lanes)}")))
    collectives: dict[str, Spans] = {
        lane: union(work.span for work in found if work.kind == "collective" and work.lane == lane)
        for lane in lanes.values()
    }
    # An operation that begins a collective, and waits in it, computes nothing meanwhile.
    pieces = [
        replace(work, span=piece)
        for work in found
        for piece in ([work.span] if work.kind == "collective" else without([work.span], collectives[work.lane]))
    ]
    return [(work, work.span.start_ns) for work in pieces]


def _work(event: Event, lane: str) -> Work:
    name = str(event.get("name", ""))
    kind: Literal["compute", "collective", "copy"] = "compute"
    if any(mark in name.lower() for mark in _COLLECTIVE):
        kind = "collective"
    elif event.get("cat") == "gpu_memcpy" and "HtoD" in name:
        kind = "copy"
    return Work(name=name[:NAME_LENGTH], lane=lane, kind=kind, span=_span(event))


def _marked(events: Iterable[Event], name: str) -> list[Span]:
    marked = (event for event in events if event.get("name") == name and event.get("cat") == "user_annotation")
    return sorted(map(_span, marked))


def _span(event: Event) -> Span:
    # Microseconds with three digits behind the point.
    start_ns = round(event["ts"] * 1000)
    return Span(start_ns, start_ns + round(event["dur"] * 1000))

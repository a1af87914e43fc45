"""Timeline of one training step: the streams of each process, and the parts of the step time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.train.profile.intervals import Span, Spans, union, within
from penstock.train.profile.step_time import PARTS, ActivitySpans, Trace, activities_of, parts_of, split, usual_step

COLOURS = {
    "compute": "#00897b",
    "communication": "#f57c00",
    "imbalance": "#ffcc80",
    "input": "#8e24aa",
    "launch": "#cfd8dc",
}
OF_KIND = {"compute": "#4db6ac", "collective": "#ffa726", "copy": "#ba68c8"}
STREAMS_SHOWN = 4
PROCESSES_SHOWN = 16
# Share of the picture's width; kernels closer than that are drawn as one.
FINEST = 1 / 3000

# A lane's name, the spans of each activity, and their colours.
Row = tuple[str, Mapping[str, Spans], Mapping[str, str]]
BAR = 0.8


def draw_timeline(traces: Sequence[Trace], file: Path) -> Path:
    """Draw one step, that of median length.

    Each process has a row of its parts of the step time, and one for each of its streams. Processes are aligned at the
    end of their last collective.

    Args:
        traces: The traces of all processes, in the order of their ranks.
        file: SVG or PNG, by its suffix.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    step, activities = usual_step(traces[0]), activities_of(traces)
    rows = _rows(traces, activities, step)
    figure = Figure(figsize=(11, 1.4 + 0.3 * len(rows)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    first_ns = min(span.start_ns for _, row, _ in rows for spans in row.values() for span in spans)
    for at, (_, row, colours) in enumerate(rows):
        for name, spans in row.items():
            bars = [((span.start_ns - first_ns) / 1e6, span.length_ns / 1e6) for span in spans]
            axes.broken_barh(bars, (at - BAR / 2, BAR), facecolors=colours[name], linewidth=0)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("ms")
    shares = split(traces[0].steps[step], activities[0])
    shown = [Patch(color=COLOURS[name], label=f"{name} {shares.parts[name] / 1e6:.2f} ms") for name in PARTS]
    figure.legend(handles=shown, loc="outside upper center", ncols=len(shown), fontsize=8, title="one step of rank 0")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    return file


def _rows(traces: Sequence[Trace], all_activities: Sequence[ActivitySpans], step: int) -> list[Row]:
    """The lanes from top to bottom."""
    rows: list[Row] = []
    width_ns = max(trace.steps[step].length_ns for trace in traces)
    for trace, activities in list(zip(traces, all_activities, strict=True))[:PROCESSES_SHOWN]:
        window = trace.steps[step]
        zero_ns = _last_end_ns(trace, window)
        rows.append((f"rank {trace.rank}", _moved(parts_of(window, activities), zero_ns, width_ns), COLOURS))
        for lane, work in _lanes(trace, window)[:STREAMS_SHOWN]:
            rows.append((lane, _moved(work, zero_ns, width_ns), OF_KIND))
    return rows


def _lanes(trace: Trace, window: Span) -> list[tuple[str, dict[str, Spans]]]:
    """Collect the operations of each stream in a step, the busiest first."""
    by_lane: dict[str, dict[str, list[Span]]] = {}
    for work in trace.work:
        if work.span.end_ns > window.start_ns and work.span.start_ns < window.end_ns:
            by_lane.setdefault(work.lane, {}).setdefault(work.kind, []).append(work.span)
    lanes = {
        lane: {kind: within(union(spans), window) for kind, spans in work.items()} for lane, work in by_lane.items()
    }
    return sorted(lanes.items(), key=lambda lane: -sum(span.length_ns for spans in lane[1].values() for span in spans))


def _last_end_ns(trace: Trace, window: Span) -> int:
    """Find the common instant of all processes: the end of the last collective, or the start of the step."""
    ends_ns = [
        work.span.end_ns
        for work in trace.work
        if work.kind == "collective" and window.start_ns < work.span.end_ns <= window.end_ns
    ]
    return max(ends_ns, default=window.start_ns)


def _moved(lanes: Mapping[str, Spans], zero_ns: int, width_ns: int) -> dict[str, Spans]:
    """Shift spans to a common clock, and merge those too close to tell apart."""
    near_ns = max(int(width_ns * FINEST) - 1, 0)
    widened = {
        name: union(Span(start_ns, end_ns + near_ns) for start_ns, end_ns in spans) for name, spans in lanes.items()
    }
    return {
        name: [Span(start_ns - zero_ns, end_ns - near_ns - zero_ns) for start_ns, end_ns in spans]
        for name, spans in widened.items()
    }

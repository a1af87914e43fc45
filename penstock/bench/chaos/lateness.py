"""Lateness past the budget beside faults, and without them on the same server, on the same machine, in the same run.

The speed of a core of a shared machine changes from second to second, by a third and more, with neighbours that no
process sees. A control process that sleeps does not notice that; a server that computes does. So times with faults and
times without alternate, and the worst lateness of the ones is judged by that of the others. Where the server is late
without faults, the load was more than it carried at that time, and the pair is left out.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.bench.chaos.chaos_history import Event, QuietTime, RequestEnd
from penstock.bench.chaos.control_process import Control
from penstock.core.errors import BenchError

# A request that is answered within this share of the budget shows that none have piled up before it.
DRAINED_SHARE = 0.2
# A server that is later than this without faults carries less than the load.
ALLOWED_MS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lateness:
    """Worst lateness of some requests.

    Args:
        over_ms: The worst lateness past the budget in milliseconds, less what the control processes woke late.
        requests: How many requests were due.
        late: How many of them were answered past the budget.
        event: The fault before the worst; None if there is none.
    """

    over_ms: float = 0.0
    requests: int = 0
    late: int = 0
    event: Event | None = None

    def joined(self, other: "Lateness") -> "Lateness":
        """Return the worst lateness of both."""
        worst = max(self, other, key=lambda each: each.over_ms)
        return Lateness(
            over_ms=worst.over_ms,
            requests=self.requests + other.requests,
            late=self.late + other.late,
            event=worst.event,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The lateness of the pairs of times with and without faults.

    Args:
        beside: That beside faults.
        without: That of the times without.
        left_out: How many pairs say nothing about faults: the server was late without any, so it carries less than
            the load. They are in neither.
        beside_left_out: Their lateness beside faults.
        spans: Begin and end of the times without faults of all pairs.
    """

    beside: Lateness
    without: Lateness
    left_out: int
    beside_left_out: Lateness
    spans: list[tuple[float, float]]


def lateness(
    answers: Iterable[RequestEnd],
    times: Iterable[QuietTime],
    events: Sequence[Event],
    budget_s: float,
    controls: Sequence[Control],
) -> Judged:
    """Judge each pair of times: a request that was due in it counts beside faults or without.

    Args:
        answers: All answers.
        times: The times without faults.
        events: The faults.
        budget_s: The server's latency budget.
        controls: Processes that slept and woke meanwhile, on the cores of the server and of the clients.
    """
    ordered = sorted(answers, key=_due_s)
    judged = Judged(beside=Lateness(), without=Lateness(), left_out=0, beside_left_out=Lateness(), spans=[])
    for quiet in times:
        begin, end = (bisect_left(ordered, at_s, key=_due_s) for at_s in (quiet.pair_begin_s, quiet.pair_end_s))
        pair = ordered[begin:end]
        span = drained(pair, quiet, budget_s)
        # No fault is named for the lateness without any.
        without = _worst([one for one in pair if is_within(span, one.due_s)], budget_s, controls, ())
        beside = _worst([one for one in pair if not is_within(span, one.due_s)], budget_s, controls, events)
        spans = [*judged.spans, *span]
        if without.over_ms > ALLOWED_MS:
            left_out = judged.beside_left_out.joined(beside)
            judged = replace(judged, left_out=judged.left_out + 1, beside_left_out=left_out, spans=spans)
        else:
            beside, without = judged.beside.joined(beside), judged.without.joined(without)
            judged = replace(judged, beside=beside, without=without, spans=spans)
    return judged


def is_within(spans: Sequence[tuple[float, float]], at_s: float) -> bool:
    """Return whether a moment is in one of some times, which are in order."""
    at = bisect_right(spans, (at_s, math.inf)) - 1
    return at >= 0 and at_s < spans[at][1]


def drained(answers: Iterable[RequestEnd], quiet: QuietTime, budget_s: float) -> list[tuple[float, float]]:
    """Let a time without faults begin when what has piled up before it is served: the faults are blamed for that.

    Args:
        answers: The answers of the pair, as they were due.
        quiet: The time.
        budget_s: The latency budget.

    Returns:
        Begin and end of it; nothing if it ended before that.
    """
    if not quiet.after_faults:
        return [(quiet.begin_s, quiet.end_s)]
    for answer in answers:
        in_time = answer.ended_s - answer.due_s <= DRAINED_SHARE * budget_s
        if quiet.begin_s <= answer.due_s < quiet.end_s and in_time and answer.status == 200:
            return [(answer.due_s, quiet.end_s)]
    return []


def _due_s(answer: RequestEnd) -> float:
    return answer.due_s


def sustained_rate(ended_s: Iterable[float], begin_s: float, seconds: int) -> tuple[float, float]:
    """Return the lowest number of answers in one of some seconds, and their mean.

    Args:
        ended_s: When each was answered.
        begin_s: When the first second begins.
        seconds: How many.

    Raises:
        BenchError: There is a second without an answer.
    """
    counts = [0] * seconds
    for each in ended_s:
        if begin_s <= each < begin_s + seconds:
            counts[int(each - begin_s)] += 1
    if not all(counts):
        raise BenchError(f"the server did not answer for a second: {counts} answers in {seconds} s, one after another.")
    return float(min(counts)), sum(counts) / seconds


def _worst(
    answers: Sequence[RequestEnd], budget_s: float, controls: Sequence[Control], events: Sequence[Event]
) -> Lateness:
    over_s, worst, late = 0.0, None, 0
    for answer in answers:
        late_s = answer.ended_s - answer.due_s - budget_s
        if late_s <= 0 or answer.end != "answer" or answer.status != 200:
            continue
        late += 1
        if late_s <= over_s:
            continue
        late_s -= sum(each.worst_s(answer.due_s, answer.ended_s) for each in controls)
        if late_s > over_s:
            over_s, worst = late_s, answer
    before = [] if worst is None else [event for event in events if event.begun_s <= worst.ended_s]
    event = before[-1] if before else None
    return Lateness(over_ms=over_s * 1e3, requests=len(answers), late=late, event=event)

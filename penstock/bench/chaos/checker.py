"""A check of a whole history, as Jepsen does it: a pure function that finds every violation.

A version of a model may answer a request if some moment between sending and answer lies in the version's time: from
when its load was sent to when the load of the next version, or the unload, was answered. A load that was not answered
may have succeeded at any time; one that was refused has not. What lies on the disk is not admitted by that.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.bench.chaos.chaos_history import ChaosHistory, Event, Operation, Readiness, RequestEnd
from penstock.bench.chaos.numbered_input import doubles_of

MIXED, WRONG, NOT_ADMITTED = "mixture", "wrong answer", "version not admitted"
LOST, TWICE, HUNG, STUCK = "lost", "answered twice", "hung", "stuck operation"
FALSE_READY, NOT_BACK, UNACCOUNTED = "ready but 404", "not back", "not accounted for"
# A connection that a killed process held ends within this time of the kill.
RESET_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One violation.

    Args:
        kind: What was violated.
        at_s: When.
        text: What was seen, in one sentence.
    """

    kind: str
    at_s: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """The time in which a version may answer: from `begin_s`, and at the latest to `end_s`.

    It is sure, so that the model must not be missing, from `sure_s` to `unsure_s`.
    """

    version: int
    begin_s: float
    sure_s: float
    end_s: float
    unsure_s: float


def check(history: ChaosHistory) -> list[Violation]:
    """Find every violation of a history, in the order of time."""
    spans = {model: spans_of(history, model) for model in _models(history)}
    found = [*_answers(history, spans), *_twice(history), *_lost(history), *_stuck(history)]
    found += [*_false_readiness(history, spans), *_not_back(history)]
    return sorted(found, key=lambda violation: violation.at_s)


def spans_of(history: ChaosHistory, model: str) -> list[VersionSpan]:
    """Return the versions of a model and the time of each."""
    open_spans: list[VersionSpan] = []
    done: list[VersionSpan] = []
    if model in history.started:
        open_spans = [_span(history.started[model], -math.inf, -math.inf)]
    for operation in sorted((one for one in history.operations if one.model == model), key=lambda one: one.sent_s):
        known = operation.status == 200
        if not known and operation.status != 0:
            continue
        if known:
            done += [_ended(span, operation.ended_s, operation.sent_s) for span in open_spans]
            open_spans = []
        else:
            open_spans = [_ended(span, span.end_s, operation.sent_s) for span in open_spans]
        if operation.kind == "load":
            open_spans.append(_span(operation.version, operation.sent_s, operation.ended_s if known else math.inf))
    return done + open_spans


def recoveries(history: ChaosHistory, failed: list[RequestEnd]) -> list[tuple[Event, float]]:
    """Return for each fault the seconds from its end to the last request, before the next fault, that failed.

    Args:
        history: The history.
        failed: Its `failures`.
    """
    bad_s = sorted(answer.due_s for answer in failed)
    found: list[tuple[Event, float]] = []
    events = sorted((event for event in history.events if not event.skipped), key=lambda event: event.begun_s)
    for event, next_s in zip(events, [*(event.begun_s for event in events[1:]), math.inf], strict=False):
        at = bisect_right(bad_s, next_s) - 1
        last_s = bad_s[at] if at >= 0 and bad_s[at] >= event.begun_s else event.begun_s
        found.append((event, max(0.0, last_s - event.over_s)))
    return found


def _span(version: int, begin_s: float, sure_s: float) -> VersionSpan:
    return VersionSpan(version=version, begin_s=begin_s, sure_s=sure_s, end_s=math.inf, unsure_s=math.inf)


def _ended(span: VersionSpan, end_s: float, unsure_s: float) -> VersionSpan:
    return VersionSpan(
        version=span.version,
        begin_s=span.begin_s,
        sure_s=span.sure_s,
        end_s=end_s,
        unsure_s=min(unsure_s, span.unsure_s),
    )


def _models(history: ChaosHistory) -> set[str]:
    return {*history.started, *(one.model for one in history.operations), *(one.model for one in history.answers)}


def _covers(spans: list[VersionSpan]) -> list[tuple[float, float]]:
    """Return from when to when each version must be there, in the order of the loads."""
    # A replacement leaves no gap: the old version answers until the new one does.
    return [
        (span.sure_s, span.end_s if _is_replaced(span, spans) else span.unsure_s)
        for span in sorted(spans, key=lambda each: each.begin_s)
    ]


def _surely_loaded(covers: list[tuple[float, float]], begin_s: float, end_s: float) -> bool:
    """True if the model must be there during the whole time, as one version or as one that replaces another."""
    at_s = begin_s
    for from_s, to_s in covers:
        if from_s <= at_s < to_s:
            at_s = to_s
        if at_s > end_s:
            return True
    return False


def _is_replaced(span: VersionSpan, spans: list[VersionSpan]) -> bool:
    return any(other.begin_s == span.unsure_s and other.sure_s == span.end_s for other in spans if other is not span)


def _answers(history: ChaosHistory, spans: dict[str, list[VersionSpan]]) -> Iterator[Violation]:
    for answer in history.answers:
        if answer.end != "answer" or answer.status != 200:
            continue
        said = f"request {answer.number} to {answer.model}"
        if answer.weights != answer.source:
            text = f"{said}: weights of version {answer.weights} and sources of version {answer.source}"
            yield Violation(kind=MIXED, at_s=answer.ended_s, text=text)
        elif not any(
            span.version == answer.weights and span.begin_s <= answer.ended_s and answer.sent_s <= span.end_s
            for span in spans[answer.model]
        ):
            text = f"{said}: answered by version {answer.weights}, which was not admitted then"
            yield Violation(kind=NOT_ADMITTED, at_s=answer.ended_s, text=text)
        if answer.doubles != doubles_of(answer.number):
            text = f"{said}: {list(answer.doubles)} instead of {list(doubles_of(answer.number))}"
            yield Violation(kind=WRONG, at_s=answer.ended_s, text=text)


def _twice(history: ChaosHistory) -> Iterator[Violation]:
    ends: dict[int, int] = defaultdict(int)
    for answer in history.answers:
        if answer.end == "unasked":
            text = f"bytes after the answer to request {answer.number} on port {answer.port}"
            yield Violation(kind=TWICE, at_s=answer.ended_s, text=text)
            continue
        ends[answer.number] += 1
        if ends[answer.number] == 2:
            yield Violation(kind=TWICE, at_s=answer.ended_s, text=f"request {answer.number} ended twice")
    missing = sorted(set(range(max(ends, default=-1) + 1)) - ends.keys())
    if missing:
        text = f"{len(missing)} requests have no end in the history, the first is {missing[0]}"
        yield Violation(kind=UNACCOUNTED, at_s=history.over_s, text=text)


def excused(answer: RequestEnd, events: list[Event]) -> bool:
    """True if a connection that ended was held by a front-end that was killed just before.

    Held: the front-end's own table of descriptors had the accepted connection when it was stopped for the kill. One
    that waited unaccepted in a listener's queue was not held by it.
    """
    return any(
        answer.port in event.ports and event.begun_s <= answer.ended_s <= event.over_s + RESET_S for event in events
    )


def _lost(history: ChaosHistory) -> Iterator[Violation]:
    for answer in history.answers:
        if answer.end == "reset" and not excused(answer, history.events):
            text = f"request {answer.number} to {answer.model}: port {answer.port} ended without an answer"
            yield Violation(kind=LOST, at_s=answer.ended_s, text=text)
        elif answer.end == "hung" and not excused(answer, history.events):
            seconds = answer.ended_s - answer.sent_s
            text = f"request {answer.number} to {answer.model}: no answer in {seconds:.1f} s"
            yield Violation(kind=HUNG, at_s=answer.ended_s, text=text)


def _stuck(history: ChaosHistory) -> Iterator[Violation]:
    for one in history.operations:
        if one.status == 0:
            text = f"{one.kind} of {one.model} was not answered in {one.ended_s - one.sent_s:.1f} s"
            yield Violation(kind=STUCK, at_s=one.ended_s, text=text)


def _false_readiness(history: ChaosHistory, spans: dict[str, list[VersionSpan]]) -> Iterator[Violation]:
    looks: dict[str, list[Readiness]] = defaultdict(list)
    for look in sorted(history.readiness, key=lambda each: each.ended_s):
        looks[look.model].append(look)
    covers = {model: _covers(own) for model, own in spans.items()}
    for answer in history.answers:
        if answer.end != "answer" or answer.status != 404:
            continue
        if not _surely_loaded(covers[answer.model], answer.sent_s, answer.ended_s):
            continue
        true = _said_ready(looks[answer.model], answer) or (
            answer.model in history.started and not _unloaded(history, answer.model) and _said_ready(looks[""], answer)
        )
        if true:
            text = f"request {answer.number} to {answer.model}: 404 while readiness was true"
            yield Violation(kind=FALSE_READY, at_s=answer.ended_s, text=text)


def _said_ready(looks: list[Readiness], answer: RequestEnd) -> bool:
    """True if readiness was true while the request was under way, or at the last look before it."""
    during = [look for look in looks if look.ended_s >= answer.sent_s and look.sent_s <= answer.ended_s]
    before = [look for look in looks if look.ended_s < answer.sent_s]
    return any(look.ready for look in during) or bool(before and before[-1].ready and not during)


def _unloaded(history: ChaosHistory, model: str) -> bool:
    return any(one.model == model and one.kind == "unload" for one in history.operations)


def failures(history: ChaosHistory) -> list[RequestEnd]:
    """Requests to a loaded model that were not answered with 200."""
    # Computed once: a history can hold a million answers.
    covers = {model: _covers(spans_of(history, model)) for model in _models(history)}
    return [
        answer
        for answer in history.answers
        if answer.end != "unasked"
        and (answer.end != "answer" or answer.status != 200)
        and _surely_loaded(covers[answer.model], answer.sent_s, answer.ended_s)
    ]


def _not_back(history: ChaosHistory) -> Iterator[Violation]:
    """The last requests of the history must be answered: else the server never came back from the last fault."""
    last_s = max((answer.due_s for answer in history.answers), default=history.began_s)
    tail = [answer for answer in failures(history) if answer.due_s >= last_s - 0.2]
    good = [a for a in history.answers if a.end == "answer" and a.status == 200 and a.due_s >= last_s - 0.2]
    if tail and not good:
        text = f"the last {len(tail)} requests failed; the last with status {tail[-1].status}"
        yield Violation(kind=NOT_BACK, at_s=tail[-1].ended_s, text=text)


def operation_seconds(operations: list[Operation]) -> float:
    """Return the longest answered operation in seconds; 0 without one."""
    return max((one.ended_s - one.sent_s for one in operations if one.status), default=0.0)

"""The history of a run: what was asked and answered, what was done to the server, and when, in monotonic seconds."""

from dataclasses import dataclass, field
from typing import Literal

# How a request ended, from the client's side.
End = Literal["answer", "reset", "hung", "unsent", "unasked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestEnd:
    """One request, and how it ended.

    Args:
        number: The request's number in the run; its input is made of it.
        model: The model that was asked.
        due_s: When it was due.
        sent_s: When it was sent.
        ended_s: When it was answered or given up.
        end: `answer`; `reset`: the connection ended without a whole answer; `hung`: neither within the limit;
            `unsent`: no connection was free or could be opened within the limit, so that the server never had it;
            `unasked`: bytes came on a connection without a request, such as a second answer.
        status: The status; 0 without an answer.
        port: The client's port.
        doubles: The first output for an answer of 200, which shows the input.
        weights: The version that the network says.
        source: The version that the application's code says.
        opened_s: When its connection was opened.
        sentence: The beginning of the body of an answer other than 200; the compiled clients keep the first thousand.
    """

    number: int
    model: str
    due_s: float
    sent_s: float
    ended_s: float
    end: End
    status: int = 0
    port: int = 0
    doubles: tuple[float, ...] = ()
    weights: int = 0
    source: int = 0
    opened_s: float = 0.0
    sentence: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """A load or an unload by request.

    Args:
        model: The model.
        kind: `load` or `unload`.
        version: The version on the disk when it was asked for; 0 for a damaged bundle, which must never answer.
        sent_s: When it was sent.
        ended_s: When it was answered or given up.
        status: The status; 0 if it was not answered within the limit.
    """

    model: str
    kind: Literal["load", "unload"]
    version: int
    sent_s: float
    ended_s: float
    status: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One fault.

    Args:
        number: Its number in the run.
        kind: Its kind.
        detail: What it was done to.
        begun_s: When it began.
        over_s: When the fault itself was over: a stopped process went on, or its watchdog's time had passed.
        ports: Client ports of the connections that a killed front-end had accepted.
        skipped: Why it could not be done; empty if it was.
    """

    number: int
    kind: str
    detail: str
    begun_s: float
    over_s: float
    ports: frozenset[int] = frozenset()
    skipped: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """One look at `/v2/models/MODEL/ready`, or for the model "" at `/v2/health/ready`."""

    model: str
    sent_s: float
    ended_s: float
    ready: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class QuietTime:
    """A time without faults, and the pair of times to which it belongs.

    Args:
        begin_s: Its begin.
        end_s: Its end.
        after_faults: Whether it follows the faults of the pair, so that what has piled up in it may be theirs.
        pair_begin_s: Begin of the pair: of this time, or of that of the faults.
        pair_end_s: End of the pair.
    """

    begin_s: float
    end_s: float
    after_faults: bool
    pair_begin_s: float
    pair_end_s: float


@dataclass(kw_only=True, slots=True)
class ChaosHistory:
    """Everything that was seen of one server.

    Args:
        started: The versions that it served when it was first ready, by model.
        began_s: When that was.
        over_s: When the last request was due; the server was ended later.
        load_s: How long a load takes in a new process when nothing is wrong.
        answers: All requests.
        operations: All loads and unloads.
        events: All faults.
        readiness: All looks at readiness.
        quiet: The times without faults, each after the server had settled.
    """

    started: dict[str, int]
    began_s: float
    over_s: float
    load_s: float
    answers: list[RequestEnd] = field(default_factory=list[RequestEnd])
    operations: list[Operation] = field(default_factory=list[Operation])
    events: list[Event] = field(default_factory=list[Event])
    readiness: list[Readiness] = field(default_factory=list[Readiness])
    quiet: list[QuietTime] = field(default_factory=list[QuietTime])

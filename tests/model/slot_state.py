"""The sizes and rules of the slot protocol, and a state of it."""

from dataclasses import dataclass
from typing import Any, final

PRODUCED, BUSY, CONSUMED = "produced", "busy", "consumed"
EXPIRED = "expired"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules of the protocol. Each field but the sizes can be broken, to see that an invariant notices."""

    slots: int = 1
    chunks: int = 1
    streams: int = 2
    stream_chunks: int = 1
    cancels: int = 0
    extra_steps: int = 0
    expiries: int = 0
    frontend_kills: int = 0
    engine_kills: int = 0
    # Whether the rows of a killed engine are submitted to the next one, as to another replica.
    second_tries: bool = False

    publish_order: tuple[str, ...] = (PRODUCED, BUSY, CONSUMED)
    rings_after_counters: bool = True
    input_before_submitted: bool = True
    output_before_produced: bool = True
    last_reads: tuple[str, ...] = ("submitted", CONSUMED, BUSY, PRODUCED)
    releases_only_idle: bool = True
    clears_new_generation: bool = True
    room_counts_busy: bool = True
    waits_for_room_of_results: bool = True
    wakes_after_submitted: bool = True
    wakes_after_full_results: bool = True
    wakes_after_takeover: bool = True
    takeover_frees_only_idle: bool = True
    takeover_drops_results: bool = True
    new_table_after_engine: bool = True
    frees_after_publication: bool = True
    retries_unanswered_only: bool = True
    retries_once: bool = True


@final
class State:
    """The table, both sides' own variables, and what clients have seen."""

    __slots__ = (
        "asleep",
        "budget",
        "busy",
        "cancelled",
        "consumed",
        "count",
        "done",
        "engine",
        "engine_alive",
        "engine_gen",
        "engine_state",
        "free",
        "frontend",
        "frontend_alive",
        "gen",
        "handles",
        "held_back",
        "input",
        "output",
        "produced",
        "settling",
        "streams",
        "submitted",
        "taken",
        "tries",
        "visible",
        "wakes",
    )

    def __init__(self, rules: Rules) -> None:
        slots = rules.slots
        self.empty_table(rules)
        self.engine: tuple[Any, ...] = ()
        self.engine_alive = self.frontend_alive = True
        # Whether the engine rests, and whether the eventfd wakes it.
        self.asleep = self.wakes = False
        self.frontend: tuple[Any, ...] = ()
        # Of each slot: None, or (stream, ended, dropped).
        self.handles: list[Any] = [None] * slots
        self.free: list[int] = list(range(slots))[::-1]
        # What becomes free after a front-end was killed, until no result for it is being published.
        self.held_back: list[int] = []
        self.settling = False
        # Of each stream: chunks put in, the last token seen, whether it ended for its client, whether its owner lives.
        self.streams: list[tuple[int, Any, bool, bool]] = []
        # How often each stream was put into a table, where there are second tries.
        self.tries: list[int] = []
        self.budget = [
            rules.streams,
            rules.cancels,
            rules.extra_steps,
            rules.expiries,
            rules.frontend_kills,
            rules.engine_kills,
        ]

    def empty_table(self, rules: Rules) -> None:
        """Make the table of a new engine."""
        slots = rules.slots
        self.submitted, self.taken = [0] * slots, [0] * slots
        self.consumed, self.produced, self.busy = [0] * slots, [0] * slots, [0] * slots
        self.gen, self.cancelled = [0] * slots, [0] * slots
        self.input: list[Any] = [None] * slots * rules.chunks
        self.output: list[Any] = [None] * slots * rules.chunks
        # Entries that the front-end has not read, of which the first are visible.
        self.done: list[tuple[int, int]] = []
        self.visible = self.count = 0
        self.engine_gen = [0] * slots
        # The stream whose state each slot has, and the last token of its step.
        self.engine_state: list[Any] = [None] * slots

    def copy(self) -> "State":
        """Copy it, lists included."""
        made = State.__new__(State)
        for name in State.__slots__:
            value = getattr(self, name)
            setattr(made, name, value[:] if type(value) is list else value)
        return made

    def key(self) -> tuple[Any, ...]:
        """Return what makes it itself."""
        values = (getattr(self, name) for name in State.__slots__)
        return tuple([tuple(value) if type(value) is list else value for value in values])

"""The sizes and rules of the supervisor's state machine, and a state of it with its processes and their queues."""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

# Processes.
ENGINE, FRONTENDS = 0, (1, 2)
# A killed process is DEAD until the supervisor notices, and then OFF until it is started again.
OFF, UP, HUNG, DEAD = "off", "up", "hung", "dead"
# States of the served model; RESTARTING is LOADING with that reason. After WITHDRAWN it has none.
LOADING, RESTARTING, READY, UNLOADING, UNAVAILABLE = "loading", "restarting", "ready", "unloading", "unavailable"
WITHDRAWN = "withdrawn"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Sizes, which bound what comes from outside, and rules, which can be broken to see that an invariant notices."""

    boot: bool = False
    loads: int = 0
    unloads: int = 0
    engine_kills: int = 0
    frontend_kills: int = 0
    hangs: int = 0
    heartbeats: int = 0
    load_failures: int = 0
    attach_failures: int = 0
    # Loads of which a step takes longer than its deadline.
    late_loads: int = 0
    # Exports for a restarted engine.
    exports: int = 0
    # Steps that exports and loads say.
    steps: int = 0
    # Loads of a model that was removed or damaged since its export.
    find_failures: int = 0
    # Starts for which the machine has no descriptor left.
    start_failures: int = 0
    signals: int = 0

    exit_fails_loads: bool = True
    exit_ends_waits_for_a_front_end: bool = True
    forgets_readiness_at_exit: bool = True
    exit_drops_tables: bool = True
    state_before_drop: bool = True
    restores_after_restart: bool = True
    retries_restore: bool = True
    checks_engine_after_load: bool = True
    checks_table_after_attach: bool = True
    lists_table_before_attach: bool = True
    ready_after_attach: bool = True
    attaches_in_order: bool = True
    gives_name_back: bool = True
    undoes_whatever_fails: bool = True
    unloading_before_retire: bool = True
    retires_replaced: bool = True
    unloads_late_loads: bool = True
    answers_the_same_process: bool = True
    releases_lock_on_failure: bool = True
    watchdog_kills: bool = True
    retries_starts: bool = True
    ends_half_starts: bool = True
    hands_over_when_attached: bool = True
    replaces_acting_front_end: bool = True
    listens_in_order: bool = True
    lost_while_importing: bool = True
    says_not_attached: bool = True
    remembers_refused: bool = True
    looks_again_with_the_lock: bool = True
    says_only_what_is_served: bool = True
    ends_what_was_exported: bool = True
    kills_at_the_end: bool = True


class Task(NamedTuple):
    """A coroutine of the supervisor.

    Args:
        name: What it is, and for a change the front-end, its process, and the token.
        at: Where it waits.
        key: Key of its table.
        waits: Commands without a reply: process, kind, key.
        error: `"lost"` or `"failed"`, as soon as one of them has failed.
        why: The same, of the step before, while what was done is undone.
        starts: Number of the engine's process that loads.
        new: Whether the model was not served before.
    """

    name: tuple[Any, ...]
    at: str = "new"
    key: int = -1
    waits: tuple[tuple[int, str, int], ...] = ()
    error: str = ""
    why: str = ""
    starts: int = 0
    new: bool = False


class Front(NamedTuple):
    """A front-end process.

    Args:
        starting: It has not become ready.
        becoming: It has had `ServerStarted`, and becomes ready.
        listening: It accepts from its own socket.
        accepts: Front-ends whose sockets it accepts from.
        state: State of the model as the supervisor said last.
        not_attached: It could not attach the model that is served.
        refused: Keys of the tables of which that was true.
        tables: Keys of the attached tables.
        served: Key of the table under the model's name.
        lost: Key of that table if its engine is lost.
        importing: Key of the table whose application is imported.
        waiting: Messages that wait for the import.
        gone: Keys of tables that were lost before they were attached.
        retiring: Keys of tables that requests still wait for.
        draining: It has had `Drain`.
        asked: Number of changes that its clients asked for.
        open: Tokens of those without an answer.
    """

    starting: bool = True
    becoming: bool = False
    listening: bool = False
    accepts: tuple[int, ...] = ()
    state: str = ""
    not_attached: bool = False
    refused: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()
    served: int | None = None
    lost: int | None = None
    importing: int | None = None
    waiting: tuple[tuple[Any, ...], ...] = ()
    gone: tuple[int, ...] = ()
    retiring: tuple[int, ...] = ()
    draining: bool = False
    asked: int = 0
    open: tuple[int, ...] = ()

    @property
    def ready(self) -> bool:
        """What `/ready` says, see `ModelRegistry.reject_unready`."""
        return not (self.draining or self.starting or self.not_attached or self.lost is not None) and (
            self.state != RESTARTING
        )

    @property
    def not_found(self) -> bool:
        """Whether a request for a model that is said to be ready gets 404, see `ModelRegistry.named`."""
        return self.state == READY and self.served is None and not self.not_attached


@final
class State:
    """The supervisor, its three processes, and the queues between them."""

    __slots__ = (
        "attached",
        "back",
        "budget",
        "ended",
        "engine_said",
        "engine_tables",
        "fronts",
        "late",
        "life",
        "loading",
        "lock",
        "model",
        "next_key",
        "published",
        "ready",
        "seen",
        "serving",
        "started",
        "starts",
        "stopping",
        "strays",
        "tables",
        "takeovers",
        "tasks",
        "to",
    )

    def __init__(self, rules: Rules) -> None:
        # By process: its life, the number of processes started, and the messages to it and from it.
        self.life = [UP] * 3
        self.starts = [1] * 3
        self.to: list[tuple[Any, ...]] = [(), (("listen",),), (("listen",),)]
        self.back: list[tuple[Any, ...]] = [()] * 3
        # The supervisor. `serving` has a place for the engine, so that processes are its indices.
        self.ready, self.serving = False, [False] * 3
        self.started, self.stopping, self.ended = False, "", ""
        # Key of each table, and the number of the engine's process that made it.
        self.tables: tuple[tuple[int, int], ...] = ()
        self.attached: tuple[int, ...] = ()
        # By process: the front-end that accepts its connections.
        self.takeovers: list[int | None] = [None] * 3
        # The repository: the key of the model's table, None while the engine is lost, and the last key.
        self.model: tuple[int | None, int] | None = None
        self.published, self.next_key = "", 0
        # Names of the task that holds the lock, and of those that wait for it.
        self.lock: tuple[tuple[Any, ...], ...] = (("start",),)
        self.tasks: tuple[Task, ...] = (Task(("start",), at="locked", new=True),)
        # The engine's process: whether it has sent a heartbeat, what it loads, what it loads too slowly, its tables.
        self.engine_said = False
        self.loading: tuple[int, ...] = ()
        self.late: tuple[int, ...] = ()
        self.engine_tables: tuple[int, ...] = ()
        # Engines that run and that the supervisor does not know of.
        self.strays = 0
        self.fronts = [Front(), Front(), Front()]
        self.budget = {
            "load": rules.loads,
            "unload": rules.unloads,
            "kill-engine": rules.engine_kills,
            "kill-front-end": rules.frontend_kills,
            "hang": rules.hangs,
            "heartbeat": rules.heartbeats,
            "fail-load": rules.load_failures,
            "fail-attach": rules.attach_failures,
            "late": rules.late_loads,
            "export": rules.exports,
            "step": rules.steps,
            "fail-find": rules.find_failures,
            "fail-start": rules.start_failures,
            "signal": rules.signals,
        }
        # What the supervisor received, sent, started and saw end in the last transition; no part of the state.
        self.seen: list[tuple[Any, ...]] = []
        if not rules.boot:
            self._serve()

    def _serve(self) -> None:
        """Begin with a server that has started, and serves the model from table 0."""
        self.to, self.tasks, self.lock = [()] * 3, (), ()
        self.ready, self.serving, self.started, self.engine_said = True, [True] * 3, True, True
        self.tables, self.attached, self.model, self.engine_tables = ((0, 1),), (0,), (0, 0), (0,)
        self.published, self.next_key = READY, 1
        self.fronts = [Front(starting=False, listening=True, state=READY, tables=(0,), served=0)] * 3

    def copy(self) -> "State":
        """Copy it, lists included."""
        made = State.__new__(State)
        for name in State.__slots__:
            value = getattr(self, name)
            setattr(made, name, value.copy() if type(value) in (list, dict) else value)
        made.seen = []
        return made

    def key(self) -> tuple[Any, ...]:
        """Return what makes it itself."""
        lists = (self.life, self.starts, self.to, self.back, self.serving, self.takeovers, self.fronts)
        supervisor = (self.ready, self.started, self.stopping, self.ended, self.tables, self.attached, self.model)
        tasks = (self.published, self.next_key, self.lock, self.tasks)
        engine = (self.engine_said, self.loading, self.late, self.engine_tables, self.strays)
        return (*map(tuple, lists), tuple(self.budget.values()), *supervisor, *tasks, *engine)

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the tables."""
        return tuple(key for key, _ in self.tables)

"""Settings and outcome of a chaos run."""

from collections import Counter
from dataclasses import dataclass, field

from penstock.bench.chaos.chaos_history import ChaosHistory, Event
from penstock.bench.chaos.checker import Violation
from penstock.bench.chaos.fault_schedule import KINDS
from penstock.bench.chaos.lateness import Lateness
from penstock.core.errors import BenchError


@dataclass(frozen=True, kw_only=True, slots=True)
class ChaosSettings:
    """Settings of a run.

    Args:
        seed: Seed of the faults and the load.
        events: Most faults.
        seconds: No fault begins after this time.
        rate: Requests a second.
        load: Instead: a share of what the server carried in the worst second so far, which is measured before each
            pair of times with and without faults; None for the rate.
        connections: Most connections of the clients.
        frontends: Front-end processes of the server.
        latency_ms: Its latency budget.
        watchdog_s: Its watchdog's time.
        limit_s: An operation that is not answered in this time is stuck.
        kinds: The kinds of faults.
        server_cpus: Cores of the server; None for any.
        client_cpus: Cores of the clients; None for any.
        measure_lateness: Run a control process on the cores of the server and of the clients, and let times without
            faults alternate with those with some.
        from_whole: Each fault waits until every front-end accepts connections, and some time for what has piled up.
    """

    seed: int = 0
    events: int = 1_000_000
    seconds: float = 45.0
    rate: float = 150.0
    load: float | None = None
    connections: int = 32
    frontends: int = 2
    latency_ms: float = 50.0
    watchdog_s: float = 30.0
    limit_s: float = 30.0
    kinds: tuple[str, ...] = KINDS
    server_cpus: frozenset[int] | None = None
    client_cpus: frozenset[int] | None = None
    measure_lateness: bool = False
    from_whole: bool = False

    def __post_init__(self) -> None:
        for name in ("events", "seconds", "rate", "connections", "frontends", "latency_ms", "watchdog_s", "limit_s"):
            if not getattr(self, name) > 0:
                raise BenchError(f"--{name.replace('_', '-')} is {getattr(self, name):g}; it must be above 0.")
        if self.load is not None and not 0 < self.load < 1:
            raise BenchError(f"--load is {self.load:g}; give a share between 0 and 1.")


@dataclass(kw_only=True, slots=True)
class ChaosResult:
    """Outcome of a run.

    Args:
        settings: Its settings.
        histories: The history of each server, without the answers: a new one is started where one does not come back.
        violations: All violations.
        recovery: Each fault and the seconds until no request failed any more, beyond one load.
        requests: All requests.
        rates: The rates at which they were sent, one after another.
        avoidable_5xx: Answers of 500 and more to requests for a model that was surely loaded, beside faults.
        without_faults_5xx: Those in the times without faults.
        paused_5xx: Those in whose time the machine paused: control processes woke late by half of the budget or more.
        restarts: How often a new server had to be started.
        clients_late_s: How late the clients were in taking up a request, the worst 99th percentile of a history.
        others_cores: Mean number of cores that processes beside the run were seen to use, in the worst history. The
            control processes do not see them.
        beside_faults: The worst lateness past the budget beside faults; None if not measured.
        without_faults: That of the times without, in which the server's backlog and postponed work were done.
        pairs: Pairs of times with and without faults.
        late_pairs: Those that are in neither lateness, because the server was late without faults, too.
        left_out: Their lateness beside faults.
        busy: Share of the time without faults in which the server's cores were busy; NaN if not measured.
        failed: All three, in sentences.
    """

    settings: ChaosSettings
    histories: list[ChaosHistory] = field(default_factory=list[ChaosHistory])
    violations: list[Violation] = field(default_factory=list[Violation])
    recovery: list[tuple[Event, float]] = field(default_factory=list[tuple[Event, float]])
    requests: int = 0
    rates: list[float] = field(default_factory=list[float])
    avoidable_5xx: int = 0
    without_faults_5xx: int = 0
    paused_5xx: int = 0
    restarts: int = 0
    clients_late_s: float = 0.0
    others_cores: float = 0.0
    beside_faults: Lateness | None = None
    without_faults: Lateness | None = None
    pairs: int = 0
    late_pairs: int = 0
    left_out: Lateness = field(default_factory=Lateness)
    busy: float = float("nan")
    failed: list[str] = field(default_factory=list[str])

    @property
    def over_budget_ms(self) -> float | None:
        """Worst lateness past the budget, beyond that of the times without faults; None if not measured."""
        if self.beside_faults is None or self.without_faults is None:
            return None
        return max(0.0, self.beside_faults.over_ms - self.without_faults.over_ms)

    @property
    def events(self) -> list[Event]:
        """All faults that were brought about or skipped."""
        return [event for history in self.histories for event in history.events]

    @property
    def worst(self) -> tuple[Event, float] | None:
        """The fault with the longest recovery."""
        return max(self.recovery, key=lambda pair: pair[1], default=None)

    @property
    def counts(self) -> dict[str, int]:
        """The number of violations of each kind that occurred."""
        return dict(Counter(violation.kind for violation in self.violations))

    def events_before(self, violation: Violation) -> int:
        """Return how many faults a schedule must have to reach the violation."""
        return 1 + max((event.number for event in self.events if event.begun_s <= violation.at_s), default=0)

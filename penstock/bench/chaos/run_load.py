"""The load of a chaos run: its clients, and a rate that is a share of what the server carries in its worst second."""

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import final

from penstock.bench.chaos.chaos_history import RequestEnd
from penstock.bench.chaos.chaos_result import ChaosSettings
from penstock.bench.chaos.clients import ClientsJob, ClientsOutcome, RunningClients
from penstock.bench.chaos.compiled_clients import running_clients
from penstock.bench.chaos.lateness import sustained_rate
from penstock.bench.chaos.numbered_input import input_of
from penstock.bench.chaos.subject import GUEST, STEADY, Subject
from penstock.bench.isolation.expensive_inputs import post
from penstock.bench.load.generator import Load, measure
from penstock.bench.load.sender import Target
from penstock.core.errors import BenchError

WARM_UP_S, CLOSED_LOOP_S = 1.0, 2.0
# The rate of an overload, relative to that of a closed loop or of an earlier overload. What piles up is answered at
# its end, which takes half of its time once more.
OVERLOAD = 1.5
# The server carries what it answers in the worst of so many seconds.
SUSTAINED_S = 5
# A p99 of the clients' own lateness with which nothing is measured.
MAX_CLIENTS_LATE_S = 0.005


@final
class RunLoad:
    """The load, for the time of a `with` block.

    Args:
        settings: The settings of the run.
        subject: The server.
        say: Called with a sentence for each rate that was measured.
    """

    def __init__(self, settings: ChaosSettings, subject: Subject, say: Callable[[str], None]) -> None:
        self.rates: list[float] = []
        self._say = say
        self._share = settings.load
        self._overload = 0.0
        # The fewest requests that this server carried in a second of any measurement.
        self._lowest = math.inf
        self._job = ClientsJob(
            host=subject.host,
            port=subject.port,
            models={STEADY: 0.8, GUEST: 0.2},
            rate=settings.rate,
            connections=settings.connections,
            seed=settings.seed,
            cpus=settings.client_cpus,
        )
        self._stack = ExitStack()
        self._clients: RunningClients | None = None
        self._answers: list[RequestEnd] = []
        self._late_s = 0.0

    def __enter__(self) -> "RunLoad":
        try:
            self.adapt()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def adapt(self) -> None:
        """Measure what the server carries, and set the rate to its share of its worst second so far.

        Without a share, the rate stays.

        Raises:
            BenchError: The clients cannot send as much as an overload, or the server does not answer.
        """
        if self._clients is not None and self._share is None:
            return
        self._pause()
        if self._share is not None:
            self._lowest = min(self._lowest, self._carried())
            self._job = replace(self._job, rate=self._share * self._lowest)
            self._say(f"{self._share:.0%} of the worst second so far are {self._job.rate:,.0f} requests a second.")
        self.rates.append(self._job.rate)
        self._clients = self._stack.enter_context(running_clients(self._job))

    def stop(self) -> ClientsOutcome:
        """Send nothing more, wait for the last answers, and return those of the whole run."""
        self._pause()
        return ClientsOutcome(self._answers, self._late_s)

    def _pause(self) -> None:
        if self._clients is None:
            return
        outcome = self._clients.stop()
        self._clients = None
        self._stack.close()
        self._answers += outcome.answers
        self._late_s = max(self._late_s, outcome.late_s)
        numbers = sum(answer.end != "unasked" for answer in outcome.answers)
        # Other arrivals than before, at the numbers that follow.
        self._job = replace(self._job, first=self._job.first + numbers, seed=self._job.seed + 1_000_003)

    def _carried(self) -> float:
        """Return the right answers in the worst of some seconds of an overload.

        A share of a better second would be too much in a worse one, without any fault.
        """
        overload = self._overload or OVERLOAD * self._closed_loop()
        # Clients that open a connection now and then, as those of a run do, are carried at a lower rate.
        with running_clients(replace(self._job, rate=overload)) as clients:
            time.sleep(WARM_UP_S)
            begin_s = time.monotonic()
            time.sleep(SUSTAINED_S)
            outcome = clients.stop()
        check_clients(outcome.late_s)
        right_s = (answer.ended_s for answer in outcome.answers if answer.status == 200)
        lowest, mean = sustained_rate(right_s, begin_s, SUSTAINED_S)
        self._overload = OVERLOAD * mean
        self._say(
            f"The server answers {lowest:,.0f} requests in the worst of {SUSTAINED_S} s, {mean:,.0f} in the mean."
        )
        return lowest

    def _closed_loop(self) -> float:
        target = Target(
            host=self._job.host,
            port=self._job.port,
            requests=(post(f"/v1/apps/{STEADY}", json.dumps(input_of(0)).encode()),),
            answers=None,
            tolerance=0.0,
        )
        load = Load(
            rate=None,
            connections=self._job.connections,
            seconds=CLOSED_LOOP_S,
            cpus=self._job.cpus,
            warm_up_s=WARM_UP_S,
            sender="auto",
        )
        return measure(target, load).answered_a_second


def check_clients(late_s: float) -> None:
    """Raise a BenchError if the clients were late themselves."""
    if late_s > MAX_CLIENTS_LATE_S:
        raise BenchError(f"the clients themselves are {late_s * 1e3:.1f} ms late (p99); give a lower rate.")

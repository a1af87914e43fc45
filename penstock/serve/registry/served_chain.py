"""One served chain in a front-end: requests through its steps, counted for the chain and for its parts."""

from collections.abc import Callable
from typing import Any, final

import numpy as np

from penstock.core.application import Application, reply_of
from penstock.core.bundles.bundle import WEIGHTS
from penstock.core.chains.chain_run import ChainPlan, chain_hash, check_weights
from penstock.core.errors import ApplicationError, InvalidInput, RequestError
from penstock.core.pictures.boxes import Boxes
from penstock.core.source_files.find_application import FoundChain
from penstock.core.spec import Array
from penstock.serve.frontend.function_pool import FunctionPool
from penstock.serve.frontend.held_loop import SlowDecodes
from penstock.serve.registry.chain_request import ChainRun, Observe, RequestTerms, StreamOutput
from penstock.serve.registry.chain_steps import ChainSteps
from penstock.serve.registry.served_model import ServedModel, column_of
from penstock.serve.registry.whole_answer import Ends
from penstock.serve.streams.sequences import Finished
from penstock.serve.streams.stream_balancer import StreamBalancer
from penstock.serve.streams.streams import Streams
from penstock.serve.table import slots
from penstock.serve.table.chain_counts import ChainCounts


@final
class ServedChain:
    """One chain behind the routes; it has what the protocols use of a `ServedModel`.

    Args:
        found: The chain.
        find_part: Finds a served model by name; raises `RequestError` if it is not served.
        counts: Counts of all front-ends.
        index: Index of this front-end.
        budget_ns: Latency budget of a request that names none.
        now_ns: The clock of deadlines.

    Attributes:
        name: The name in requests.
        version: Always `"1"`.
        label: The name in statistics.
        application: The chain as an application; with segments, its live part under the chain's name.
        segments: What feeds the later steps where the first part is live; None where it is not.
        content_hash: Hash of the chain's source and of the bundles of its parts.
        pool: Threads of its functions.
        now_ns: The clock of deadlines.

    Raises:
        ApplicationError: A part is not served, or does not fit.
    """

    version = "1"
    sequences: None = None
    decode_pool: None = None

    def __init__(
        self,
        found: FoundChain,
        find_part: Callable[[str], ServedModel],
        counts: ChainCounts,
        *,
        index: int,
        budget_ns: int,
        now_ns: Callable[[], int],
    ) -> None:
        self.name = self.label = found.chain.name
        self.segments = segments = found.chain.segments
        self.budget_ns = budget_ns
        if segments is not None and segments.budget_ms is not None:
            self.budget_ns = int(segments.budget_ms * 1e6)
        self.pool = FunctionPool(self.name, now_ns)
        self.slow_decodes = SlowDecodes(self.name)
        self.metrics: dict[str, float] = {}
        self.totals = counts
        self._found, self._find_part = found, find_part
        self._requests, self._by_step = counts.requests[index], counts.steps[index]
        self._latency, self._latency_ns = counts.latency[index], counts.latency_ns[index : index + 1]
        self.now_ns = now_ns
        # Of one with segments, the steps that each goes through.
        self._chain = found.chain if segments is None else found.chain.later
        plan, self.content_hash = self._plan()
        self._application = self._declared(plan)
        self.steps = ChainSteps(plan, find_part, self.pool, now_ns)

    @property
    def application(self) -> Application:
        """The chain as an application."""
        return self._application

    @property
    def shows(self) -> Boxes | None:
        """Outputs that are boxes in the picture; None for others."""
        return self._found.chain.shows

    @property
    def streams(self) -> Streams | StreamBalancer | None:
        """The live streams of its first part; None where that is not live.

        Raises:
            Overloaded: The part is not served now.
        """
        return None if self.segments is None else self.steps.served(self._found.chain.steps[0].part_name).streams

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its parts."""
        return self._found.chain.parts

    @property
    def step_names(self) -> list[str]:
        """Names of its steps, without the live one."""
        return [step.name for step in self._chain.steps]

    @property
    def max_rows(self) -> int:
        """Maximum rows of one request."""
        return self.steps.part(next(step for step, name in enumerate(self._part_names()) if name)).max_rows

    @property
    def engine_lost(self) -> bool:
        """True while a part has no engine."""
        return any(part.engine_lost for part in self._served_parts())

    @property
    def takes_raw(self) -> bool:
        """True where a body is decoded to an array of any size, in a thread."""
        return self._chain.takes_raw(self.steps.plan.parts)

    @property
    def tables(self) -> list[slots.SlotTable]:
        """Slot tables of its parts."""
        return [replica.table for part in self._served_parts() for replica in part.replicas]

    @property
    def can_stream(self) -> bool:
        """True if the last part generates and its answer is the chain's."""
        return self.steps.plan.generates

    @property
    def generating_part(self) -> Application | None:
        """The last part, where it generates and its answer is the chain's; None otherwise."""
        plan = self.steps.plan
        return plan.parts[plan.chain.steps[-1].part_name] if plan.generates else None

    def refresh(self) -> None:
        """Take the parts as they are served now.

        Raises:
            ApplicationError: One does not fit any more; the chain stays as it was.
        """
        plan, content_hash = self._plan()
        for name, before in self.steps.plan.parts.items():
            # The chain's functions are written for these specs.
            for side in ("input", "answer"):
                then, now = getattr(before, side), getattr(plan.parts[name], side)
                if now != then:
                    raise ApplicationError(
                        f"Chain {self.name!r} needs {name!r} with the {side} {then.describe()}, and this bundle has "
                        f"{now.describe()}; serve a bundle with the same specs, or restart the server."
                    )
        self._application = self._declared(plan)
        self.steps.plan, self.content_hash = plan, content_hash

    def submit_rows(
        self,
        chunks: Array,
        finished: Finished,
        arrival_ns: int,
        budget_ns: int | None,
        low_priority: bool = False,
        observe: Observe | None = None,
        stream: StreamOutput | None = None,
        every_part: bool = False,
        ends: Ends | None = None,
    ) -> Callable[[], None]:
        """Send chunks `[n, ...]` through the steps; they get one result `[n, ...]` or one error, which is counted.

        Args:
            chunks: The chunks.
            finished: Called with the result or the error.
            arrival_ns: Arrival time of the request.
            budget_ns: Latency budget of the request, or None for the chain's.
            low_priority: Whether it runs after the others.
            observe: Called after each step.
            stream: Takes each output of a last part whose answers take steps.
            every_part: Whether it takes those of the parts before, too.
            ends: Takes why each answer ended, where the last part generates and its answer is the chain's.

        Returns:
            A function that cancels them.

        Raises:
            RequestError: They are rejected.
        """
        self._requests[slots.OFFERED] += 1
        budget_ns = self.budget_ns if budget_ns is None else budget_ns
        self.steps.admit(arrival_ns + budget_ns - self.now_ns(), budget_ns, low_priority)
        spec = self.steps.plan.application.output
        outputs, left, runs = np.zeros((len(chunks), *spec.shape), spec.numpy_dtype), len(chunks), list[ChainRun]()

        def cancel() -> None:
            for run in runs:
                run.cancel()

        def ended(row: int, result: Array | RequestError, step: int) -> None:
            nonlocal left
            if isinstance(result, RequestError):
                left = 0
                cancel()
                self._count_failure(result, step)
                finished(result)
                return
            outputs[row] = result
            left -= 1
            if left == 0:
                self._count_answer(arrival_ns)
                if ends is not None and self.can_stream:
                    ends[:] = [run.ended for run in runs]
                finished(outputs)

        terms = RequestTerms(
            arrival_ns=arrival_ns,
            budget_ns=budget_ns,
            low_priority=low_priority,
            observe=observe,
            stream=stream,
            every_part=every_part,
        )
        for row, chunk in enumerate(chunks):
            run = ChainRun(self.steps, terms, lambda result, step, row=row: ended(row, result, step))
            runs.append(run)
            run.start(np.asarray(chunk))
            if left == 0:
                break
        return cancel

    def unpacked(self, output: Array) -> Any:
        """Return one output as `reply` takes it: an array, or several by name."""
        return self.steps.plan.unpacked(output)

    def reply(self, output: Any) -> Any:
        """Make the JSON values of the response."""
        return reply_of(self.steps.plan.application)(output)

    def reject_single(self) -> None:
        """Reject a single request to a chain whose first part is live.

        Raises:
            InvalidInput: The first part is live.
        """
        if self.segments is not None:
            raise InvalidInput(
                f"{self.name!r} begins with a live signal, and takes no single requests; open a stream at "
                f"/v1/apps/{self.name}/stream."
            )

    def reject_lost(self) -> None:
        """Reject requests while a part is not served.

        Raises:
            Overloaded: It is not.
        """
        self.streams  # noqa: B018
        for step, name in enumerate(self._part_names()):
            if name:
                try:
                    self.steps.part(step)
                except RequestError as error:
                    raise self.steps.of_step(error, step) from None

    def count_rejection(self, error: RequestError) -> None:
        """Count a request without a result by its error."""
        self._requests[column_of(error)] += 1

    def total(self, column: int) -> int:
        """Sum a count over all front-ends."""
        return int(self.totals.requests[:, column].sum())

    def count_broken_reply(self) -> None:
        """Count an answered request as failed, because its reply raised."""
        self._requests[slots.ANSWERED] -= 1
        self._requests[slots.BROKEN] += 1

    def close(self) -> None:
        """End the threads."""
        self.pool.close()

    def _count_failure(self, error: RequestError, step: int) -> None:
        self.count_rejection(error)
        if step >= 0:
            self._by_step[step, column_of(error)] += 1

    def _count_answer(self, arrival_ns: int) -> None:
        latency_ns = self.now_ns() - arrival_ns
        self._requests[slots.ANSWERED] += 1
        self._latency[int(np.searchsorted(slots.TIME_EDGES_NS, latency_ns))] += 1
        self._latency_ns += latency_ns

    def _part_names(self) -> list[str]:
        return [step.part_name for step in self._chain.steps]

    def _served_parts(self) -> list[ServedModel]:
        served: list[ServedModel] = []
        for name in self.parts:
            try:
                served.append(self._find_part(name))
            except RequestError:
                continue
        return served

    def _declared(self, plan: ChainPlan) -> Application:
        return plan.application if self.segments is None else self._found.chain.declare(plan.parts)

    def _plan(self) -> tuple[ChainPlan, str]:
        chain = self._found.chain
        served = {part.name: part for part in self._served_parts()}
        hashes = {name: part.content_hash for name, part in served.items()}
        check_weights(chain, {name: part.manifest.files[WEIGHTS] for name, part in served.items()})
        parts = {name: part.application for name, part in served.items()}
        chain.check_parts(parts)
        return ChainPlan(chain=self._chain, parts=parts), chain_hash(self._found.sha256, hashes)


Served = ServedModel | ServedChain

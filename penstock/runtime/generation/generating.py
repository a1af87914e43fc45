"""The interface between the serving engine and a network whose answers take steps. No torch.

An executor that is `GeneratingInTurn` runs a step while its caller waits, and can copy rows to run them apart. One that
is `GeneratingAhead` launches steps on a device: the next one is launched before the results of the last one are there,
and `begin` runs beside the steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.application import Application
from penstock.core.generate import END as NETWORK_END
from penstock.core.generate import MAX_STEPS
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array

# B rows of a batch or in progress

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class RowStates(Protocol):
    """The batched state of some answers in progress."""

    @property
    def rows(self) -> int:
        """Their number."""
        ...


class GenerationStep(NamedTuple):
    """One step of the rows in progress.

    Args:
        state: The state after it.
        output_B: The outputs, `[B, *output.shape]`.
        done_B: The rows with `done`: this is their last output.
        full_B: The rows that have no room for another step.
    """

    state: Any
    output_B: Array
    done_B: Mask
    full_B: Mask


class GeneratedStep(NamedTuple):
    """One step of a batch of requests.

    Args:
        rows_B: The requests that still run, as indices of the batch.
        output_B: Their outputs.
        ended: Their reason to end with this step; None for those that go on.
    """

    rows_B: Rows
    output_B: Array
    ended: list[str | None]


class Generating(ABC):
    """Begins rows, steps rows in progress, and lets rows join and leave between steps.

    Args:
        application: An application that has `generate`.
        max_rows: The most rows in progress.

    Attributes:
        input: One raw input chunk.
        output: The output of one step.
        answer: A whole answer.
        max_rows: The most rows in progress.
        max_steps: Steps after which every answer ends.
        fallback: Why it runs in a slower way than it could, and what to do; empty where it does not.
        threads: CPU threads of torch for its steps; None leaves them as they are.
    """

    input: ChunkSpec
    output: ChunkSpec
    max_rows: int
    max_steps: int
    fallback: str = ""
    threads: int | None = None

    def __init__(self, application: Application, max_rows: int) -> None:
        assert application.generate is not None, application.name
        self.input, self.output, self.answer = application.input, application.output, application.answer
        self.max_rows, self.max_steps = max_rows, application.generate.max_steps
        self._limit_input = application.generate.max_steps_input

    def limits(self, chunk_B: Array) -> Rows:
        """The maximum of steps of each request, `[B]`."""
        if self._limit_input is None:
            return np.full(len(chunk_B), self.max_steps)
        asked_B = chunk_B[self._limit_input] if isinstance(self.input, RecordSpec) else chunk_B
        return np.clip(asked_B.astype(np.int64), 1, self.max_steps)

    @abstractmethod
    def begin(self, chunk_B: Array) -> Any:
        """Begin the answers to raw inputs `[B, *input.shape]`; returns rows that can join."""

    @abstractmethod
    def join(self, states: list[Any]) -> Any:
        """Put rows that began, or the rows in progress and then such, into one state, in order.

        Returns:
            Their `RowStates`. The first of `states` is used up.
        """

    @abstractmethod
    def keep(self, state: Any, keep_B: Mask) -> tuple[Any, Rows]:
        """Let rows leave; returns the state of the others, and the place that each had. The state is used up."""

    @abstractmethod
    def step(self, state: Any) -> GenerationStep:
        """Run the network once for all rows of a state. No row may be full."""

    @abstractmethod
    def rehearsal(self, chunk: Array, rows: int) -> Callable[[], object]:
        """Return a function that runs one step of so many rows with the same raw input, for measurements."""

    @abstractmethod
    def begin_alone(self, chunk_B: Array) -> None:
        """Run `begin` and wait for its end, for measurements."""

    def run(self, chunk_B: Array) -> Iterator[GeneratedStep]:
        """Run a batch of requests to the end of their answers; yield each step."""
        state, limits_B = self.join([self.begin(chunk_B)]), self.limits(chunk_B)
        rows_B: Rows = np.arange(len(chunk_B))
        steps = 0
        while rows_B.size:
            steps += 1
            state, output_B, done_B, full_B = self.step(state)
            over_B = done_B | full_B | (steps >= limits_B)
            reasons = np.where(done_B, NETWORK_END, MAX_STEPS)
            ended = [str(reason) if over else None for reason, over in zip(reasons, over_B, strict=True)]
            yield GeneratedStep(rows_B, output_B, ended)
            if over_B.all():
                return
            if over_B.any():
                state, order = self.keep(state, ~over_B)
                rows_B, limits_B = rows_B[order], limits_B[order]

    def predict(self, chunk_B: Array) -> Array:
        """Run raw inputs `[B, *input.shape]`; returns whole answers, records `[B]`, see `Application.answer`."""
        answers = self.no_answers(len(chunk_B))
        for step in self.run(chunk_B):
            self.append(answers, step.rows_B, step.output_B)
        return answers

    def no_answers(self, rows: int) -> Array:
        """Make answers of no steps, records `[rows]`."""
        assert isinstance(self.answer, RecordSpec)
        return self.answer.empty(rows)

    def append(self, answers: Array, rows_B: Rows, output_B: Array) -> None:
        """Write the outputs of a step behind those of the steps before.

        Args:
            answers: Records, one for each request.
            rows_B: The requests that took part in the step.
            output_B: Their outputs.
        """
        assert isinstance(self.answer, RecordSpec)
        place_B = answers["steps"][rows_B]
        for spec in self.answer.tensors:
            answers[spec.name][rows_B, place_B] = (
                output_B[spec.name] if isinstance(self.output, RecordSpec) else output_B
            )
        answers["steps"][rows_B] = place_B + 1


class GeneratingInTurn(Generating):
    """Runs each `begin` and `step` while its caller waits."""

    @abstractmethod
    def part(self, state: Any, rows_B: Rows) -> Any:
        """Copy some rows of a state."""


class GeneratingAhead(Generating):
    """Launches steps on a device, and reads their results later; `begin` runs beside them.

    A row whose answer ends takes no further step, though more are launched before that is known. Rows join and leave
    between two launches.
    """

    @abstractmethod
    def is_ready(self, begun: Any) -> bool:
        """Return whether `begin` has run, so that rows can join without a wait."""

    @abstractmethod
    def rejected(self, begun: Any) -> tuple[Mask, list[str]]:
        """Wait for `begin`, and take out rows whose lengths are out of range.

        Returns:
            The rows that were taken out, `[B]`, and why. The others can join, if there are any.
        """

    @abstractmethod
    def launch(self, state: Any) -> Any:
        """Launch a step of the rows of a state; returns a handle for `finish`."""

    @abstractmethod
    def finish(self, launched: Any, state: Any) -> GenerationStep:
        """Wait for the oldest launched step.

        Args:
            launched: Its handle.
            state: The rows in progress now.

        Returns:
            The step of the rows in progress that took part in it: all but the last ones, which joined later.
        """


def generated_outputs(executor: Generating, chunk_B: Array, *, single: bool) -> Iterator[Any]:
    """Yield the outputs of each step of a batch: of one request, or a list with None for the answers that ended."""
    spec = executor.output
    for step in executor.run(chunk_B):
        outputs: list[Any] = [None] * len(chunk_B)
        for row, output in zip(step.rows_B, step.output_B, strict=True):
            outputs[row] = spec.unpack(output) if isinstance(spec, RecordSpec) else np.array(output)
        yield outputs[0] if single else outputs

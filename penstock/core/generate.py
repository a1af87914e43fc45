"""Generate: the declaration of a network whose answer takes steps, such as a translation token by token."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, final

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError
from penstock.core.json_record import JsonRecord
from penstock.core.record import ChunkSpec, RecordSpec, dims_of
from penstock.core.spec import TensorSpec

DEFAULT_MAX_STEPS = 256
# The dimension of a whole answer: its steps.
STEPS = "steps"
# The name of a partial reply beside the outputs of a step.
REPLY = "reply"

# Reasons why an answer ended: `done` of the network, or its maximum of steps or of a growing dimension is reached.
END, MAX_STEPS = "end", "max_steps"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Generate(JsonRecord):
    """An answer that takes steps: the network's `begin` makes a state of the inputs, and each `step` gives one output.

    The network has `begin(**inputs) -> state` and `step(state) -> (output, state, done)`. A state is a dictionary of
    tensors `[B, ...]`; `done` is bool `[B]`, and the output of the step that is done is the last. `forward` is what
    training calls.

    A `Dim` of the state is one of the inputs' (a padded encoder output, say), or one that grows, such as the entries of
    an attention cache. The lengths of both are in the state as int64 `[B]` under the name of the `Dim`. `begin` gives
    those that grow, and each `step` returns the new ones. A step gets room for one more entry than the longest row
    has; the network writes at the row's length, and ignores later entries.

    Args:
        state: The tensors of one row's state by name.
        max_steps: Steps after which an answer ends even if `done` is false.
        first_ms: Budget from the request to its first output, in milliseconds; None for the server's latency budget.
        step_ms: Budget of each further output, in milliseconds; None for the server's latency budget.
        max_steps_input: Name of an input, one whole number, by which a request lowers its own maximum of steps.
        partial_replies: Send the application's `reply` to all outputs so far with each step, such as the text of the
            tokens, to clients that read step by step. It is called at each step, so it must be fast.

    Raises:
        ApplicationError: A field is out of range.
    """

    unreadable = "a Generate is not readable ({}); write the bundle again."
    state: dict[str, TensorSpec] = field(hash=False)
    max_steps: int = DEFAULT_MAX_STEPS
    first_ms: float | None = None
    step_ms: float | None = None
    max_steps_input: str | None = None
    partial_replies: bool = False

    def __post_init__(self) -> None:
        state: Any = self.state
        if not isinstance(state, Mapping) or not state or not all(isinstance(s, TensorSpec) for s in state.values()):
            raise ApplicationError(
                f"Generate has state={_shown(state)}; it must be a dictionary of TensorSpecs by name, at least one."
            )
        object.__setattr__(self, "state", {name: replace(spec, name=name) for name, spec in self.state.items()})
        # Checks that the names are identifiers, and that each stands once.
        RecordSpec(tuple(self.state.values()))
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise ApplicationError(f"Generate has max_steps={self.max_steps!r}; it must be a whole number, at least 1.")
        for name in ("first_ms", "step_ms"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and isfinite(value) and value > 0):
                raise ApplicationError(
                    f"Generate has {name}={value!r}; it must be a number of milliseconds above 0, or None."
                )

        if type(self.partial_replies) is not bool:
            raise ApplicationError(f"Generate has partial_replies={self.partial_replies!r}; it must be True or False.")

    @property
    def dims(self) -> dict[str, Dim]:
        """The dimensions of the state whose length varies, by name."""
        return dims_of(tuple(self.state.values()))

    def growing(self, input: ChunkSpec) -> dict[str, Dim]:
        """The dimensions that grow from step to step: those that no input has.

        Args:
            input: One raw input chunk.
        """
        of_input = dims_of(input.tensors)
        return {name: dim for name, dim in self.dims.items() if name not in of_input}

    def check(self, name: str, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> None:
        """Check the declaration against the inputs and outputs of an application.

        Args:
            name: The application's name, for messages.
            inputs: Its inputs.
            outputs: The outputs of one step.

        Raises:
            ApplicationError: They do not fit.
        """
        of_inputs = dims_of(tuple(inputs.values()))
        if lengths := [each for each in self.state if each in of_inputs]:
            raise ApplicationError(
                f"Application {name!r} generates and has the state tensor {lengths[0]!r}, the name of a Dim of its "
                f"inputs, under which a step is given the lengths; choose another."
            )
        dims_of((*inputs.values(), *_without_names(self.state)))
        varying = [spec for spec in outputs.values() if spec.dims]
        if varying:
            raise ApplicationError(
                f"Application {name!r} generates and has output {varying[0].name!r}, {varying[0].describe()}; the "
                f"outputs of one step have a fixed size."
            )
        taken = {*inputs, *outputs, *of_inputs, *self.dims}
        if STEPS in taken:
            raise ApplicationError(
                f"Application {name!r} generates and has a tensor or Dim with the name 'steps', which is the length of "
                f"its answers; choose another."
            )
        if self.partial_replies and REPLY in outputs:
            raise ApplicationError(
                f"Application {name!r} generates with partial_replies and has an output {REPLY!r}, the name that these "
                f"are sent under; give the output another."
            )
        limit = self.max_steps_input
        spec = inputs.get(limit or "")
        if limit is not None and (spec is None or spec.shape or spec.numpy_dtype.kind not in "iu"):
            found = "there is no such input" if spec is None else f"it is {spec.describe()}"
            raise ApplicationError(
                f"Application {name!r} has max_steps_input={limit!r}, but {found}; name an input that is one whole "
                f"number, TensorSpec(dtype='int64', shape=(), ...)."
            )
        whole_answer(outputs.values(), self.max_steps)

    def to_json(self) -> dict[str, Any]:
        """The declaration as JSON values."""
        fields = JsonRecord.to_json(self)
        return fields | {"state": {name: spec.to_json() for name, spec in self.state.items()}}


def whole_answer(outputs: Iterable[TensorSpec], max_steps: int) -> RecordSpec:
    """Return the spec of a whole answer: the outputs of all its steps, stacked along the first dimension.

    Raises:
        ApplicationError: The name of an output is no identifier.
    """
    steps = Dim(STEPS, max=max_steps)
    return RecordSpec(tuple(replace(spec, shape=(steps, *spec.shape), default=None) for spec in outputs))


def _without_names(state: Mapping[str, TensorSpec]) -> list[TensorSpec]:
    # A tensor of the state may have the name of an input that it carries, such as a seed.
    return [replace(spec, name=f"state {name}") for name, spec in state.items()]


def _shown(value: object) -> str:
    return " ".join(repr(value).split())[:80]

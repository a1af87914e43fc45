"""The declaration of `finish`: numerically unstable operations after the network, such as sorting."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.core.agreement import RowSets
from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError
from penstock.core.prepare import is_factory
from penstock.core.record import RecordSpec, chunk_spec
from penstock.core.spec import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    """Make the outputs of an application from what its network gives: top-k, suppression of boxes, sorting.

    Training calls the network alone. Everything else runs network and finish as one. Executors round differently, so
    that rows with equal scores may swap and rows at a threshold may appear or vanish: the rows of outputs that share a
    `Dim` which no input has are compared as a set. Where their number is always the same, as of a top-k, give the `Dim`
    the same `min` and `max`; outputs of a fixed size are compared number by number.

    Args:
        module: Makes the `torch.nn.Module`, without arguments, or its import path. It has no trained weights; its
            `forward` takes a batch of the network's outputs as a network takes its inputs, and returns the
            application's outputs by name, and the lengths `[B]` of each `Dim` that no input has under its name.
        inputs: The tensors that the network gives, by name.
        score: The output, one number for each row, that decides which rows are kept; empty if no output does.
        threshold: Rows with a smaller score are left out; None if only the largest scores are kept.

    Raises:
        ApplicationError: A field is of another kind.
    """

    module: Callable[[], Any] | str
    inputs: Mapping[str, TensorSpec] = field(compare=False)
    score: str = ""
    threshold: float | None = None
    tensors: tuple[TensorSpec, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not is_factory(self.module):
            raise ApplicationError(
                f"Finish has module={' '.join(repr(self.module).split())[:80]}; it must be a class or function that "
                f"makes the module, or its import path, not the module itself."
            )
        given = self.inputs
        if not isinstance(given, Mapping) or not given or not all(isinstance(x, TensorSpec) for x in given.values()):
            raise ApplicationError(
                f"Finish has inputs={' '.join(repr(given).split())[:80]}; they must be a dictionary of the network's "
                f"TensorSpecs by name."
            )
        if self.threshold is not None and (not self.score or type(self.threshold) not in (int, float)):
            raise ApplicationError(
                f"Finish has threshold={self.threshold!r} and score={self.score!r}; a threshold is a number, and needs "
                f"the name of the output that it applies to."
            )
        object.__setattr__(self, "tensors", tuple(replace(spec, name=name) for name, spec in given.items()))
        # Raises where a name or a dimension is given twice.
        chunk_spec(self.tensors)

    def row_sets(self, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> RowSets:
        """Return which rows of the outputs are compared as sets.

        Args:
            inputs: The application's inputs.
            outputs: The application's outputs.

        Raises:
            ApplicationError: The score is no output of one number for each row, or an output has two such dimensions.
        """
        given = {dim.name for spec in inputs.values() for dim in spec.dims}
        own: dict[str, Dim] = {}
        for spec in outputs.values():
            dims = [dim for dim in spec.dims if dim.name not in given]
            if len(dims) > 1:
                raise ApplicationError(
                    f"The output {spec.name!r} of the finish has the dimensions {dims[0].name!r} and {dims[1].name!r}, "
                    f"which no input has; its rows can be a set along one of them only."
                )
            own |= {dim.name: dim for dim in dims}
        if self.score:
            spec = outputs.get(self.score)
            if spec is None or len(spec.shape) != 1 or not {dim.name for dim in spec.dims} & own.keys():
                found = "no output" if spec is None else spec.describe()
                raise ApplicationError(
                    f"Finish has score={self.score!r}, which is {found}; name an output with one number for each row, "
                    f"whose number is a Dim that no input has: TensorSpec(shape=(Dim('rows', max=5, min=0),), ...)."
                )
        threshold = None if self.threshold is None else float(self.threshold)
        return RowSets(dims=tuple(own), score=self.score, threshold=threshold)


def network_output(finish: Finish) -> TensorSpec | RecordSpec:
    """The spec of the network's own outputs, the inputs of a finish."""
    return chunk_spec(finish.tensors)

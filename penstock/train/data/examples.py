"""Training examples, readable in any order and by several threads at once."""

from abc import ABC, abstractmethod
from math import prod
from typing import Any, ClassVar, final

import numpy as np

from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.data.sampler import Indices, Seeds

# n examples, B examples of a batch


class Examples(ABC):
    """A set of examples. Subclass it, or use `ArraySet`, `ImageFolder` or `Shards`.

    Several threads may call `read` at once. The result depends on an example's index and seed alone.

    Attributes:
        in_memory: True if reading is no more than copying, so that workers save no time.
        input_dtype: The dtype of the raw inputs; a subclass sets it.
        input_shape: The shape of one raw input; a subclass sets it.
        varies: True if an example is read differently in each epoch, by its seed.
    """

    in_memory: ClassVar[bool] = False
    varies: bool = False
    input_dtype: np.dtype[Any]
    input_shape: tuple[int, ...]

    @abstractmethod
    def __len__(self) -> int:
        """Count the examples."""

    @abstractmethod
    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """Read some examples.

        Args:
            indices_B: The examples, each from 0 to below `len`.
            seeds_B: The RNG seed of each example; `sampler.draws_of` makes random numbers of it.
            inputs_B: The destination of the raw inputs, `[B, *input_shape]` of `input_dtype`.

        Returns:
            The targets, `[B]` or `[B, ...]`.

        Raises:
            BadExample: An example is damaged or missing.
        """

    @property
    def input_nbytes(self) -> int:
        """Bytes of one raw input."""
        return prod(self.input_shape) * self.input_dtype.itemsize

    def empty(self, count: int) -> Array:
        """Allocate memory for raw inputs."""
        return np.empty((count, *self.input_shape), self.input_dtype)


@final
class ArraySet(Examples):
    """Examples in memory.

    Args:
        inputs: Raw inputs in the form that `decode` returns, `[n, *input.shape]`.
        targets: The targets of the loss, `[n]` or `[n, ...]`.
    """

    in_memory: ClassVar[bool] = True

    def __init__(self, *, inputs: Array, targets: Array) -> None:
        if len(inputs) != len(targets) or len(inputs) == 0:
            raise TrainError(
                f"the data has {len(inputs):,} inputs and {len(targets):,} targets; "
                f"give one target for each input, and at least one."
            )
        self.inputs, self.targets = inputs, targets
        self.input_dtype, self.input_shape = inputs.dtype, inputs.shape[1:]

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """See `Examples`."""
        inputs_B[...] = self.inputs[indices_B]
        return self.targets[indices_B]

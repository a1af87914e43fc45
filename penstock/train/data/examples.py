"""Training examples, readable in any order and by several threads at once."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
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
    """

    in_memory: ClassVar[bool] = False
    """Whether reading is no more than copying, so that no worker is worth its while."""

    @property
    @abstractmethod
    def input_dtype(self) -> np.dtype[Any]:
        """The dtype of the raw inputs."""

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one raw input."""

    @property
    def varies(self) -> bool:
        """True if an example is read differently in each epoch, by its seed."""
        return False

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
@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySet(Examples):
    """Examples in memory.

    Args:
        inputs: Raw inputs in the form that `decode` returns, `[n, *input.shape]`.
        targets: The targets of the loss, `[n]` or `[n, ...]`.
    """

    inputs: Array
    targets: Array

    in_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets) or len(self.inputs) == 0:
            raise TrainError(
                f"the data has {len(self.inputs):,} inputs and {len(self.targets):,} targets; "
                f"give one target for each input, and at least one."
            )

    @property
    def input_dtype(self) -> np.dtype[Any]:
        """The dtype of the raw inputs."""
        return self.inputs.dtype

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one raw input."""
        return self.inputs.shape[1:]

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """See `Examples`."""
        inputs_B[...] = self.inputs[indices_B]
        return self.targets[indices_B]

"""What a training learns from: examples that can be read in any order, by several workers at once."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, final

import numpy as np

from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.data import Indices, Seeds

# n examples, B examples of a batch


class Examples(ABC):
    """A set of examples. Yours is a subclass; `ArraySet`, `ImageFolder` and `Shards` come with Penstock.

    Several threads may call `read` at once. What an example is read as depends on its index and its seed alone.
    """

    in_memory: ClassVar[bool] = False
    """Whether reading is no more than copying, so that no worker is worth its while."""

    @property
    @abstractmethod
    def input_dtype(self) -> np.dtype[Any]:
        """Of the raw inputs."""

    @property
    @abstractmethod
    def input_shape(self) -> tuple[int, ...]:
        """Of one raw input."""

    @property
    def varies(self) -> bool:
        """Whether an example is read in another way in each epoch, by its seed."""
        return False

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abstractmethod
    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """Read some examples.

        Args:
            indices_B: Which, each from 0 to below `len`.
            seeds_B: The number of each from which all chance must come; `penstock.train.data.chance` makes draws of it.
            inputs_B: Where the raw inputs go, `[B, *input_shape]` of `input_dtype`.

        Returns:
            The targets, `[B]` or `[B, ...]`.

        Raises:
            BadExample: One of them is damaged or missing.
        """

    @property
    def input_nbytes(self) -> int:
        """Bytes of one raw input."""
        return prod(self.input_shape) * self.input_dtype.itemsize

    def empty(self, count: int) -> Array:
        """Room for so many raw inputs."""
        return np.empty((count, *self.input_shape), self.input_dtype)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySet(Examples):
    """Examples in memory.

    Args:
        inputs: Raw inputs as `decode` would give them, `[n, *input.shape]`.
        targets: What the loss compares the network's outputs with, `[n]` or `[n, ...]`.
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
        """Of the raw inputs."""
        return self.inputs.dtype

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one raw input."""
        return self.inputs.shape[1:]

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """See `Examples`."""
        inputs_B[...] = self.inputs[indices_B]
        return self.targets[indices_B]

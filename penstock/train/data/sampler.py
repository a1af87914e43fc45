"""The order of examples: a stateless permutation of (seed, epoch) and one global cursor.

Example i of the endless stream is `permutation(seed, i // n)[i % n]`, or that of another order of each epoch. A step
takes the next global batch, so that a run resumed from its cursor alone sees the same examples in the same order,
whatever the number of devices.

All random changes to an example follow from a seed of (seed, epoch, example), whichever thread reads it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

# n examples, B examples of a batch, S steps, D draws

# The order is computed for this many examples at once: NumPy calls for each batch take as long as a short step.
AT_ONCE, EPOCHS_AT_ONCE = 1 << 14, 16

Indices = npt.NDArray[np.int64]
Seeds = npt.NDArray[np.uint64]
# The examples of an epoch, `[n]`, as a function of the seed, the epoch and the number of examples alone.
EpochOrder = Callable[[int, int, int], Indices]

# Of splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ALL_BITS = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchIndices:
    """The indices and seeds of a batch's examples.

    Args:
        indices_B: Their indices.
        seeds_B: Their RNG seeds.
    """

    indices_B: Indices
    seeds_B: Seeds

    def of(self, rows: slice | Indices) -> "BatchIndices":
        """Select some of the examples."""
        return BatchIndices(indices_B=self.indices_B[rows], seeds_B=self.seeds_B[rows])


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, examples: int) -> Indices:
    """Permute the examples of one epoch, `[n]`; a function of the arguments alone."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(examples)


def batch_indices(seed: int, cursor: int, batch_size: int, examples: int, order: EpochOrder = permutation) -> Indices:
    """Compute the examples of the batch at a cursor, `[batch_size]`, continued into the next epoch.

    Args:
        seed: The recipe's seed.
        cursor: The number of examples before the batch.
        batch_size: Examples of the batch.
        examples: Examples of the set.
        order: The order of each epoch.
    """
    places = np.arange(cursor, cursor + batch_size)
    epochs, within = np.divmod(places, examples)
    parts = [order(seed, int(epoch), examples)[within[epochs == epoch]] for epoch in np.unique(epochs)]
    return np.concatenate(parts)


def training_order(
    seed: int,
    examples: int,
    batch_size: int,
    *,
    first_step: int = 0,
    rows: slice = slice(None),
    order: EpochOrder = permutation,
) -> Iterator[BatchIndices]:
    """Yield the batches of a training, without end.

    Args:
        seed: The recipe's seed.
        examples: Examples of the set.
        batch_size: Examples of a step, over all devices.
        first_step: The first step.
        rows: This process's rows of each global batch.
        order: The order of each epoch.
    """
    step, steps = first_step, max(1, min(AT_ONCE, EPOCHS_AT_ONCE * examples) // batch_size)
    while True:
        cursor, count = step * batch_size, steps * batch_size
        epochs_SB = (np.arange(cursor, cursor + count) // examples).reshape(steps, batch_size)[:, rows]
        indices_SB = batch_indices(seed, cursor, count, examples, order).reshape(steps, batch_size)[:, rows]
        seeds_SB = example_seeds(seed, epochs_SB, indices_SB)
        for indices_B, seeds_B in zip(indices_SB, seeds_SB, strict=True):
            yield BatchIndices(indices_B=indices_B, seeds_B=seeds_B)
        step += steps


def one_pass(examples: int, batch_size: int) -> Iterator[BatchIndices]:
    """Yield every example once, in order; the last batch may be smaller."""
    for start in range(0, examples, batch_size):
        indices_B = np.arange(start, min(start + batch_size, examples))
        yield BatchIndices(indices_B=indices_B, seeds_B=example_seeds(0, np.zeros_like(indices_B), indices_B))


def equal_shares(order: Iterator[BatchIndices], rank: int, ranks: int) -> Iterator[BatchIndices]:
    """Take one process's rows of each batch, the same number for all: the last example pads the batch."""
    for places in order:
        most = -(-len(places.indices_B) // ranks)
        own = np.arange(rank * most, (rank + 1) * most).clip(max=len(places.indices_B) - 1)
        yield places.of(own)


def example_seeds(seed: int, epochs_B: Indices, indices_B: Indices) -> Seeds:
    """Derive the RNG seed of each example, `[..., B]`, from (seed, epoch, example)."""
    own_B = _mixed(np.asarray(epochs_B, np.uint64) + np.uint64(_mixed_int(seed)))
    return _mixed(own_B + np.asarray(indices_B, np.uint64))


def draws_of(seeds_B: Seeds, draws: int) -> npt.NDArray[np.float64]:
    """Draw uniform numbers from 0 to below 1, `[B, D]`; each row is a function of its seed."""
    steps_D = np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return (_mixed(seeds_B[:, None] + steps_D) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def another(seed: np.uint64, attempt: int, examples: int) -> int:
    """Choose the replacement of an example that cannot be read, by the number of attempts."""
    return _mixed_int(int(seed) ^ _mixed_int(attempt + 1)) % examples


def _mixed(numbers: Seeds) -> Seeds:
    mixed = numbers + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return mixed ^ (mixed >> np.uint64(31))


def _mixed_int(number: int) -> int:
    # NumPy scalars warn on overflow; arrays do not.
    return int(_mixed(np.array([number & _ALL_BITS], np.uint64))[0])

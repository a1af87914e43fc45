"""The order in which examples are seen: a stateless permutation of (seed, epoch) and one global cursor.

Example i of the endless stream is `permutation(seed, i // n)[i % n]`. A step takes the next global batch, so that a run
resumed from its cursor alone sees the same examples in the same order, whatever the number of devices.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

# n examples

Indices = npt.NDArray[np.int64]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, examples: int) -> Indices:
    """The order of the examples in one epoch, `[n]`, a function of its arguments alone."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(examples)


def batch_indices(seed: int, cursor: int, batch_size: int, examples: int) -> Indices:
    """Which examples the batch at a cursor is made of, `[batch_size]`; it runs on into the next epoch.

    Args:
        seed: The recipe's.
        cursor: How many examples were seen before.
        batch_size: How many to take.
        examples: How many there are.
    """
    places = np.arange(cursor, cursor + batch_size)
    epochs, within = np.divmod(places, examples)
    parts = [permutation(seed, int(epoch), examples)[within[epochs == epoch]] for epoch in np.unique(epochs)]
    return np.concatenate(parts)

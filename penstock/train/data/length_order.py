"""The order of examples of different lengths: buckets of similar lengths, and a first epoch from short to long.

An epoch remains a permutation of (seed, epoch), and each step takes its next global batch. So the batches are the
same on any number of processes, and after any interruption.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock.core.errors import TrainError
from penstock.core.record import Lengths
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import EpochOrder, Indices, permutation

# n examples, S batches, B examples of a batch

# Batches that a bucket has at least, so that other examples meet in each epoch.
MIN_BATCHES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleOrder:
    """The order of examples whose lengths vary; examples of one length are shuffled.

    Args:
        buckets: Divide the examples by length into so many buckets of about equally many examples. A batch has examples
            of one bucket, so that it has little padding, and the batches are shuffled. A small set has fewer buckets:
            each has two batches at least. 0 for none. Khomenko et al. 2016, "Accelerating recurrent neural network
            training using sequence bucketing and multi-GPU data parallelization", section 3.
        shortest_first: Take the examples of the first epoch in the order of their lengths, and shuffle from the second
            on. Amodei et al. 2016, "Deep Speech 2", section 3.2, "SortaGrad" (3.3 of arXiv 1512.02595).

    Raises:
        TrainError: A field is out of range.
    """

    buckets: int = 0
    shortest_first: bool = False

    def __post_init__(self) -> None:
        if type(self.buckets) is not int or self.buckets < 0:
            raise TrainError(f"the recipe has order.buckets {self.buckets!r}; it must be a whole number, 0 for none.")

    @property
    def is_by_length(self) -> bool:
        """True if the lengths of the examples matter."""
        return self.buckets > 0 or self.shortest_first


def epoch_order(
    examples: Examples, order: ExampleOrder, *, batch_size: int, seed: int, notify: Callable[[str], object]
) -> EpochOrder:
    """Return the order of each epoch of a training.

    Args:
        examples: The training set.
        order: The recipe's order.
        batch_size: Examples of a step, over all devices.
        seed: The recipe's seed.
        notify: Called with a sentence on the share of padding.

    Raises:
        TrainError: The order is by length, and the examples do not know their lengths.
    """
    varies = examples.record is not None and bool(examples.record.dims)
    if not (order.is_by_length and varies):
        return permutation
    lengths_n = examples.lengths()
    if lengths_n is None:
        raise TrainError(
            f"the recipe orders examples by length, and the examples {type(examples).__name__} do not know their "
            f"lengths; give them a method lengths(), or set order.buckets=0 and order.shortest_first=false."
        )
    if lengths_n.min() == lengths_n.max():
        return permutation
    made = by_length(lengths_n, order, batch_size)
    buckets = 1 + int(bucket_of(lengths_n, order.buckets, batch_size).max())
    bucketed, shuffled = (padding_share(lengths_n, each, seed, batch_size) for each in (made, permutation))
    if buckets > 1:
        notify(
            f"{buckets} buckets of examples of similar length: {bucketed:.1%} of a batch is padding, {shuffled:.1%} "
            f"without buckets."
        )
    else:
        notify(f"{shuffled:.1%} of a batch is padding{', with too few examples for buckets' * bool(order.buckets)}.")
    if order.shortest_first:
        notify("The first epoch takes the examples from the shortest to the longest.")
    return made


def by_length(lengths_n: Lengths, order: ExampleOrder, batch_size: int) -> EpochOrder:
    """Return the order of each epoch of examples of given lengths.

    The first batch of an epoch may begin in the epoch before, and the last one end in the next. Both epochs give
    examples of middle length to it.

    Args:
        lengths_n: The length of each example.
        order: The recipe's order.
        batch_size: Examples of a step, over all devices.
    """
    bucket_n = bucket_of(lengths_n, order.buckets, batch_size)

    @lru_cache(maxsize=4)
    def ordered(seed: int, epoch: int, examples: int) -> Indices:
        assert examples == len(lengths_n), (examples, len(lengths_n))
        shuffled_n = permutation(seed, epoch, examples)
        if order.shortest_first and epoch == 0:
            return shuffled_n[np.argsort(lengths_n[shuffled_n], kind="stable")]
        if not bucket_n.any():
            return shuffled_n
        by_bucket_n = shuffled_n[np.argsort(bucket_n[shuffled_n], kind="stable")]
        # Another stream of the key that the permutation has.
        random = np.random.Generator(np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, 1]))
        return _shuffled_batches(by_bucket_n, -epoch * examples % batch_size, batch_size, random)

    return ordered


def bucket_of(lengths_n: Lengths, buckets: int, batch_size: int) -> Indices:
    """Return the bucket of each example, `[n]`, from 0; examples of one length are in one bucket.

    Args:
        lengths_n: The length of each example.
        buckets: The number of buckets at most.
        batch_size: Examples of a step, over all devices.
    """
    count = max(1, min(buckets, len(lengths_n) // (MIN_BATCHES * batch_size)))
    edges = np.unique(np.sort(lengths_n)[len(lengths_n) * np.arange(1, count) // count])
    bucket_n = np.searchsorted(edges, lengths_n, side="right")
    # Many equal lengths make some empty; leave those out.
    return np.unique(bucket_n, return_inverse=True)[1].reshape(-1)


def padding_share(lengths_n: Lengths, order: EpochOrder, seed: int, batch_size: int) -> float:
    """Compute the share of padding in the whole batches of the second epoch, if each is as long as its longest example.

    Args:
        lengths_n: The length of each example.
        order: The order of each epoch.
        seed: The recipe's seed.
        batch_size: Examples of a batch.
    """
    examples = len(lengths_n)
    head = min(-examples % batch_size, examples)
    whole = (examples - head) // batch_size
    # Of a set smaller than a batch all examples.
    used = order(seed, 1, examples)[head : head + whole * batch_size] if whole else np.arange(examples)
    lengths_SB = lengths_n[used].reshape(max(1, whole), -1)
    room = int(lengths_SB.max(1).sum()) * lengths_SB.shape[1]
    return 1 - int(lengths_SB.sum()) / max(1, room)


def _shuffled_batches(ordered_n: Indices, head: int, batch_size: int, random: np.random.Generator) -> Indices:
    """Shuffle the batches of an epoch.

    Args:
        ordered_n: The examples, by bucket.
        head: Examples of the epoch that complete the last batch of the epoch before.
        batch_size: Examples of a batch.
        random: The source of random numbers.
    """
    head = min(head, len(ordered_n))
    whole, tail = divmod(len(ordered_n) - head, batch_size)
    middle = whole // 2 * batch_size
    shared, rest = np.split(ordered_n[middle:], [head + tail])
    batches_SB = np.concatenate([ordered_n[:middle], rest]).reshape(whole, batch_size)
    return np.concatenate([shared[:head], batches_SB[random.permutation(whole)].reshape(-1), shared[head:]])

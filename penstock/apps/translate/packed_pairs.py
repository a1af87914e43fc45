"""Training examples: rows of a fixed size, each filled with several pairs, so that little of a batch is padding."""

from pathlib import Path
from typing import ClassVar, NamedTuple, Self, final

import numpy as np
import numpy.typing as npt

from penstock.apps.translate.tokenizer import END, FIRST, PADDING
from penstock.core.errors import TrainError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import Indices, Seeds
from penstock.train.data.trees import Tree

# n pairs, R rows, S tokens of a row

ROOM = 256
Tokens = npt.NDArray[np.int64]


class Pairs(NamedTuple):
    """Tokens of n pairs, one text behind the other, and the number of each.

    Args:
        source: All source tokens.
        source_lengths: `[n]`.
        target: All target tokens, without those that begin and end a text.
        target_lengths: `[n]`.
    """

    source: Array
    source_lengths: Array
    target: Array
    target_lengths: Array

    @classmethod
    def read(cls, file: Path, split: str) -> Self:
        """Read a split, `"train"` or `"validation"`, of the file that `make_data` writes."""
        try:
            with np.load(file, allow_pickle=False) as arrays:
                return cls(*(arrays[f"{split}_{name}"] for name in cls._fields))
        except (OSError, ValueError, KeyError) as error:
            raise TrainError(
                f"{file} cannot be read ({error}); make it with 'python -m penstock.apps.translate.make_data'."
            ) from None


@final
class PackedPairs(Examples):
    """Rows of `room` tokens that are filled with whole pairs.

    The inputs are those of `EncoderDecoder.forward`. The target is 1 for each token that is scored, float32 `[room]`.

    Args:
        pairs: The pairs.
        seed: Seed of the order in which they are packed.
        room: Tokens of a row of sources; those of targets have one more.

    Raises:
        TrainError: A pair is longer than a row.
    """

    in_memory: ClassVar[bool] = True

    def __init__(self, pairs: Pairs, *, seed: int, room: int = ROOM) -> None:
        order_n = np.random.default_rng(seed).permutation(len(pairs.source_lengths))
        source_n, target_n = (
            lengths[order_n].astype(np.int64) for lengths in (pairs.source_lengths, pairs.target_lengths)
        )
        longest = max(source_n.max(), target_n.max() + 1)
        if longest > room:
            raise TrainError(f"a pair has {longest:,} tokens; a row has room for {room:,}.")
        rows_n, numbers_n = _rows(source_n.tolist(), (target_n + 2).tolist(), room)
        self.arrays: dict[str, Tokens] = {}
        texts = (
            ("source", pairs.source, pairs.source_lengths, source_n, 0, room),
            # One more than the source: the last token of a row is scored and not given.
            ("target", pairs.target, pairs.target_lengths, target_n, 1, room + 1),
        )
        for name, tokens, lengths, own_n, edge, wide in texts:
            own, pair = np.full((rows_n[-1] + 1, wide), PADDING, np.int64), np.zeros((rows_n[-1] + 1, wide), np.int64)
            first_n = _starts(lengths.astype(np.int64))[order_n]
            begin_n = _begins(rows_n, own_n + 2 * edge, wide)
            pair.reshape(-1)[_spans(begin_n, own_n + 2 * edge)] = np.repeat(numbers_n, own_n + 2 * edge)
            own.reshape(-1)[_spans(begin_n + edge, own_n)] = tokens[_spans(first_n, own_n)]
            if edge:
                own.reshape(-1)[begin_n], own.reshape(-1)[begin_n + own_n + 1] = FIRST, END
            self.arrays |= {name: own, f"{name}_pair": pair}
        self.declare(
            RecordSpec(
                tuple(
                    TensorSpec(dtype="int64", shape=rows.shape[1:], meaning="", name=name)
                    for name, rows in self.arrays.items()
                )
            )
        )

    def __len__(self) -> int:
        return len(self.arrays["source"])

    def bound(self, record: RecordSpec) -> "PackedPairs":
        """Keep the inputs, which are those of the training alone: targets are given to the network too."""
        return self

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Tree:
        """See `Examples`."""
        for name, rows in self.arrays.items():
            inputs_B[name] = rows[indices_B]
        pair = self.arrays["target_pair"][indices_B]
        return ((pair[:, 1:] == pair[:, :-1]) & (pair[:, 1:] > 0)).astype(np.float32)


def _rows(sources: list[int], targets: list[int], room: int) -> tuple[Tokens, Tokens]:
    """Fill rows one after the other; returns the row of each pair, and its number in that row, from 1."""
    rows: list[int] = []
    numbers: list[int] = []
    row = number = source = target = 0
    for more_source, more_target in zip(sources, targets, strict=True):
        if source + more_source > room or target + more_target > room + 1:
            row, number, source, target = row + 1, 0, 0, 0
        source, target, number = source + more_source, target + more_target, number + 1
        rows.append(row)
        numbers.append(number)
    return np.array(rows), np.array(numbers)


def _starts(lengths_n: Tokens) -> Tokens:
    return np.cumsum(lengths_n) - lengths_n


def _begins(rows_n: Tokens, lengths_n: Tokens, wide: int) -> Tokens:
    """Return where each text begins in the flattened rows; the texts of a row follow one another."""
    starts_n = _starts(lengths_n)
    return rows_n * wide + starts_n - starts_n[np.searchsorted(rows_n, rows_n)]


def _spans(begin_n: Tokens, lengths_n: Tokens) -> Tokens:
    """Return all places of spans, one span behind the other."""
    return np.repeat(begin_n - _starts(lengths_n), lengths_n) + np.arange(lengths_n.sum())

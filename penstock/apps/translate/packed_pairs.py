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
            with np.load(file) as arrays:
                return cls(*(arrays[f"{split}_{name}"] for name in cls._fields))
        except (OSError, ValueError, KeyError) as error:
            raise TrainError(
                f"{file} cannot be read ({error}); make it with 'python -m penstock.apps.translate.make_data'."
            ) from None


@final
class PackedPairs(Examples):
    """Rows of `room` tokens that are filled with whole pairs.

    The inputs are those of `EncoderDecoder.forward`. The target is 1 for each token that is scored, float32 `[room - 1]`.

    Args:
        pairs: The pairs.
        seed: Seed of the order in which they are packed.
        room: Tokens of a row, on each side.

    Raises:
        TrainError: A pair is longer than a row.
    """

    in_memory: ClassVar[bool] = True

    def __init__(self, pairs: Pairs, *, seed: int, room: int = ROOM) -> None:
        source_n, target_n = pairs.source_lengths.astype(np.int64), pairs.target_lengths.astype(np.int64) + 2
        if max(source_n.max(), target_n.max()) > room:
            raise TrainError(f"a pair has {max(source_n.max(), target_n.max()):,} tokens; a row has room for {room:,}.")
        order_n = np.random.default_rng(seed).permutation(len(source_n))
        rows_n, numbers_n = _rows(source_n[order_n].tolist(), target_n[order_n].tolist(), room)
        shape = rows_n[-1] + 1, room
        self.arrays = {
            name: np.full(shape, fill, np.int64)
            for name, fill in (("source", PADDING), ("target", PADDING), ("source_pair", 0), ("target_pair", 0))
        }
        firsts = {name: np.cumsum(lengths_n) - lengths_n for name, lengths_n in (("source", source_n), ("target", target_n - 2))}
        at = {"source": 0, "target": 0}
        row = -1
        for index, own_row, number in zip(order_n.tolist(), rows_n.tolist(), numbers_n.tolist(), strict=True):
            if own_row != row:
                row, at = own_row, {"source": 0, "target": 0}
            first = int(firsts["source"][index])
            source = pairs.source[first : first + source_n[index]]
            first = int(firsts["target"][index])
            target = np.concatenate([[FIRST], pairs.target[first : first + target_n[index] - 2], [END]])
            for name, tokens in (("source", source), ("target", target)):
                place = slice(at[name], at[name] + len(tokens))
                self.arrays[name][row, place] = tokens
                self.arrays[f"{name}_pair"][row, place] = number
                at[name] += len(tokens)
        self.declare(
            RecordSpec(
                tuple(TensorSpec(dtype="int64", shape=(room,), meaning="", name=name) for name in self.arrays)
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
        if source + more_source > room or target + more_target > room:
            row, number, source, target = row + 1, 0, 0, 0
        source, target, number = source + more_source, target + more_target, number + 1
        rows.append(row)
        numbers.append(number)
    return np.array(rows), np.array(numbers)

"""Examples that stay on the device: where all of them fit, no step waits for one."""

from collections.abc import Callable, Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import BadExample
from penstock.train.data import Places, one_pass
from penstock.train.examples import Examples
from penstock.train.feed import Batch, Feed, ReadFeed, replaced
from penstock.train.reading import OnBad, in_order

# n examples, B examples of a batch

# Of the memory that is free before the first step; the rest is for weights, optimizer and activations.
SHARE_OF_FREE = 0.25
AT_ONCE_BYTES = 1 << 24


@final
class ResidentFeed(Feed):
    """Batches out of examples that were all read once and lie on the device.

    They are those that `ReadFeed` would give, bit for bit.

    Args:
        examples: What is read; `varies` must be false.
        order: What each batch is made of.
        workers: Threads that read, at the beginning.
        on_bad: As `ReadFeed` has it.
        device: Where the examples stay.
        notice: Called with a sentence when an example is first met that is damaged.
    """

    def __init__(
        self,
        examples: Examples,
        order: Iterator[Places],
        *,
        workers: int = 1,
        on_bad: OnBad = "stop",
        device: torch.device | None = None,
        notice: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(notice)
        assert not examples.varies, examples
        self._order, self._on_bad = order, on_bad
        self._device = device or torch.device("cpu")
        self._inputs, self._targets, self._damaged = _all_of(examples, self._device, workers)

    def close(self) -> None:
        """They are gone since the beginning."""

    def _next(self) -> Batch:
        places = next(self._order)
        rows = torch.from_numpy(self._without_damaged(places)).to(self._device)
        return Batch(self._inputs.index_select(0, rows), self._targets.index_select(0, rows))

    def _without_damaged(self, places: Places) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        indices_B = places.indices_B
        attempts_B = np.zeros(len(indices_B), np.int64)
        while self._damaged and (met := next((int(i) for i in indices_B if int(i) in self._damaged), None)) is not None:
            error = self._damaged[met]
            if self._on_bad == "stop":
                raise error
            indices_B, rows = replaced(indices_B, places, error, attempts_B, len(self._inputs))
            self._count([error] * rows)
        return indices_B


def make_feed(
    examples: Examples,
    order: Iterator[Places],
    *,
    workers: int,
    on_bad: OnBad = "stop",
    device: torch.device | None = None,
    say: Callable[[str], object] | None = None,
) -> Feed:
    """The feed that suits: resident on a GPU where all examples fit into a quarter of its free memory, else read ahead.

    Args:
        examples: What is read.
        order: What each batch is made of.
        workers: Threads that read.
        on_bad: `"stop"` at an example that cannot be read, or `"skip"`: read another one in its place.
        device: Where the batches go; the CPU by default.
        say: Called with a sentence on what was chosen and why, and on each example that is damaged.
    """
    if device is None or device.type != "cuda":
        return ReadFeed(
            examples, order, workers=0 if examples.in_memory else workers, on_bad=on_bad, device=device, notice=say
        )
    size = len(examples) * examples.input_nbytes
    room = int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_FREE)
    resident = not examples.varies and size <= room
    if say is not None:
        why = "they are read differently in each epoch" if examples.varies else f"{room / 1e9:.1f} GB are free for them"
        where = f"stay on {device}" if resident else f"are read by {workers} threads"
        say(f"The examples ({size / 1e9:.1f} GB) {where}: {why}.")
    kind = ResidentFeed if resident else ReadFeed
    return kind(examples, order, workers=workers, on_bad=on_bad, device=device, notice=say)


def _all_of(examples: Examples, device: torch.device, workers: int) -> tuple[Tensor, Tensor, dict[int, BadExample]]:
    inputs = torch.from_numpy(examples.empty(0))
    inputs = torch.zeros((len(examples), *inputs.shape[1:]), dtype=inputs.dtype, device=device)
    targets: Tensor | None = None
    damaged: dict[int, BadExample] = {}
    at_once = max(1, AT_ONCE_BYTES // max(1, examples.input_nbytes))
    for piece in in_order(examples, one_pass(len(examples), at_once), workers):
        damaged |= {error.index: error for error in piece.bad}
        if not len(piece.indices_P):
            continue
        rows = torch.from_numpy(piece.indices_P).to(device)
        inputs[rows] = torch.from_numpy(piece.inputs_P).to(device)
        read = torch.from_numpy(piece.targets_P).to(device)
        if targets is None:
            targets = torch.zeros((len(examples), *read.shape[1:]), dtype=read.dtype, device=device)
        targets[rows] = read
    if targets is None:
        raise next(iter(damaged.values()))
    return inputs, targets, damaged

"""Examples that stay on the device: where all of them fit, no step waits for one."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import BadExample
from penstock.train.data import Indices, Places, one_pass
from penstock.train.examples import Examples
from penstock.train.feed import Batch, Feed, ReadFeed, replaced
from penstock.train.reading import OnBad, in_order

# n examples, B examples of a batch

# Of the memory that is free before the first step; the rest is for weights, optimizer and activations.
SHARE_OF_FREE = 0.25
AT_ONCE_BYTES = 1 << 24
# What batches are made of is told to the device for so many examples at once: one copy for many steps.
TOLD_AT_ONCE = 1 << 14


@final
class Resident:
    """All examples of a set, read once, on a device. What could not be read is known by its index.

    Args:
        examples: What is read; `varies` must be false.
        device: Where they stay.
        workers: Threads that read.
        got_on: Called after each piece.

    Raises:
        BadExample: Not one can be read.
    """

    def __init__(
        self,
        examples: Examples,
        device: torch.device,
        workers: int,
        got_on: Callable[[], object] = lambda: None,
    ) -> None:
        assert not examples.varies, examples
        shape, dtype = examples.input_shape, torch.from_numpy(examples.empty(0)).dtype
        inputs = torch.zeros((len(examples), *shape), dtype=dtype, device=device)
        targets: Tensor | None = None
        self.damaged: dict[int, BadExample] = {}
        at_once = max(1, AT_ONCE_BYTES // max(1, examples.input_nbytes))
        for piece in in_order(examples, one_pass(len(examples), at_once), workers):
            got_on()
            self.damaged |= {error.index: error for error in piece.bad}
            if not len(piece.indices_P):
                continue
            rows = torch.from_numpy(piece.indices_P).to(device)
            inputs[rows] = torch.from_numpy(piece.inputs_P).to(device)
            read = torch.from_numpy(piece.targets_P).to(device)
            if targets is None:
                targets = torch.zeros((len(examples), *read.shape[1:]), dtype=read.dtype, device=device)
            targets[rows] = read
        if targets is None:
            raise next(iter(self.damaged.values()))
        self.device, self.inputs, self.targets = device, inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)


@final
class ResidentFeed(Feed):
    """Batches out of resident examples: those that `ReadFeed` would give, bit for bit.

    Args:
        examples: On their device.
        order: What each batch is made of.
        on_bad: As `ReadFeed` has it.
        notice: Called with a sentence when an example is first met that is damaged.
    """

    def __init__(
        self,
        examples: Resident,
        order: Iterator[Places],
        *,
        on_bad: OnBad = "stop",
        notice: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(notice)
        self._examples, self._order = examples, order
        self._on_bad: OnBad = on_bad
        self._told: deque[Tensor] = deque()

    def close(self) -> None:
        """There is nobody to let go."""

    def _next(self) -> Batch:
        examples = self._examples
        if not self._told:
            self._tell()
        rows_B = self._told.popleft()
        return Batch(examples.inputs.index_select(0, rows_B), examples.targets.index_select(0, rows_B))

    def _tell(self) -> None:
        """Bring what the next batches are made of to the device."""
        batches: list[Indices] = []
        count = 0
        for places in self._order:
            batches.append(self._without_damaged(places))
            count += len(batches[-1])
            # Whoever stops at what is damaged stops at its batch, not before.
            if count >= TOLD_AT_ONCE or self._examples.damaged:
                break
        if not batches:
            raise StopIteration
        indices = torch.from_numpy(np.concatenate(batches))
        if self._examples.device.type == "cuda":
            # From pageable memory a copy waits for the steps before, and the host would never be ahead of the device.
            indices = indices.pin_memory()
        rows = indices.to(self._examples.device, non_blocking=True)
        self._told.extend(rows.split([len(indices_B) for indices_B in batches]))

    def _without_damaged(self, places: Places) -> Indices:
        indices_B, damaged = places.indices_B, self._examples.damaged
        attempts_B = np.zeros(len(indices_B), np.int64)
        while damaged and (met := next((index for index in indices_B.tolist() if index in damaged), None)) is not None:
            error = damaged[met]
            if self._on_bad == "stop":
                raise error
            indices_B, rows = replaced(indices_B, places, error, attempts_B, len(self._examples))
            self._count([error] * rows)
        return indices_B


def settle(
    examples: Examples,
    device: torch.device,
    *,
    workers: int,
    say: Callable[[str], object],
    got_on: Callable[[], object] = lambda: None,
) -> "Examples | Resident":
    """Put examples onto a GPU if they are always read alike and fit into a quarter of its free memory.

    Args:
        examples: What is learned from.
        device: Where the steps are.
        workers: Threads that read.
        say: Called with a sentence on what was chosen and why.
        got_on: Called after each piece that was read.

    Returns:
        What `make_feed` takes: the examples as they are, or on the device.
    """
    if device.type != "cuda":
        return examples
    size = len(examples) * examples.input_nbytes
    room = int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_FREE)
    resident = not examples.varies and size <= room
    why = "they are read differently in each epoch" if examples.varies else f"{room / 1e9:.1f} GB are free for them"
    where = f"stay on {device}" if resident else f"are read by {workers} threads"
    say(f"The examples ({size / 1e9:.1f} GB) {where}: {why}.")
    return Resident(examples, device, workers, got_on) if resident else examples


def make_feed(
    examples: "Examples | Resident",
    order: Iterator[Places],
    *,
    workers: int,
    on_bad: OnBad = "stop",
    device: torch.device | None = None,
    notice: Callable[[str], object] | None = None,
) -> Feed:
    """The feed that suits: what is resident is looked up, what is in memory copied, and all else read ahead.

    Args:
        examples: As `settle` gave them, or as they are.
        order: What each batch is made of.
        workers: Threads that read.
        on_bad: `"stop"` at an example that cannot be read, or `"skip"`: read another one in its place.
        device: Where the batches go; the CPU by default.
        notice: Called with a sentence when an example is first found to be damaged.
    """
    if isinstance(examples, Resident):
        return ResidentFeed(examples, order, on_bad=on_bad, notice=notice)
    on_cpu = device is None or device.type == "cpu"
    workers = 0 if examples.in_memory and on_cpu else workers
    return ReadFeed(examples, order, workers=workers, on_bad=on_bad, device=device, notice=notice)

"""Examples kept on the device, where all of them fit."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import final

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import BadExample
from penstock.core.record import Lengths
from penstock.core.wording.counted import counted
from penstock.train.data.collate import cut, room_of
from penstock.train.data.examples import Examples
from penstock.train.data.loader import Batch, Loader, ReadingLoader
from penstock.train.data.readers import OnBad, Piece, in_order, replaced
from penstock.train.data.sampler import BatchIndices, Indices, one_pass
from penstock.train.data.trees import Tree, leaves, mapped

# n examples, B examples of a batch

# Share of the free memory; the rest is for weights, optimizer state and activations.
SHARE_OF_FREE = 0.25
AT_ONCE_BYTES = 1 << 24
# Indices of many batches are copied to the device at once.
INDICES_AT_ONCE = 1 << 14


@final
class Resident:
    """All examples of a set, read once, on a device.

    Args:
        examples: The set; `varies` must be false.
        device: The device.
        workers: Reading threads.
        on_piece: Called after each piece.

    Raises:
        BadExample: No example can be read.
    """

    def __init__(
        self,
        examples: Examples,
        device: torch.device,
        workers: int,
        on_piece: Callable[[], object] = lambda: None,
    ) -> None:
        assert not examples.varies, examples
        self.record, self.target_axes = examples.record, examples.target_axes
        self.lengths: dict[str, Lengths] = {}
        inputs: Tree = None
        targets: Tree = None
        self.damaged: dict[int, BadExample] = {}

        def room_for(part: Tensor) -> Tensor:
            return torch.zeros((len(examples), *part.shape[1:]), dtype=part.dtype, device=device)

        at_once = max(1, AT_ONCE_BYTES // max(1, examples.input_nbytes))
        for piece in in_order(examples, one_pass(len(examples), at_once), workers):
            on_piece()
            self.damaged |= {error.index: error for error in piece.bad}
            if not len(piece.indices_P):
                continue
            rows = torch.from_numpy(piece.indices_P).to(device)
            read_inputs, read_targets = self._tensors(piece)
            if targets is None:
                inputs, targets = mapped(room_for, read_inputs), mapped(room_for, read_targets)
            for whole, part in zip(leaves((inputs, targets)), leaves((read_inputs, read_targets)), strict=True):
                whole[rows] = part.to(device)
        if targets is None:
            raise next(iter(self.damaged.values()))
        self.device, self.inputs, self.targets = device, inputs, targets
        if self.record is not None:
            # On the host too, so that the length of a batch needs no host synchronization.
            self.lengths = {name: inputs[name].cpu().numpy() for name in self.record.dims}

    def _tensors(self, piece: Piece) -> tuple[Tree, Tree]:
        targets = mapped(torch.from_numpy, piece.targets_P)
        if self.record is None:
            return torch.from_numpy(piece.inputs_P), targets
        batch = self.record.batch(piece.inputs_P, room_of(self.record, None))
        return mapped(torch.from_numpy, batch | self.record.lengths(piece.inputs_P)), targets

    def __len__(self) -> int:
        return len(leaves(self.inputs)[0])

    def cut(self, inputs_B: Tree, targets_B: Tree, room: dict[str, int]) -> tuple[Tree, Tree]:
        """Cut a batch to the lengths of its longest example."""
        assert self.record is not None, room
        shapes = {spec.name: tuple(getattr(size, "name", None) for size in spec.shape) for spec in self.record.tensors}
        axes = shapes | dict.fromkeys(self.record.dims, ())
        return cut(inputs_B, axes, room), cut(targets_B, self.target_axes, room)


@final
class ResidentLoader(Loader):
    """Batches of resident examples, bit for bit those of `ReadingLoader`.

    Args:
        examples: On their device.
        order: The examples of each batch.
        on_bad: As of `ReadingLoader`.
        notify: Called with a sentence when an example is first met that is damaged.
        to_max: Pad to the largest lengths, as `Collate`.
    """

    def __init__(
        self,
        examples: Resident,
        order: Iterator[BatchIndices],
        *,
        on_bad: OnBad = "stop",
        notify: Callable[[str], object] | None = None,
        to_max: bool = False,
    ) -> None:
        super().__init__(order, on_bad, notify)
        self._examples, self._cuts = examples, bool(examples.lengths) and not to_max
        self._rows: deque[Tensor] = deque()
        self._rooms: deque[dict[str, int]] = deque()

    def close(self) -> None:
        """Nothing to stop."""

    def _next(self) -> Batch:
        examples = self._examples
        if not self._rows:
            self._copy_indices()
        rows_B = self._rows.popleft()

        def select(whole: Tensor) -> Tensor:
            return whole.index_select(0, rows_B)

        inputs, targets = mapped(select, examples.inputs), mapped(select, examples.targets)
        return Batch(*(examples.cut(inputs, targets, self._rooms.popleft()) if self._cuts else (inputs, targets)))

    def _copy_indices(self) -> None:
        """Copy the indices of the next batches to the device."""
        batches: list[Indices] = []
        count = 0
        for places in self._order:
            batches.append(self._without_damaged(places))
            if self._cuts:
                lengths = {name: lengths_n[batches[-1]] for name, lengths_n in self._examples.lengths.items()}
                self._rooms.append(room_of(self._examples.record, lengths))
            count += len(batches[-1])
            # With on_bad="stop" the error must come with its batch, not before.
            if count >= INDICES_AT_ONCE or self._examples.damaged:
                break
        if not batches:
            raise StopIteration
        indices = torch.from_numpy(np.concatenate(batches))
        if self._examples.device.type == "cuda":
            # A copy from pageable memory would wait for the steps before.
            indices = indices.pin_memory()
        rows = indices.to(self._examples.device, non_blocking=True)
        self._rows.extend(rows.split([len(indices_B) for indices_B in batches]))

    def _without_damaged(self, places: BatchIndices) -> Indices:
        indices_B, damaged = places.indices_B, self._examples.damaged
        attempts_B = np.zeros(len(indices_B), np.int64)
        while damaged and (met := next((index for index in indices_B.tolist() if index in damaged), None)) is not None:
            error = damaged[met]
            if self._on_bad == "stop":
                raise error
            indices_B, rows = replaced(indices_B, places, error, attempts_B, len(self._examples))
            self._count([error] * rows)
        return indices_B


def keep_on_device(
    examples: Examples,
    device: torch.device,
    *,
    workers: int,
    notify: Callable[[str], object],
    on_piece: Callable[[], object] = lambda: None,
) -> "Examples | Resident":
    """Put examples onto a GPU if they do not vary and fit into a quarter of its free memory.

    Args:
        examples: The training set.
        device: The device of the steps.
        workers: Reading threads.
        notify: Called with a sentence on the choice and its reason.
        on_piece: Called after each piece.

    Returns:
        The examples, unchanged or on the device, for `make_loader`.
    """
    if device.type != "cuda":
        return examples
    size = len(examples) * examples.input_nbytes
    room = int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_FREE)
    resident = not examples.varies and size <= room
    why = "they are read differently in each epoch" if examples.varies else f"{room / 1e9:.1f} GB are free for them"
    where = f"stay on {device}" if resident else f"are read by {counted(workers, 'thread')}"
    notify(f"The examples ({size / 1e9:.1f} GB) {where}: {why}.")
    return Resident(examples, device, workers, on_piece) if resident else examples


def make_loader(
    examples: "Examples | Resident",
    order: Iterator[BatchIndices],
    *,
    workers: int,
    on_bad: OnBad = "stop",
    device: torch.device | None = None,
    notify: Callable[[str], object] | None = None,
    to_max: bool = False,
) -> Loader:
    """Make the loader for resident examples, examples in memory, or others.

    Args:
        examples: The result of `keep_on_device`, or a set.
        order: The examples of each batch.
        workers: Reading threads.
        on_bad: `"stop"` at an example that cannot be read, or `"skip"`: read another one in its place.
        device: The device of the batches; the CPU by default.
        notify: Called with a sentence when an example is first found to be damaged.
        to_max: Pad to the largest lengths, as `Collate`.
    """
    if isinstance(examples, Resident):
        return ResidentLoader(examples, order, on_bad=on_bad, notify=notify, to_max=to_max)
    on_cpu = device is None or device.type == "cpu"
    workers = 0 if examples.in_memory and on_cpu else workers
    return ReadingLoader(examples, order, workers=workers, on_bad=on_bad, device=device, notify=notify, to_max=to_max)

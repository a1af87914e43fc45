"""The state of answers in progress: batched tensors that rows join and leave between steps.

One tensor for each name of the declared state, rows first, and the lengths `[B]` of each `Dim` under its name. A
dimension that varies has as much room as the longest row needs, in whole pages, so that memory and time follow what is
used. What lies beyond a row's length is padding.

Tensors may have room for more rows than there are. The rows in use come first, so that they are one contiguous view:
where rows leave, the last ones take their places, and nothing else is moved.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.errors import ApplicationError
from penstock.core.record import Lengths
from penstock.core.state_layout import StateLayout

# B rows in progress

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RowsState:
    """The state of some rows.

    Args:
        rows: Their number, B.
        tensors: By name, `[B or more, ...]`: those of the declared state, and the lengths.
        lengths: Host copies of the lengths, `[B]` of each dimension.
        room: Sizes of the dimensions that vary, the same in every tensor.
        owned: Names of the tensors whose memory is this state's alone, so that rows may be written in place.
    """

    rows: int
    tensors: dict[str, Tensor]
    lengths: dict[str, Lengths]
    room: dict[str, int]
    owned: frozenset[str] = frozenset()

    def named(self) -> dict[str, Tensor]:
        """The tensors of the rows in use."""
        return {name: tensor[: self.rows] for name, tensor in self.tensors.items()}


def check_lengths(layout: StateLayout, tensors: Mapping[str, Tensor], lengths: Mapping[str, Lengths]) -> None:
    """Check the lengths that a network's `begin` gave.

    Raises:
        ApplicationError: A length is out of range.
    """
    for _, why in length_errors(layout, tensors, lengths):
        raise ApplicationError(why)


def length_errors(
    layout: StateLayout, tensors: Mapping[str, Tensor], lengths: Mapping[str, Lengths]
) -> Iterator[tuple[Mask, str]]:
    """Yield the rows `[B]` whose lengths are out of range, and why, for each axis that has such rows."""
    for name, axes in layout.axes.items():
        for axis, dim in axes:
            most = int(layout.dims[dim])
            size = min(tensors[name].shape[axis], most)
            bad_B = (lengths[dim] < 0) | (lengths[dim] > size)
            if bad_B.any():
                yield (
                    bad_B,
                    f"the network's begin gives {name!r} with room for {size:,} {dim}, but the lengths "
                    f"{lengths[dim][bad_B].tolist()!r:.80}; the lengths must be from 0 to that room.",
                )
            full_B = lengths[dim] == most
            if dim in layout.growing and full_B.any():
                yield (
                    full_B,
                    f"the network's begin gives {name!r} with {most:,} {dim}, which is all that Dim({dim!r}, "
                    f"max={most}) allows, so that no step has room; the lengths must be less. Raise max.",
                )


def for_step(layout: StateLayout, state: RowsState) -> dict[str, Tensor]:
    """Return the tensors of the rows in use, as a network's `step` takes them.

    Tensors of a fixed size and the lengths are copies: they are small, and a step that raises after it wrote them in
    place is run again for some of its rows.
    """
    return {name: tensor if layout.axes.get(name) else tensor.clone() for name, tensor in state.named().items()}


def with_own_memory(layout: StateLayout, state: RowsState) -> RowsState:
    """Return a state in which each tensor that grows has memory of its own."""
    growing = {name for name, axes in layout.axes.items() if any(dim in layout.growing for _, dim in axes)}
    copied = {name: state.tensors[name].clone(memory_format=torch.contiguous_format) for name in growing - state.owned}
    return replace(state, tensors=state.tensors | copied, owned=state.owned | growing)


def with_room(layout: StateLayout, state: RowsState, room: Mapping[str, int]) -> RowsState:
    """Return a state with these sizes of the dimensions that vary, at least the longest lengths."""
    changed = [name for name in layout.axes if not _has_room(layout, name, state.tensors[name], room)]
    if not changed:
        return replace(state, room=dict(room))
    tensors = dict(state.tensors)
    for name in changed:
        most = min(len(tensors[name]), _spare(state.rows))
        tensors[name] = _resized(layout, name, tensors[name][: state.rows], max(most, state.rows), room)
    return replace(state, tensors=tensors, room=dict(room), owned=state.owned | set(changed))


def joined(layout: StateLayout, states: Sequence[RowsState], *, max_rows: int) -> RowsState:
    """Return one state with the rows of several, in order; the memory of the first is used again where it suffices.

    Args:
        layout: The declared state.
        states: At least one.
        max_rows: The most rows that will ever be together.
    """
    first, *others = states
    if not others:
        return first
    rows = sum(state.rows for state in states)
    lengths = {name: np.concatenate([state.lengths[name] for state in states]) for name in first.lengths}
    room = layout.room(lengths)
    tensors: dict[str, Tensor] = {}
    for name, tensor in first.tensors.items():
        fits = name in first.owned and len(tensor) >= rows
        if not fits or not _has_room(layout, name, tensor, room):
            # Small tensors, which steps often replace, are copied each time.
            most = min(max_rows, _spare(rows)) if layout.axes.get(name) else rows
            tensor = _resized(layout, name, tensor[: first.rows], max(most, rows), room)
        start = first.rows
        for state in others:
            part = state.tensors[name][: state.rows]
            tensor[start : start + state.rows] = _resized(layout, name, part, state.rows, room)
            start += state.rows
        tensors[name] = tensor
    return RowsState(rows=rows, tensors=tensors, lengths=lengths, room=room, owned=frozenset(tensors))


def kept(layout: StateLayout, state: RowsState, keep_B: Mask) -> tuple[RowsState, Rows]:
    """Return the state without some rows, and for each row that stays its place before.

    Args:
        layout: The declared state.
        state: The state.
        keep_B: The rows that stay.
    """
    rows = int(np.count_nonzero(keep_B))
    order: Rows = np.arange(rows)
    holes = np.flatnonzero(~keep_B[:rows])
    order[holes] = movers = rows + np.flatnonzero(keep_B[rows:])
    tensors: dict[str, Tensor] = {}
    owned = set(state.owned)
    # To the device once, not for each tensor.
    to, from_, all_from = (_index(index, state) for index in (holes, movers, order))
    for name, tensor in state.tensors.items():
        if name not in owned or len(tensor) > 4 * _spare(rows):
            tensors[name] = tensor.index_select(0, all_from)
            owned.add(name)
        else:
            if holes.size:
                tensor.index_copy_(0, to, tensor.index_select(0, from_))
            tensors[name] = tensor
    left = RowsState(
        rows=rows,
        tensors=tensors,
        lengths={name: each[order] for name, each in state.lengths.items()},
        room=state.room,
        owned=frozenset(owned),
    )
    room = layout.room(left.lengths)
    return with_room(layout, left, {name: min(room[name], state.room[name]) for name in room}), order


def part_of(state: RowsState, index_B: Rows) -> RowsState:
    """Return copies of some rows."""
    index = _index(index_B, state)
    return replace(
        state,
        rows=index_B.size,
        tensors={name: tensor.index_select(0, index) for name, tensor in state.tensors.items()},
        lengths={name: each[index_B] for name, each in state.lengths.items()},
        owned=frozenset(state.tensors),
    )


def stepped(state: RowsState, after: Mapping[str, Tensor], lengths: Mapping[str, Lengths]) -> RowsState:
    """Return the state after a step.

    Args:
        state: The state before.
        after: What the network returned, `[B, ...]`; tensors that it wrote in place stay where they are.
        lengths: The new lengths `[B]` of the dimensions that grow.
    """
    tensors, owned = dict(state.tensors), set(state.owned)
    for name, tensor in after.items():
        if not is_same(tensor, state.tensors[name][: state.rows]):
            tensors[name] = tensor
            owned.discard(name)
    return replace(state, tensors=tensors, lengths={**state.lengths, **lengths}, owned=frozenset(owned))


def _spare(rows: int) -> int:
    """Rows to have memory for: half as many again, so that those who join soon need no new memory."""
    return rows + rows // 2 + 1


def _has_room(layout: StateLayout, name: str, tensor: Tensor, room: Mapping[str, int]) -> bool:
    return all(tensor.shape[axis] == room[dim] for axis, dim in layout.axes.get(name, ()))


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory in the same layout."""
    same = one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
    return one is other or (same and one.shape == other.shape and one.stride() == other.stride())


def _resized(layout: StateLayout, name: str, tensor: Tensor, rows: int, room: Mapping[str, int]) -> Tensor:
    """Copy a tensor into new memory with room for `rows` rows."""
    sizes = list(tensor.shape)
    copied: list[Any] = [slice(len(tensor))]
    sizes[0] = rows
    for axis, dim in layout.axes.get(name, ()):
        sizes[axis] = room[dim]
    copied += [slice(min(old, new)) for old, new in zip(tensor.shape[1:], sizes[1:], strict=True)]
    if list(tensor.shape) == sizes:
        return tensor.clone(memory_format=torch.contiguous_format)
    fill = layout.padding if tensor.is_floating_point() else 0
    made = tensor.new_full(sizes, fill)
    made[tuple(copied)] = tensor[tuple(copied)]
    return made


def _index(index: Rows, state: RowsState) -> Tensor:
    return torch.from_numpy(index).to(next(iter(state.tensors.values())).device)


def lengths_on(lengths: Mapping[str, Lengths], names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """Return some lengths `[B]` as tensors."""
    return {name: torch.from_numpy(lengths[name]).to(device) for name in names}

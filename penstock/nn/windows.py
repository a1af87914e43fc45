"""Sliding windows over a stream, for convolutions over time, lookahead and spectrograms.

The state keeps the frames of a row that later windows need, so the windows are those of the whole sequence for any
division into chunks.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from penstock.core.errors import ApplicationError
from penstock.nn.streaming import State, Step, Streaming, like_frames, valid_alone

# B batch, T frames of a chunk, P frames that may wait, M room for both and for the zeros at the end

# Maximal number of windows that an exported graph slices one by one.
MAX_SLICES = 32


class Ready(NamedTuple):
    """The frames from which windows can be taken now.

    Args:
        frames_BM: `[B, M, ...]`, the waiting frames and the chunk of each row, then zeros.
        windows_B: Number of complete windows of each row; they begin at 0, `stride`, 2 `stride` ...
        state: Frames that wait for the next chunk, and their number.
    """

    frames_BM: Tensor
    windows_B: Tensor
    state: State


@final
class Windows:
    """Windows of `size` frames, one every `stride` frames.

    Args:
        size: Frames of a window.
        stride: Frames from the start of a window to the start of the next, at most `size`.
        before: Zeros before a stream's first frame.
        after: Zeros after its last frame; `before + after` is below `size`.
    """

    def __init__(self, size: int, stride: int = 1, *, before: int = 0, after: int = 0) -> None:
        if not 1 <= stride <= size or before < 0 or after < 0 or before + after >= size:
            raise ApplicationError(
                f"Windows of {size} frames, one every {stride}, with {before} zeros before and {after} behind: the "
                f"stride must be 1 to {size}, and the zeros together fewer than {size}."
            )
        self.size = size
        self.stride = stride
        self.before = before
        self.after = after

    def count(self, length_B: Tensor) -> Tensor:
        """Compute the number of windows of whole sequences."""
        return self._whole(length_B + (self.before + self.after))

    def over(self, whole_BT: Tensor, length_B: Tensor | None, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function to every window of whole sequences, padded with the zeros before and after them.

        Args:
            whole_BT: `[B, T, ...]`.
            length_B: Number of valid frames of each row; the others count as zeros.
            function: Maps `[B, M, ...]` to `[B, U, ...]`, one output per window.
        """
        whole_BT = valid_alone(whole_BT, length_B)
        frames = whole_BT.shape[1]
        # Pad to at least one window; its output is dropped if it is not a real one.
        after = max(self.after, self.size - self.before - frames)
        zeros_BS = whole_BT.new_zeros(whole_BT.shape[0], self.size, *whole_BT.shape[2:])
        output_BU = function(torch.cat([zeros_BS[:, : self.before], whole_BT, zeros_BS[:, :after]], 1))
        return output_BU[:, : max(0, (frames + self.before + self.after - self.size) // self.stride + 1)]

    def each(self, frames_BM: Tensor) -> Tensor:
        """Return all windows of `[B, M, ...]`, as `[B, U, ..., size]`."""
        windows = (frames_BM.shape[1] - self.size) // self.stride + 1
        if not torch.compiler.is_exporting() or windows > MAX_SLICES:
            return frames_BM.unfold(1, self.size, self.stride)
        # ONNX has no unfold; its replacement gathers every number by itself.
        begins = range(0, windows * self.stride, self.stride)
        return torch.stack([frames_BM[:, begin : begin + self.size] for begin in begins], 1).movedim(2, -1)

    def initial_state(self, frame_B: Tensor) -> State:
        """Return the state of new streams, for frames like `[B, ...]`."""
        batch = frame_B.shape[0]
        waiting_BP = frame_B.new_zeros(batch, self.size - 1, *frame_B.shape[1:])
        return waiting_BP, torch.full((batch,), self.before, dtype=torch.int64, device=frame_B.device)

    def take(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Ready:
        """Join the waiting frames and the chunk, and keep the frames that later windows need."""
        waiting_BP, waits_B = cast(tuple[Tensor, Tensor | int], state)
        if isinstance(waits_B, int):
            # A constant in the exported graph of steady batches: see `penstock.runtime.onnx.onnx_export`.
            return self._take_uniform(chunk_BT, waiting_BP, waits_B)
        # An exported graph must hold for every batch, and on a GPU the check would synchronize the host.
        checks = not (torch.compiler.is_exporting() or chunk_BT.is_cuda)
        if checks and _is_uniform(chunk_BT, length_B, waits_B, last_B):
            return self._take_uniform(chunk_BT, waiting_BP, int(waits_B[0]))
        waiting, frames = waiting_BP.shape[1], chunk_BT.shape[1]
        total_B = waits_B + length_B
        at_M = torch.arange(waiting + frames + self.after, device=chunk_BT.device)
        # `joined` holds the waiting frames at 0 and the chunk at `waiting`, each followed by padding.
        index_BM = torch.where(at_M < waits_B[:, None], at_M, at_M - waits_B[:, None] + waiting)
        joined = torch.cat([waiting_BP, chunk_BT.to(waiting_BP.dtype)], 1)
        frames_BM = _rows_of(joined, index_BM.clamp(max=waiting + frames - 1))
        frames_BM = torch.where(like_frames(at_M < total_B[:, None], frames_BM), frames_BM, 0)
        if last_B is not None:
            total_B = total_B + self.after * last_B
        windows_B = self._whole(total_B)
        taken_B = windows_B * self.stride
        left_BP = taken_B[:, None] + at_M[:waiting]
        waiting_BP = _rows_of(frames_BM, left_BP.clamp(max=at_M.shape[0] - 1))
        waits_B = total_B - taken_B
        waiting_BP = torch.where(like_frames(at_M[:waiting] < waits_B[:, None], waiting_BP), waiting_BP, 0)
        return Ready(frames_BM, windows_B, (waiting_BP, waits_B))

    def _take_uniform(self, chunk_BT: Tensor, waiting_BP: Tensor, waits: int) -> Ready:
        """Do the same by slices, for rows with whole chunks and equally many waiting frames."""
        waiting = waiting_BP.shape[1]
        total = waits + chunk_BT.shape[1]
        windows = max(0, (total - self.size) // self.stride + 1)
        taken = windows * self.stride
        room = chunk_BT.shape[1] + waiting + self.after
        behind_BP = waiting_BP.new_zeros(waiting_BP.shape[0], waiting + room - total, *waiting_BP.shape[2:])
        frames_BM = torch.cat([waiting_BP[:, :waits], chunk_BT.to(waiting_BP.dtype), behind_BP], 1)
        left_BP = frames_BM[:, taken : taken + waiting]
        windows_B = torch.full(chunk_BT.shape[:1], windows, device=chunk_BT.device)
        return Ready(frames_BM[:, :room], windows_B, (left_BP, torch.full_like(windows_B, total - taken)))

    def _whole(self, frames_B: Tensor) -> Tensor:
        return torch.where(frames_B >= self.size, (frames_B - self.size) // self.stride + 1, 0)


class Windowed(Streaming):
    """A layer that computes each output from one window of frames.

    Args:
        windows: The windows.
    """

    def __init__(self, windows: Windows) -> None:
        super().__init__()
        self.windows = windows

    @abstractmethod
    def empty(self, batch: int) -> Tensor:
        """Return a frame of zeros for each row, `[B, ...]`, with the parameters' device and dtype."""

    @abstractmethod
    def over(self, frames_BM: Tensor) -> Tensor:
        """Compute an output for each window of `[B, M, ...]`."""

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, ...]` to `[B, U, ...]`, one output for each window."""
        return self.windows.over(whole_BT, length_B, self.over)

    def output_lengths(self, length_B: Tensor) -> Tensor:
        """The number of windows."""
        return self.windows.count(length_B)

    def initial_state(self, batch: int) -> State:
        """The frames before the first one: zeros, or none."""
        return self.windows.initial_state(self.empty(batch))

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`; a stream's last step also returns delayed outputs."""
        ready = self.windows.take(chunk_BT, length_B, state, last_B)
        return Step(self.over_chunk(ready.frames_BM), ready.windows_B, ready.state)

    def over_chunk(self, frames_BM: Tensor) -> Tensor:
        """As `over`, for the few frames of a chunk."""
        return self.over(frames_BM)


def _is_uniform(chunk_BT: Tensor, length_B: Tensor, waits_B: Tensor, last_B: Tensor | None) -> bool:
    ends = last_B is not None and bool(last_B.any())
    return not ends and bool((length_B == chunk_BT.shape[1]).all()) and bool((waits_B == waits_B[0]).all())


def _rows_of(frames_BM: Tensor, index_BN: Tensor) -> Tensor:
    # Three times as fast as indexing by rows and columns.
    shape = frames_BM.shape[2:]
    index_BN = index_BN.reshape(*index_BN.shape, *[1] * len(shape)).expand(*index_BN.shape, *shape)
    return torch.gather(frames_BM, 1, index_BN)

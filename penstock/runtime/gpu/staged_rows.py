"""Rows of the slot table on their way to a GPU, while the batch before them runs there."""

import time
from typing import final

import torch
from torch import Tensor

from penstock.kernels.table_rows import stage_rows
from penstock.runtime.gpu.capture import reserved_stream

# B rows of the batch, E entries of the table, S staged rows, R numbers of a row

# Batches of staged rows: one is read by a graph while the next is written.
STAGED = 2


@final
class StagedRows:
    """Rows on their way to the GPU, in buffers that are used in turn.

    Args:
        table_ER: The page-locked table.
        rows: The largest batch.
        device: The GPU.
    """

    def __init__(self, table_ER: Tensor, rows: int, device: torch.device) -> None:
        self._table_ER, self._rows, self._device = table_ER, rows, device
        self._reserved = reserved_stream(device, 0)
        self._entries = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(STAGED)]
        self._staged, self._read = ([torch.cuda.Event() for _ in range(STAGED)] for _ in range(2))
        self._next = 0
        self.rows_SR = torch.zeros(STAGED * rows, table_ER.shape[1], dtype=table_ER.dtype, device=device)

    def stage(self, entries_B: Tensor) -> int:
        """Bring rows to the GPU, and let the current stream wait for them; `mark_read` follows.

        Returns:
            The index of the first one.
        """
        self._next = (self._next + 1) % STAGED
        rows, start = len(entries_B), self._next * self._rows
        entries = self._entries[self._next][:rows]
        with torch.cuda.stream(self._reserved.stream):
            self._reserved.stream.wait_event(self._read[self._next])
            entries.copy_(entries_B, non_blocking=True)
            stage_rows(self._table_ER, entries, self.rows_SR[start : start + rows])
            self._staged[self._next].record()
        torch.cuda.current_stream(self._device).wait_event(self._staged[self._next])
        return start

    def mark_read(self) -> None:
        """Let the buffer be written again behind what was launched in the current stream."""
        self._read[self._next].record()

    def row_ns(self) -> float:
        """Measure the time that a row takes."""
        entries = torch.arange(self._rows).remainder(len(self._table_ER)).pin_memory()
        stream = self._reserved.stream
        # The kernel may have to be compiled for each buffer.
        for _ in range(STAGED):
            self.stage(entries)
        stream.synchronize()
        start_ns = time.perf_counter_ns()
        self.stage(entries)
        stream.synchronize()
        return (time.perf_counter_ns() - start_ns) / self._rows

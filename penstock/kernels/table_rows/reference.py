"""Reference implementation in plain torch."""

import torch
from torch import Tensor

# E rows of the table, B rows of the batch, R numbers of a row


def gather_rows(table_ER: Tensor, row_B: Tensor, staged_SR: Tensor | None = None) -> Tensor:
    """Gather rows of a table, `[B, R]`, on the device of their indices.

    Args:
        table_ER: In the host's memory.
        row_B: Indices of the rows, int64, from 0 to E - 1; negative ones name staged rows, -1 the first.
        staged_SR: Rows that are on the device already.
    """
    given_B = row_B.to(table_ER.device)
    if staged_SR is None:
        return table_ER[given_B].to(row_B.device)
    found_BR = table_ER[given_B.clamp(0)].to(row_B.device)
    return torch.where(row_B[:, None] >= 0, found_BR, staged_SR[(-1 - row_B).clamp(0)])


def stage_rows(table_ER: Tensor, row_B: Tensor, out_BR: Tensor) -> None:
    """Gather rows of a table into a buffer on the device, beside what else the device does.

    Args:
        table_ER: In the host's memory.
        row_B: Indices of the rows, int64, on the device.
        out_BR: Where they go.
    """
    out_BR.copy_(gather_rows(table_ER, row_B))


def scatter_rows(values_BR: Tensor, row_B: Tensor, table_ER: Tensor) -> None:
    """Put rows into a table.

    Args:
        values_BR: The rows, of the table's dtype.
        row_B: Index of each row in the table, int64, unique; negative indices are skipped.
        table_ER: In the host's memory.
    """
    goes_B = row_B >= 0
    rows = row_B[goes_B].to(table_ER.device)
    table_ER[rows] = values_BR[goes_B].to(table_ER.device, non_blocking=False)
    if values_BR.is_cuda:
        torch.cuda.current_stream(values_BR.device).synchronize()

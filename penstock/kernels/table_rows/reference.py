"""Reference implementation in plain torch."""

import torch
from torch import Tensor

# E rows of the table, B rows of the batch, R numbers of a row


def gather_rows(table_ER: Tensor, row_B: Tensor) -> Tensor:
    """The rows of a table, `[B, R]`, where their numbers are.

    Args:
        table_ER: In the host's memory.
        row_B: Which, int64, of 0 to E - 1.
    """
    return table_ER[row_B.to(table_ER.device)].to(row_B.device)


def scatter_rows(values_BR: Tensor, row_B: Tensor, table_ER: Tensor) -> None:
    """Put rows into a table.

    Args:
        values_BR: The rows, of the table's dtype.
        row_B: Where each goes, int64, no two to one place; a negative one goes nowhere.
        table_ER: In the host's memory.
    """
    goes_B = row_B >= 0
    rows = row_B[goes_B].to(table_ER.device)
    table_ER[rows] = values_BR[goes_B].to(table_ER.device, non_blocking=False)
    if values_BR.is_cuda:
        torch.cuda.current_stream(values_BR.device).synchronize()

"""Dispatch between kernel and reference."""

from functools import cache
from types import ModuleType

from torch import Tensor

from penstock.kernels.common import HAS_TRITON, logged
from penstock.kernels.table_rows import reference

SUBJECT = "rows of tables are moved"


def gather_rows(table_ER: Tensor, row_B: Tensor) -> Tensor:
    """See `reference.gather_rows`."""
    return chosen(row_B.device.type, table_ER.is_pinned()).gather_rows(table_ER, row_B)


def scatter_rows(values_BR: Tensor, row_B: Tensor, table_ER: Tensor) -> None:
    """See `reference.scatter_rows`."""
    chosen(row_B.device.type, table_ER.is_pinned()).scatter_rows(values_BR, row_B, table_ER)


@cache
def chosen(device: str, pinned: bool) -> ModuleType:
    """Choose the implementation for a device; logged once."""
    if device != "cuda":
        return logged(reference, SUBJECT, "torch", f"{device} has the host's memory")
    if not pinned:
        return logged(reference, SUBJECT, "torch", "the table's memory is not page-locked")
    if not HAS_TRITON:
        return logged(reference, SUBJECT, "torch", "the package triton is not installed")
    from penstock.kernels.table_rows import triton

    return logged(triton, SUBJECT, "Triton", "the GPU reaches the table where it is")

"""Dispatch between kernel and reference."""

from functools import cache
from types import ModuleType

from torch import Tensor

from penstock.kernels.common import HAS_TRITON, logged, without_triton
from penstock.kernels.table_rows import reference

SUBJECT = "rows of tables are moved"


def gather_rows(table_ER: Tensor, row_B: Tensor, staged_SR: Tensor | None = None) -> Tensor:
    """See `reference.gather_rows`."""
    return chosen(row_B.device.type, table_ER.is_pinned()).gather_rows(table_ER, row_B, staged_SR)


def stage_rows(table_ER: Tensor, row_B: Tensor, out_BR: Tensor) -> None:
    """See `reference.stage_rows`."""
    chosen(row_B.device.type, table_ER.is_pinned()).stage_rows(table_ER, row_B, out_BR)


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
        return without_triton(reference, SUBJECT)
    from penstock.kernels.table_rows import triton

    return logged(triton, SUBJECT, "Triton", "the GPU reaches the table where it is")

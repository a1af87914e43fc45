"""The kernels that move rows between the host's table and the GPU, beside their reference."""

import pytest
import torch

from penstock.kernels.table_rows import gather_rows, reference, scatter_rows
from penstock.kernels.table_rows.dispatch import chosen

# Rows of the table, rows of the batch and numbers of a row.
SHAPES = ((1, 1, 1), (7, 3, 5), (64, 64, 784), (4096, 1000, 1280), (16_384, 4096, 1280))

pytestmark = pytest.mark.gpu


def rows_of(entries: int, rows: int) -> torch.Tensor:
    return torch.randperm(entries)[:rows].cuda()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("entries", "rows", "numbers"), SHAPES)
def test_rows_come_as_the_reference_brings_them(entries: int, rows: int, numbers: int, dtype: torch.dtype) -> None:
    table_ER = (torch.randn(entries, numbers) * 50).to(dtype).pin_memory()
    row_B = rows_of(entries, rows)
    assert chosen("cuda", True) is not reference
    torch.full((rows, numbers), 77, dtype=dtype, device="cuda")  # what is not written is likely this
    assert torch.equal(gather_rows(table_ER, row_B), reference.gather_rows(table_ER, row_B))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32], ids=str)
@pytest.mark.parametrize(("entries", "rows", "numbers"), SHAPES)
def test_rows_go_as_the_reference_puts_them(entries: int, rows: int, numbers: int, dtype: torch.dtype) -> None:
    values_BR = (torch.randn(rows, numbers) * 50).to(dtype).cuda()
    row_B = rows_of(entries, rows)
    row_B[rows // 2 :: 3] = -1
    ours, expected = (torch.full((entries, numbers), 7, dtype=dtype).pin_memory() for _ in range(2))
    scatter_rows(values_BR, row_B, ours)
    torch.cuda.synchronize()
    reference.scatter_rows(values_BR, row_B, expected)
    assert torch.equal(ours, expected)

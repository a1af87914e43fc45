"""The kernels that move rows between the host's table and the GPU, beside their reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.kernels.table_rows import gather_rows, reference, scatter_rows, stage_rows
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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize(("entries", "rows", "numbers"), [*SHAPES, (512, 256, 150_528)])
def test_rows_are_staged_and_gathered_from_there(entries: int, rows: int, numbers: int, dtype: torch.dtype) -> None:
    table_ER = (torch.randn(entries, numbers) * 50).to(dtype).pin_memory()
    row_B = rows_of(entries, rows)
    staged_SR = torch.full((rows, numbers), 77, dtype=dtype, device="cuda")
    stage_rows(table_ER, row_B, staged_SR)
    assert torch.equal(staged_SR, reference.gather_rows(table_ER, row_B))
    mixed_B = torch.where(torch.arange(rows, device="cuda") % 2 == 0, row_B, -1 - torch.arange(rows, device="cuda"))
    assert torch.equal(gather_rows(table_ER, mixed_B, staged_SR), reference.gather_rows(table_ER, row_B))


def test_staging_keeps_the_bus_busy() -> None:
    testing: Any = pytest.importorskip("triton").testing
    table_ER, rows = torch.zeros(512, 150_528, dtype=torch.uint8).pin_memory(), 256
    row_B, staged_SR = rows_of(512, rows), torch.zeros(rows, 150_528, dtype=torch.uint8, device="cuda")

    def ms(run: Callable[[], object]) -> float:
        return testing.do_bench(run, warmup=5, rep=50, return_mode="median")

    staged_ms, gathered_ms = (
        ms(lambda: stage_rows(table_ER, row_B, staged_SR)),
        ms(lambda: gather_rows(table_ER, row_B)),
    )
    print(f" staged {staged_SR.nbytes / staged_ms / 1e6:.1f} GB/s, gathered {staged_SR.nbytes / gathered_ms / 1e6:.1f}")
    assert staged_ms <= 1.5 * gathered_ms

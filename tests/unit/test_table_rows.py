"""Rows of a table, moved by plain torch."""

import torch

from penstock.kernels.table_rows import gather_rows, scatter_rows, stage_rows


def test_rows_come_in_the_order_asked_for() -> None:
    table = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(gather_rows(table, torch.tensor([2, 0, 2])), table[[2, 0, 2]])


def test_negative_indices_name_rows_that_are_on_the_device() -> None:
    table, staged = torch.arange(12.0).reshape(4, 3), 100 + torch.arange(6.0).reshape(2, 3)
    found = gather_rows(table, torch.tensor([3, -1, 0, -2]), staged)
    assert torch.equal(found, torch.stack([table[3], staged[0], table[0], staged[1]]))


def test_rows_are_staged_in_the_order_asked_for() -> None:
    table, out = torch.arange(12.0).reshape(4, 3), torch.zeros(2, 3)
    stage_rows(table, torch.tensor([3, 1]), out)
    assert torch.equal(out, table[[3, 1]])


def test_rows_go_where_they_belong_and_a_negative_one_goes_nowhere() -> None:
    table = torch.zeros(4, 2)
    scatter_rows(torch.arange(6.0).reshape(3, 2), torch.tensor([3, -1, 0]), table)
    assert table.tolist() == [[4, 5], [0, 0], [0, 0], [0, 1]]

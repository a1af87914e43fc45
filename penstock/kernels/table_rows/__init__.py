"""Rows of a table in the host's memory, to the GPU and back: by kernels that reach them where they are."""

from penstock.kernels.table_rows.dispatch import gather_rows, scatter_rows, stage_rows

__all__ = ["gather_rows", "scatter_rows", "stage_rows"]

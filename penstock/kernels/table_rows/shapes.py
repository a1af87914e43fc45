"""Shapes that tests and benchmarks share: rows of the table, rows of the batch and numbers of a row."""

SHAPES = ((1, 1, 1), (7, 3, 5), (64, 64, 784), (4096, 1000, 1280), (16_384, 4096, 1280))

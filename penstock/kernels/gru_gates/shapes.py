"""Shapes that tests and benchmarks share: rows and hidden units."""

SHAPES = ((1, 1), (3, 7), (1, 1024), (64, 1000), (256, 1024), (1024, 2560), (4096, 2560))

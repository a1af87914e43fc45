"""Shapes that tests and benchmarks share: rows, and classes of this process."""

SHAPES = (
    (1, 1),
    (3, 1),
    (1, 10),
    (64, 1000),
    (5, 8192),
    (7, 8193),
    (256, 43_690),
    (2, 1_400_000),
    (9, 699_999),
    (256, 700_000),
)

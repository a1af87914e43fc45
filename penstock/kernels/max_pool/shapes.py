"""The shapes that tests and measurements share: batch, channels, height, width; kernel, stride, padding."""

SHAPES = (
    ((1, 1, 5, 4), (3, 2, 0)),
    ((2, 3, 7, 9), (3, 2, 1)),
    ((3, 130, 6, 6), (4, 2, 2)),
    ((2, 24, 9, 8), (3, 1, 1)),
    ((2, 8, 11, 7), (5, 3, 0)),
    ((64, 64, 55, 55), (3, 2, 0)),
    ((64, 192, 27, 27), (3, 2, 0)),
    ((64, 64, 112, 112), (3, 2, 1)),
)

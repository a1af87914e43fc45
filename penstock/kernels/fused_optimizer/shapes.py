"""Shapes that tests and benchmarks share: weights that are updated together."""

SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((1,),),
    ((7,), (2048,), (2049,), (5, 3)),
    ((64, 3, 11, 11), (64,), (192, 64, 5, 5), (192,)),
    ((4096, 4608), (4096,), (1000, 4096)),
)

"""`SquareResize` against antialiased interpolation of torch in float64; `Letterbox` is compared in test_app_detect."""

import pytest
import torch
from torch.nn import functional as F

from penstock.core.errors import ApplicationError
from penstock.nn.resize import SquareResize

SIZES = [(1, 1), (1, 2), (3, 1), (8, 8), (15, 17), (37, 64), (101, 300), (300, 101), (375, 500), (40, 4000)]


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("side", [1, 7, 8, 21, 96])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_it_is_the_exact_mean_of_the_middle_square(height: int, width: int, side: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(height * width)
    raw = torch.randint(0, 256, (height, width, channels), dtype=torch.uint8, generator=generator)
    shorter = min(height, width)
    top, left = (height - shorter) // 2, (width - shorter) // 2
    middle = raw[top : top + shorter, left : left + shorter, :3].double().permute(2, 0, 1)[None]
    exact = F.interpolate(middle, (side, side), mode="bilinear", antialias=True)[0].permute(1, 2, 0)
    found = SquareResize(side)(raw)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_side_is_a_whole_number(size: object) -> None:
    with pytest.raises(ApplicationError, match="it must be a whole number of pixels above 0"):
        SquareResize(size)  # pyright: ignore[reportArgumentType]

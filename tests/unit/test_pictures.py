"""Pictures of any size to one size: against torch's own resize, and against plain arithmetic."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.core.errors import ApplicationError
from penstock.nn import SquareResize

SIZES = [(1, 1), (1, 9), (9, 1), (2, 2), (5, 3), (31, 32), (33, 32), (32, 64), (63, 65), (200, 131), (301, 400)]


def picture(height: int, width: int, channels: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(height * 1000 + width)
    return torch.randint(0, 256, (height, width, channels), dtype=torch.uint8, generator=generator)


def by_torch(raw: Tensor, size: int) -> Tensor:
    """The same by torch's own function, in float64."""
    side = min(raw.shape[:2])
    top, left = (raw.shape[0] - side) // 2, (raw.shape[1] - side) // 2
    square = raw[top : top + side, left : left + side, :3].double().permute(2, 0, 1)[None]
    return functional.interpolate(square, (size, size), mode="bilinear", antialias=True)[0].permute(1, 2, 0)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("size", [1, 7, 32, 36])
def test_it_is_what_torch_gives_with_antialias(height: int, width: int, size: int) -> None:
    raw = picture(height, width)
    resized = SquareResize(size)(raw)
    assert resized.shape == (size, size, 3)
    assert resized.dtype == torch.float32
    torch.testing.assert_close(resized.double(), by_torch(raw, size), atol=2e-4, rtol=0)


def test_a_picture_of_the_size_stays_as_it_is() -> None:
    raw = picture(32, 32)
    assert torch.equal(SquareResize(32)(raw), raw[..., :3].float())


def test_one_colour_stays_that_colour() -> None:
    raw = torch.tensor([7, 130, 255, 9], dtype=torch.uint8).expand(143, 77, 4)
    resized = SquareResize(24)(raw)
    torch.testing.assert_close(resized, torch.tensor([7.0, 130.0, 255.0]).expand(24, 24, 3), atol=1e-4, rtol=0)


def test_the_middle_square_is_taken() -> None:
    raw = torch.zeros(10, 31, 4, dtype=torch.uint8)
    raw[:, 10:20] = 200
    assert np.array_equal(SquareResize(5)(raw).numpy(), np.full((5, 5, 3), 200, np.float32))


def test_other_channels_and_kinds_of_numbers_are_taken() -> None:
    raw = picture(50, 40, 3)
    opaque = torch.cat([raw, torch.full((50, 40, 1), 255, dtype=torch.uint8)], 2)
    assert torch.equal(SquareResize(16)(raw), SquareResize(16)(opaque))
    assert torch.equal(SquareResize(16)(raw.float()), SquareResize(16)(raw))


@pytest.mark.parametrize("size", [0, -3, 2.0, True, "96"])
def test_a_wrong_size_is_refused(size: Any) -> None:
    with pytest.raises(ApplicationError, match="it must be a whole number of pixels above 0"):
        SquareResize(size)

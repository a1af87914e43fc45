"""The spectrum under autocast, in which a recipe's bf16 and fp16 are computed."""

import pytest
import torch
from torch import nn

from penstock.nn import LogMel


def quiet_beside_loud() -> torch.Tensor:
    """A tone of 60 Hz, 80 dB above one of 3 kHz."""
    at_T = torch.arange(16_000) / 16_000
    return (20_000 * torch.sin(2 * torch.pi * 60 * at_T) + 2 * torch.sin(2 * torch.pi * 3000 * at_T))[None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_spectrum_under_autocast_is_that_of_float32(dtype: torch.dtype) -> None:
    layer, sound = LogMel(), quiet_beside_loud()
    length = torch.tensor([sound.shape[1]])
    whole = layer(sound)
    stepped = layer.step(sound, length, layer.initial_state(1)).output_BU
    with torch.autocast("cpu", dtype):
        # What comes next is in half precision all the same.
        assert nn.Linear(40, 2)(layer(sound)).dtype == dtype
        assert torch.equal(layer(sound), whole)
        assert torch.equal(layer.step(sound, length, layer.initial_state(1)).output_BU, stepped)

"""Attention over the past: networks with it are exported, and compiled, for signals of any length."""

import pytest
import torch
from torch.export import Dim, export

from penstock.nn import StreamingAttention

LENGTHS = (1, 2, 4, 7, 30)


@pytest.mark.parametrize("left", [0, 5])
def test_an_exported_network_takes_signals_of_other_lengths(left: int) -> None:
    layer = StreamingAttention(8, 2, left).eval()
    torch.nn.init.normal_(layer.distance_bias)
    length = Dim("length", min=1, max=64)
    exported = export(layer, (torch.randn(2, 9, 8),), dynamic_shapes=({1: length},)).module()
    for frames in LENGTHS:
        whole = torch.randn(2, frames, 8)
        torch.testing.assert_close(exported(whole), layer(whole))


def test_the_bias_is_that_of_the_distance() -> None:
    layer = StreamingAttention(2, 1, 2)
    with torch.no_grad():
        layer.distance_bias.copy_(torch.tensor([[10.0, 11.0, 12.0]]))
    none = -torch.inf
    # A chunk of two frames behind three of the past; and a signal that is shorter than the past may be.
    assert layer._bias(2, 5)[0].tolist() == [[none, 12, 11, 10, none], [none, none, 12, 11, 10]]
    assert layer._bias(2, 2)[0].tolist() == [[10, none], [11, 10]]
    assert layer._bias(1, 1)[0].tolist() == [[10]]

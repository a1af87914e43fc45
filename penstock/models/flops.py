"""How much arithmetic a network takes, for the share of a device's peak that a run reaches."""

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def flops(network: nn.Module, raw_B: Tensor, *, backward: bool = False) -> int:
    """Multiplications and additions in the products of one pass over a batch (a multiply-add counts as two).

    Nothing is computed: shapes alone go through the network. Products are convolutions, matrix products and attention;
    what is done number by number is not counted, as is usual. A recurrent network's are those of all its frames.

    Args:
        network: As it is trained; it is neither changed nor run.
        raw_B: A batch of raw inputs, of which only shape and dtype matter.
        backward: Count the gradients of the parameters too, about twice as much again.
    """
    empty = deepcopy(network).to("meta").train(backward)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        outputs = empty(raw_B.to("meta"))
        if backward:
            outputs.sum().backward()
    return counter.get_total_flops()

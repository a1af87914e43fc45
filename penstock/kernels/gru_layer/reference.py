"""Reference implementation in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.gru_gates import reference

# B rows, T frames, F features, H hidden units, G the three gates of all units: reset, update, new


def gru_layer(
    x_BTF: Tensor,
    input_weight_GF: Tensor,
    recurrent_weight_GH: Tensor,
    input_bias_G: Tensor,
    recurrent_bias_G: Tensor,
) -> Tensor:
    """Compute the hidden states `[B, T, H]` of all frames, from a hidden state of zeros.

    The arguments are those of `torch.nn.GRU` with one layer, the batch first, whose answers these are.
    """
    hidden_BH = x_BTF.new_zeros(len(x_BTF), recurrent_weight_GH.shape[1])
    valid_B = torch.ones(len(x_BTF), dtype=torch.bool, device=x_BTF.device)
    hidden: list[Tensor] = []
    for input_BG in functional.linear(x_BTF, input_weight_GF, input_bias_G).unbind(1):
        recurrent_BG = functional.linear(hidden_BH, recurrent_weight_GH, recurrent_bias_G)
        hidden_BH = reference.gru_gates(input_BG, recurrent_BG, hidden_BH, valid_B)
        hidden.append(hidden_BH)
    return torch.stack(hidden, 1)

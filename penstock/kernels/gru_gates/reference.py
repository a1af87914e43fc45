"""Reference implementation in plain torch."""

import torch
from torch import Tensor

# B rows, H hidden units, G the three gates of all units: reset, update, new


def gru_gates(input_BG: Tensor, recurrent_BG: Tensor, hidden_BH: Tensor, valid_B: Tensor) -> Tensor:
    """Compute the hidden state after one more frame; invalid rows keep their state.

    Cho et al. 2014, section 2.3, with the reset gate behind the product, as cuDNN and `torch.nn.GRU` have it.

    Args:
        input_BG: The frame's part of the gates, biases included.
        recurrent_BG: The hidden state's part of the gates, biases included.
        hidden_BH: The hidden state before the frame.
        valid_B: Bool, the rows that have a frame.
    """
    reset_x, update_x, new_x = input_BG.chunk(3, 1)
    reset_h, update_h, new_h = recurrent_BG.chunk(3, 1)
    update = torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return torch.where(valid_B[:, None], new + update * (hidden_BH - new), hidden_BH)

"""The same on a CPU in half as many passes: both gates at once, and tanh by the logistic function."""

import torch
from torch import Tensor


def gru_gates(input_BG: Tensor, recurrent_BG: Tensor, hidden_BH: Tensor, valid_B: Tensor) -> Tensor:
    """As the reference, without gradients; `recurrent_BG` is written over."""
    hidden = hidden_BH.shape[1]
    gates = recurrent_BG[:, : 2 * hidden].add_(input_BG[:, : 2 * hidden]).sigmoid_()
    reset, update = gates[:, :hidden], gates[:, hidden:]
    new = recurrent_BG[:, 2 * hidden :].mul_(reset).add_(input_BG[:, 2 * hidden :])
    new = new.mul_(2).sigmoid_().mul_(2).sub_(1)
    after_BH = torch.lerp(new, hidden_BH, update)
    return after_BH if bool(valid_B.all()) else torch.where(valid_B[:, None], after_BH, hidden_BH)

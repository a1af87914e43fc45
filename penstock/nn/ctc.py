"""CTC loss that reads nothing on the host, so that a CUDA graph can capture it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# B signals, U frames, V symbols, L symbols of a signal

# Of cuDNN: longer texts take torch's own implementation.
MAX_SYMBOLS = 255


def ctc_loss(log_probabilities_BUV: Tensor, symbols_BL: Tensor, frames_B: Tensor | None = None) -> Tensor:
    """CTC loss of a batch: the mean of each signal's loss over its number of symbols.

    Graves et al. 2006, "Connectionist Temporal Classification", section 4. The blank is symbol 0. A signal with fewer
    frames than its symbols need has a loss and a gradient of 0. On a GPU cuDNN computes it, if the texts have at most
    255 symbols and are no float64: without a host synchronization, which torch's own function needs for the lengths.

    Args:
        log_probabilities_BUV: Outputs of the network, whose exponentials add up to 1 over the symbols.
        symbols_BL: Symbols of each signal, padded with blanks at their end, int64.
        frames_B: Frames of each signal; all by default.

    Returns:
        A scalar, float32 or of the type of the outputs if that is wider.
    """
    batch, frames, _ = log_probabilities_BUV.shape
    dtype = torch.promote_types(log_probabilities_BUV.dtype, torch.float32)
    scores_UBV = log_probabilities_BUV.to(dtype).transpose(0, 1)
    lengths_B = (symbols_BL != 0).sum(1)
    if frames_B is None:
        frames_B = torch.full((batch,), frames, device=scores_UBV.device)
    if not takes_cudnn(scores_UBV, symbols_BL):
        return functional.ctc_loss(scores_UBV, symbols_BL, frames_B, lengths_B, 0, zero_infinity=True)
    frames_B = frames_B.to(scores_UBV.device)
    losses_B: Tensor = _CuDNN.apply(scores_UBV.contiguous(), symbols_BL, frames_B, lengths_B)  # pyright: ignore[reportUnknownMemberType, reportAssignmentType]
    # CuDNN 9 takes the loss of a signal without symbols as 0.
    losses_B = torch.where(lengths_B == 0, of_silence(scores_UBV, frames_B), losses_B)
    return (losses_B / lengths_B.clamp(min=1)).mean()


def takes_cudnn(scores_UBV: Tensor, symbols_BL: Tensor) -> bool:
    """Return True if cuDNN computes the loss of such a batch."""
    return (
        scores_UBV.is_cuda
        and symbols_BL.is_cuda
        and scores_UBV.dtype == torch.float32
        and symbols_BL.shape[1] <= MAX_SYMBOLS
        and symbols_BL.numel() > 0
        and torch.backends.cudnn.enabled
        and torch.version.hip is None
    )


def concatenated(symbols_BL: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the symbols of all signals behind one another, `[B * L]`, with blanks after the last."""
    batch, most = symbols_BL.shape
    place_L = torch.arange(most, device=symbols_BL.device)
    at_BL = (lengths_B.cumsum(0) - lengths_B)[:, None] + place_L
    # One more element takes what is padding.
    at_BL = torch.where(place_L < lengths_B[:, None], at_BL, batch * most)
    whole = symbols_BL.new_zeros(batch * most + 1, dtype=torch.int32)
    return whole.scatter_(0, at_BL.flatten(), symbols_BL.flatten().int())[:-1]


def doubled(symbols_BL: Tensor) -> Tensor:
    """Count the symbols that are the same as the one before, `[B]`: a blank lies between."""
    return ((symbols_BL[:, 1:] == symbols_BL[:, :-1]) & (symbols_BL[:, 1:] != 0)).sum(1)


def of_silence(scores_UBV: Tensor, frames_B: Tensor) -> Tensor:
    """Compute the losses of signals without symbols, `[B]`: every frame is blank."""
    valid_UB = torch.arange(len(scores_UBV), device=frames_B.device)[:, None] < frames_B
    return -torch.where(valid_UB, scores_UBV[:, :, 0], 0).sum(0)


class _CuDNN(torch.autograd.Function):
    """The losses `[B]`. Torch's own function checks the lengths on the host, or limits the frames in a capture."""

    @staticmethod
    def forward(ctx: Any, scores_UBV: Tensor, symbols_BL: Tensor, frames_B: Tensor, lengths_B: Tensor) -> Tensor:
        # CuDNN reads beyond its memory for more symbols than frames, and gives gradients of a text that does not fit.
        possible_B = (lengths_B > 0) & (lengths_B + doubled(symbols_BL) <= frames_B)
        lengths_B = torch.minimum(lengths_B, frames_B)
        losses_B, gradient_UBV = torch.ops.aten._cudnn_ctc_loss.Tensor(
            scores_UBV,
            concatenated(symbols_BL, lengths_B),
            frames_B.int(),
            lengths_B.int(),
            0,
            torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic,
            True,
        )
        possible_B = possible_B & losses_B.isfinite()
        ctx.save_for_backward(gradient_UBV, possible_B)
        return torch.where(possible_B, losses_B, 0)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None, None]:
        gradient_UBV, possible_B = ctx.saved_tensors
        (of_loss_B,) = grad_outputs
        return torch.where(possible_B[:, None], gradient_UBV * of_loss_B[:, None], 0), None, None, None

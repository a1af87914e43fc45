"""Batch norm over sequences of different lengths."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.nn.streaming import State, Step, Streaming, like_frames, mask_of

# B batch, T frames, D features


@final
class SequenceBatchNorm(Streaming):
    """Batch norm with the statistics of all valid frames of a batch, over batch and time.

    Laurent et al. 2016, "Batch Normalized Recurrent Neural Networks", section 4, as Amodei et al. 2015, "Deep Speech
    2", section 3.2, use it. Training ignores frames after a row's length. In serving the running statistics make it a
    scale and a shift of each feature.

    Args:
        features: Features of a frame, in the last dimension.
        momentum: Weight of a batch in the running statistics.
        eps: Added to the variance.
    """

    mean_D: Tensor
    variance_D: Tensor

    def __init__(self, features: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("mean_D", torch.zeros(features))
        self.register_buffer("variance_D", torch.ones(features))

    def forward(self, whole_BT: Tensor, length_B: Tensor | None = None) -> Tensor:
        """`[B, T, features]` to the same shape."""
        if not self.training:
            return self._scaled(whole_BT, self.mean_D, self.variance_D)
        if length_B is None:
            return self._over_all(whole_BT)
        valid_BT = like_frames(mask_of(length_B, whole_BT.shape[1]), whole_BT)
        count = valid_BT.sum()
        # In fp32 at least, because the sum of all frames overflows half precision.
        exact_BT = whole_BT.to(torch.promote_types(whole_BT.dtype, torch.float32))
        mean_D = torch.where(valid_BT, exact_BT, 0).sum((0, 1)) / count.clamp(min=1)
        variance_D = torch.where(valid_BT, (exact_BT - mean_D).square(), 0).sum((0, 1)) / count.clamp(min=1)
        mean_D, variance_D = mean_D.to(self.mean_D.dtype), variance_D.to(self.mean_D.dtype)
        with torch.no_grad():
            # A batch without a valid frame must not change the statistics.
            share = (self.momentum * (count > 0)).to(mean_D.dtype)
            self.mean_D.lerp_(mean_D, share)
            self.variance_D.lerp_(variance_D * (count / (count - 1).clamp(min=1)).to(variance_D.dtype), share)
        return self._scaled(whole_BT, mean_D, variance_D)

    def step(self, chunk_BT: Tensor, length_B: Tensor, state: State, last_B: Tensor | None = None) -> Step:
        """See `Streaming`; uses the running statistics."""
        return Step(self._scaled(chunk_BT, self.mean_D, self.variance_D), length_B, state)

    def _over_all(self, whole_BT: Tensor) -> Tensor:
        """Normalise frames that are all valid by torch's kernel, which reads them twice."""
        frames_ND = whole_BT.reshape(-1, whole_BT.shape[-1])
        # It refuses a single frame, whose variance is zero.
        if len(frames_ND) < 2:
            return self.forward(whole_BT, whole_BT.new_full((len(whole_BT),), whole_BT.shape[1], dtype=torch.int64))
        normal_ND = functional.batch_norm(
            frames_ND, self.mean_D, self.variance_D, self.weight, self.bias, True, self.momentum, self.eps
        )
        return normal_ND.view_as(whole_BT)

    def _scaled(self, frames: Tensor, mean_D: Tensor, variance_D: Tensor) -> Tensor:
        return (frames - mean_D) * torch.rsqrt(variance_D + self.eps) * self.weight + self.bias

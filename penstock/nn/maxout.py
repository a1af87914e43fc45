"""Maxout: a learned activation, the maximum of several affine pieces."""

from typing import final

from torch import Tensor, nn

from penstock.core.errors import ApplicationError

# B batch, U units, K pieces of a unit


@final
class Maxout(nn.Module):
    """Maximum of each `pieces` neighbouring features of a layer that is `pieces` times as wide.

    Put it after any layer whose features are along one dimension:
    `nn.Sequential(nn.Linear(64, 32 * 4), Maxout(4))` has 32 maxout units of 4 linear pieces, and
    `nn.Sequential(nn.Conv2d(1, 16 * 2, 3), Maxout(2))` has 16 maxout channels of 2 filters each.

    Goodfellow et al. 2013, "Maxout Networks", section 3: h_i(x) = max over j of (x' W_ij + b_ij).

    Args:
        pieces: Affine pieces of one unit, at least 1.
        dim: The dimension that holds the features: 1 for `[B, U * K]` and for channels `[B, U * K, H, W]` alike.

    Raises:
        ApplicationError: `pieces` is below 1; on use, the features do not divide into pieces.
    """

    def __init__(self, pieces: int, dim: int = 1) -> None:
        super().__init__()
        if pieces < 1:
            raise ApplicationError(f"Maxout has {pieces} pieces; give it at least 1.")
        self.pieces = pieces
        self.dim = dim

    def forward(self, features: Tensor) -> Tensor:
        """`[..., U * K, ...]` to `[..., U, ...]`; unit u has the features u * K to u * K + K - 1."""
        width = features.shape[self.dim]
        if width % self.pieces:
            raise ApplicationError(
                f"Maxout of {self.pieces} pieces got {width} features in dimension {self.dim}; make the layer "
                f"before it a multiple of {self.pieces} wide."
            )
        return features.unflatten(self.dim, (width // self.pieces, self.pieces)).amax(self.dim % features.ndim + 1)

    def extra_repr(self) -> str:
        """Describe the module for `print`."""
        return f"pieces={self.pieces}, dim={self.dim}"

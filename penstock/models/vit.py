"""The Vision Transformer."""

from collections import OrderedDict
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.core.errors import ApplicationError
from penstock.models.image_classifier import ImageNetwork
from penstock.nn.entry import EntryConv2d

# B batch, C channels, H height, W width, T tokens, D features of a token, N heads, F features of a head, K classes

EPSILON = 1e-6


@final
class SelfAttention(nn.Module):
    """Multi-head self-attention: Vaswani et al. 2017, "Attention is all you need", section 3.2.

    Args:
        width: Features of a token.
        heads: Attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        batch, tokens, width = tokens_BTD.shape
        all_BTX = functional.linear(tokens_BTD, self.in_proj_weight, self.in_proj_bias)
        all_3BNTF = all_BTX.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query_BNTF, key_BNTF, value_BNTF = all_3BNTF.unbind(0)
        seen_BNTF = functional.scaled_dot_product_attention(query_BNTF, key_BNTF, value_BNTF)
        return self.out_proj(seen_BNTF.transpose(1, 2).reshape(batch, tokens, width))


@final
class EncoderLayer(nn.Module):
    """Attention and a two-layer MLP, each with a layer norm before it and a residual connection.

    Args:
        width: Features of a token.
        heads: Attention heads.
        hidden: Hidden units of the MLP.
        dropout: Dropout probability after the attention and after each linear layer.
    """

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, EPSILON)
        self.self_attention = SelfAttention(width, heads)
        self.dropout = nn.Dropout(dropout)
        self.ln_2 = nn.LayerNorm(width, EPSILON)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        tokens_BTD = tokens_BTD + self.dropout(self.self_attention(self.ln_1(tokens_BTD)))
        return tokens_BTD + self.mlp(self.ln_2(tokens_BTD))


@final
class Encoder(nn.Module):
    """Position embedding, encoder layers, and a layer norm.

    Args:
        tokens: Number of tokens.
        layers: Number of layers.
        width: Features of a token.
        heads: Attention heads.
        hidden: Hidden units of a layer's MLP.
        dropout: Dropout probability.
    """

    def __init__(self, *, tokens: int, layers: int, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(
            OrderedDict(
                (f"encoder_layer_{layer}", EncoderLayer(width, heads, hidden, dropout)) for layer in range(layers)
            )
        )
        self.ln = nn.LayerNorm(width, EPSILON)

    def forward(self, tokens_BTD: Tensor) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        return self.ln(self.layers(self.dropout(tokens_BTD + self.pos_embedding)))


@final
class ViT(ImageNetwork):
    """Dosovitskiy et al. 2021, "An image is worth 16x16 words", section 3.1.

    By default table 1's Base with patches of 16: 86,567,656 parameters for 1,000 classes.

    Args:
        classes: Outputs.
        side: Height and width of the images in pixels.
        patch: Height and width of a patch in pixels.
        layers: Encoder layers.
        width: Features of a token.
        heads: Attention heads.
        hidden: Hidden units of a layer's MLP.
        dropout: Dropout probability.

    Raises:
        ApplicationError: The side is not a multiple of the patch, or the width not of the heads.
    """

    def __init__(
        self,
        classes: int = 1000,
        *,
        side: int = 224,
        patch: int = 16,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if side % patch or width % heads:
            raise ApplicationError(
                f"ViT has side {side} in patches of {patch}, and width {width} in {heads} heads; choose numbers that "
                f"divide evenly."
            )
        self.conv_proj = EntryConv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = Encoder(
            tokens=(side // patch) ** 2 + 1, layers=layers, width=width, heads=heads, hidden=hidden, dropout=dropout
        )
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(width, classes)))
        self._draw()

    def logits(self, image_BCHW: Tensor) -> Tensor:
        """Logits `[B, K]` of prepared pictures, `[B, 3, side, side]`."""
        patches_BTD = self.conv_proj(image_BCHW).flatten(2).transpose(1, 2)
        first_B1D = self.class_token.expand(len(patches_BTD), -1, -1)
        tokens_BTD = self.encoder(torch.cat([first_B1D.to(patches_BTD.dtype), patches_BTD], 1))
        return self.heads(tokens_BTD[:, 0])

    def _draw(self) -> None:
        patch_numbers = self.conv_proj.weight[0].numel()
        nn.init.trunc_normal_(self.conv_proj.weight, std=patch_numbers**-0.5)
        nn.init.zeros_(cast(Tensor, self.conv_proj.bias))
        for layer in self.encoder.layers:
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.normal_(module.bias, std=1e-6)
        # Section 3.2: the head begins at zero, so that all classes are equally likely.
        for parameter in self.heads.parameters():
            nn.init.zeros_(parameter)

"""Networks of the sizes that people serve on a GPU, with random weights: ResNet-50, ViT-B/16, a BERT-base encoder.

`bert_128` is BERT-base of `transformers` as it comes, for texts of varying length.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock import Application, Dim, PictureFile, TensorSpec
from penstock.core.spec import Array
from penstock.models.image_classifier import ImageNetwork
from penstock.models.resnet import ResNet50
from penstock.models.vit import ViT

SIDE, CLASSES = 224, 1000
TOKENS, VOCABULARY, WIDTH, LAYERS, HEADS = 128, 30522, 768, 12, 12


class Scores(nn.Module):
    """Logits of an image classifier whose random weights give numbers of ordinary size.

    Args:
        network: The classifier.
    """

    def __init__(self, network: ImageNetwork) -> None:
        super().__init__()
        self.network = network
        for layer in network.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None and layer.running_var is not None:
                layer.running_mean.normal_(std=0.1)
                layer.running_var.uniform_(0.5, 1.5)
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        """`[B, 224, 224, 3]` to `[B, 1000]`."""
        return self.network(pixels_BHWC)

    def raw(self, pixels_BHWC: Tensor) -> Tensor:
        """The same, as one would write it for a network that was converted to bf16."""
        return self.network.logits(self.network.prepare(pixels_BHWC).bfloat16())


class Encoder(nn.Module):
    """A transformer encoder of BERT-base's size over 128 token ids, and a linear layer over their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.zeros(TOKENS, WIDTH).normal_(std=0.02))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.classify = nn.Linear(WIDTH, 2)

    def forward(self, input_ids_BT: Tensor) -> Tensor:
        """`[B, 128]` to `[B, 2]`."""
        return self.classify(self.layers(self.embed(input_ids_BT) + self.place).mean(1))

    def raw(self, input_ids_BT: Tensor) -> Tensor:
        """The same: it has nothing to convert."""
        return self(input_ids_BT)


class Bert(nn.Module):
    """`BertForSequenceClassification` of `transformers` with its default sizes, those of BERT-base."""

    def __init__(self) -> None:
        super().__init__()
        transformers: Any = __import__("transformers")
        self.bert = transformers.BertForSequenceClassification(transformers.BertConfig())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token ids and mask `[B, T]` to `[B, 2]`."""
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).logits

    def raw(self, input_ids_BT: Tensor) -> Tensor:
        """The same for texts that are all as long."""
        return self(input_ids_BT, torch.ones_like(input_ids_BT))


def pixels(count: int) -> Array:
    """Random pictures, uint8 `[count, 224, 224, 3]`."""
    return np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)


def tokens(count: int) -> Array:
    """Random token ids, int64 `[count, 128]`."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (count, TOKENS))


def texts(count: int) -> dict[str, Array]:
    """Random texts of 128 tokens, and their masks."""
    return {"input_ids": tokens(count), "attention_mask": np.ones((count, TOKENS), np.int64)}


PIXELS = TensorSpec(dtype="uint8", shape=(SIDE, SIDE, 3), meaning="RGB pixels")
SCORES = TensorSpec(dtype="float32", shape=(CLASSES,), meaning="score of each class")
resnet50 = Application(
    name="resnet50",
    description="ResNet-50 with random weights.",
    input=PIXELS,
    output=SCORES,
    model=lambda: Scores(ResNet50()),
    decode=PictureFile(mode="RGB", size=(SIDE, SIDE), at_least=(SIDE, SIDE)),
    accepts=("image/jpeg", "image/png"),
)
vit_b16 = Application(
    name="vit_b16",
    description="ViT-B/16 with random weights.",
    input=PIXELS,
    output=SCORES,
    model=lambda: Scores(ViT()),
)
encoder_128 = Application(
    name="encoder_128",
    description="An encoder of BERT-base's size over 128 tokens, with random weights.",
    input=TensorSpec(dtype="int64", shape=(TOKENS,), meaning="token ids", limits=(0, VOCABULARY - 1)),
    output=TensorSpec(dtype="float32", shape=(2,), meaning="score of each class"),
    model=Encoder,
)
LENGTH = Dim("tokens", max=TOKENS, min=TOKENS // 2)
bert_128 = Application(
    name="bert_128",
    description="BERT-base of transformers with random weights, for texts of 64 to 128 tokens.",
    inputs={
        "input_ids": TensorSpec(dtype="int64", shape=(LENGTH,), meaning="token ids", limits=(0, VOCABULARY - 1)),
        "attention_mask": TensorSpec(dtype="int64", shape=(LENGTH,), meaning="1 where there is a token", limits=(0, 1)),
    },
    outputs={"scores": TensorSpec(dtype="float32", shape=(2,), meaning="score of each class")},
    model=Bert,
)
EXAMPLES: dict[str, Callable[[int], Any]] = {
    "resnet50": pixels,
    "vit_b16": pixels,
    "encoder_128": tokens,
    "bert_128": texts,
}

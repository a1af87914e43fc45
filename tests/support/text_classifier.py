"""A small text classifier with token ids and a mask of varying length, for tests of training."""

# The label is the kind of token that occurs most often, which no length and no order tells.
APPLICATION = '''"""A small transformer over token ids and a mask of any length."""

import numpy as np
import torch
from torch import nn

from penstock import Application, Dim, Recipe, TensorSpec
from penstock.train.recipe import ArraySet, CheckpointPolicy, Data, EMASettings, Selection, StepExecution
from penstock.train.step.parameter_groups import parameter_groups

tokens = Dim("tokens", max=40)
WORDS = 30


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0) for _ in range(2)
        )
        self.classify, self.tag = nn.Linear(32, 3), nn.Linear(32, 3)

    def forward(self, input_ids, attention_mask):
        keep = attention_mask != 0
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~keep)
        pooled = (hidden * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        return {"logits": self.classify(pooled), "tags": self.tag(hidden)}


def texts(count, seed):
    rng = np.random.default_rng(seed)
    ids, kinds = [], []
    while len(ids) < count:
        row = rng.integers(1, WORDS, rng.integers(1, 41))
        counts = np.sort(np.bincount(row % 3, minlength=3))
        if counts[2] > counts[1]:
            ids.append(row)
            kinds.append(row % 3)
    return {
        "inputs": {"input_ids": ids, "attention_mask": [np.ones(len(row), int) for row in ids]},
        "targets": {"label": np.array([np.bincount(kind, minlength=3).argmax() for kind in kinds]), "tags": kinds},
    }


def loss(outputs, targets):
    # The mean of each text, so that a batch in parts has the same mean.
    of_tokens = nn.functional.cross_entropy(outputs["tags"].transpose(1, 2), targets["tags"], reduction="none")
    tags = of_tokens.sum(1) / (targets["tags"] >= 0).sum(1)
    return nn.functional.cross_entropy(outputs["logits"], targets["label"]) + tags.mean()


def accuracy(outputs, targets):
    return (outputs["logits"].argmax(1) == targets["label"]).double().mean().item()


def tag_accuracy(outputs, targets):
    known = targets["tags"] >= 0
    return (outputs["tags"].argmax(2) == targets["tags"])[known].double().mean().item()


recipe = Recipe(
    data=lambda: Data(train=ArraySet(**texts(1500, 0)), validation=ArraySet(**texts(300, 1))),
    loss=loss,
    optimizer=lambda named_parameters: torch.optim.AdamW(
        parameter_groups(named_parameters, lr=4e-3, weight_decay=0.01, layer_decay=0.9)
    ),
    schedule=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps + 1),
    metrics={"accuracy": accuracy, "tag_accuracy": tag_accuracy},
    batch_size=52,
    epochs=6,
    ema=EMASettings(decay=0.9, warm_up=True),
    checkpoints=CheckpointPolicy(every_steps=20),
    selection=Selection(metric="accuracy", mode="max"),
    execution=StepExecution(threads=1, accumulation_steps=2),
)

app = Application(
    name="text",
    inputs={
        "input_ids": TensorSpec(dtype="int64", shape=(tokens,), meaning="token ids", limits=(0, WORDS - 1)),
        "attention_mask": TensorSpec(dtype="int64", shape=(tokens,), meaning="1 where there is a token", limits=(0, 1)),
    },
    outputs={
        "logits": TensorSpec(dtype="float32", shape=(3,), meaning="scores", labels=("a", "b", "c")),
        "tags": TensorSpec(dtype="float32", shape=(tokens, 3), meaning="scores of each token"),
    },
    model=":Net",
    recipe=":recipe",
)
'''

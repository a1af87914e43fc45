"""Training recipe of the text application: pieces of Django's translations in 88 languages."""

import textwrap
from functools import partial

import numpy as np
import torch.nn.functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from penstock.apps.text.app import MAX_BYTES
from penstock.apps.text.translations import Labelled, sentences
from penstock.core.spec import Array
from penstock.core.texts.text import ByteText
from penstock.train.recipe import ArraySet, Data, Recipe, Selection, StepExecution, accuracy

PEAK_RATE = 3e-3
# A batch is as long as its longest text, so that short pieces train in a fraction of the time.
PIECE_BYTES = 48
_WHOLE = ByteText(tensor="text", max_bytes=MAX_BYTES, cut=True)


def recipe() -> Recipe:
    """AdamW with one cycle of the learning rate over pieces of up to 48 bytes; whole sentences to select and test."""
    return Recipe(
        data=texts,
        loss=partial(F.cross_entropy, label_smoothing=0.05),
        optimizer=partial(AdamW, lr=PEAK_RATE, weight_decay=0.01),
        schedule=one_cycle,
        metrics={"accuracy": accuracy},
        selection=Selection(metric="accuracy", mode="max"),
        batch_size=64,
        epochs=5,
        clip_norm=1.0,
        execution=StepExecution(threads=1),
    )


def texts() -> Data:
    """Pieces of the training sentences; the validation and test sentences whole."""
    parts = sentences()
    return Data(
        train=_examples([(piece, label) for text, label in parts["train"] for piece in pieces(text)]),
        validation=_examples(parts["validation"]),
        test=_examples(parts["test"]),
    )


def pieces(text: str) -> list[str]:
    """Split a text into pieces of about 48 bytes, between words where it has spaces."""
    per_character = len(text.encode()) / len(text)
    return textwrap.wrap(text, max(1, int(PIECE_BYTES / per_character)))


def one_cycle(optimizer: Optimizer, steps: int) -> OneCycleLR:
    """Warm up to the peak rate over the first tenth of the steps, then decay by a cosine."""
    return OneCycleLR(optimizer, PEAK_RATE, total_steps=steps + 1, pct_start=0.1)


def _examples(labelled: Labelled) -> ArraySet:
    inputs: list[Array] = [_WHOLE.of_text(text) for text, _ in labelled]
    return ArraySet(inputs={"text": inputs}, targets=np.array([label for _, label in labelled]))

"""Training recipe of the translator: label-smoothed cross-entropy over packed pairs, with an EMA of the weights."""

from pathlib import Path

import torch
from torch import Tensor

from penstock.apps.translate.packed_pairs import PackedPairs, Pairs
from penstock.apps.translate.tokenizer import tokenizer
from penstock.core.spec import Array
from penstock.models.encoder_decoder import Scored
from penstock.train.recipe import Data, EMASettings, Recipe, Selection, StepExecution
from penstock.train.step.declared_optimizer import Optimizer
from penstock.train.step.declared_schedule import Schedule

# B rows, T tokens

DATA = Path("runs/translate-data/pairs.npz")
PEAK_RATE = 1e-3
# Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7.
SMOOTHING = 0.1
EXAMPLES = (
    "Hello.",
    "Thank you very much for your help.",
    "The file could not be saved.",
    "Choose a name for the new folder.",
    "Your password must have at least eight characters, one of which is a number.",
    "Do you want to replace the existing file?",
    "Select the text, open the menu, and choose the format that you want to use for all pages of the document.",
    "Wednesday",
    "Open",
    "The meeting starts at nine in the morning and ends at noon.",
    "This program needs a connection to the network. Check the settings of your computer and try again later.",
    "Invalid number",
    "Where is the station?",
    "It was raining, so we stayed at home and played cards all day.",
    "Press any key to continue.",
    "Twenty one",
)  # fmt: skip


def recipe() -> Recipe:
    """3,600 steps of 256 rows, about 60,000 tokens on each side: 244 s on one H200."""
    return Recipe(
        data=default_data,
        loss=smoothed_loss,
        # No weight decay on biases and norms.
        optimizer=Optimizer("adamw", lr=PEAK_RATE, weight_decay=0.01, betas=(0.9, 0.98), decay_vectors=False),
        schedule=Schedule("cosine", warmup=0.06, last=0.02),
        metrics={"bits_per_token": bits_per_token, "accuracy": token_accuracy},
        selection=Selection(metric="bits_per_token", every_epochs=5.0),
        batch_size=256,
        steps=3_600,
        precision="bf16",
        clip_norm=1.0,
        ema=EMASettings(decay=0.999, warm_up=True),
        # Attention with a mask has no deterministic backward pass on a GPU.
        execution=StepExecution(deterministic=False),
        raw_examples=examples,
    )


def default_data() -> Data:
    """The pairs that `make_data` wrote."""
    return packed_data(DATA)


def packed_data(file: Path) -> Data:
    """Training and validation pairs of a file, in rows."""
    return Data(
        train=PackedPairs(Pairs.read(file, "train"), seed=0),
        validation=PackedPairs(Pairs.read(file, "validation"), seed=0),
    )


def examples() -> list[dict[str, Array]]:
    """Some sentences of different lengths, whose translations are recorded in the bundle."""
    return [{"tokens": torch.tensor(tokenizer().encode(text)).numpy()} for text in EXAMPLES]


def smoothed_loss(scored: Scored, counts_BT: Tensor, smoothing: float = SMOOTHING) -> Tensor:
    """Cross-entropy with label smoothing: the mean over the tokens that count.

    Args:
        scored: The network's outputs.
        counts_BT: 1 for each token that is scored, 0 for padding.
        smoothing: Share of the probability that the whole vocabulary gets.
    """
    found_BT = (1 - smoothing) * scored.log_probability + smoothing * scored.mean_log_probability
    return -(found_BT * counts_BT).sum() / counts_BT.sum().clamp(min=1)


def bits_per_token(scored: Scored, counts_BT: Tensor) -> float:
    """Cross-entropy in bits, without smoothing."""
    return smoothed_loss(scored, counts_BT, 0.0).item() / torch.log(torch.tensor(2.0)).item()


def token_accuracy(scored: Scored, counts_BT: Tensor) -> float:
    """Share of tokens to which the network gives the highest probability."""
    return ((scored.is_best * counts_BT).sum() / counts_BT.sum()).item()

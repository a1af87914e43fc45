"""Training recipe: CTC over characters; by default of spoken digits and commands, augmented at every step."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW

from penstock.apps.keywords.app import SYMBOLS as WORDS
from penstock.apps.keywords.clips import SIGNAL, compose, read_clips
from penstock.apps.keywords.recipe import PEAK_RATE, ROOM, SEEDS, augment, collapsed, edit_distance, one_cycle
from penstock.apps.speech.app import BLANK, SYMBOLS
from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.recipe import ArraySet, Augment, Data, Recipe, Selection, StepExecution

# B batch, T samples, U frames, V symbols, L characters of a signal at most

SIGNALS_PER_VOICE = {"train": 48, "validation": 24, "test": 32}
EPOCHS = 24


def recipe() -> Recipe:
    """AdamW with one cycle of the learning rate over spelled digits and commands, of many voices."""
    return speech_recipe(spoken_words, epochs=EPOCHS, augment=augment, threads=1)


def speech_recipe(
    data: Callable[[], Data],
    *,
    epochs: float,
    augment: Augment | None = None,
    batch_size: int = 16,
    rate: float = PEAK_RATE,
    threads: int | None = None,
) -> Recipe:
    """The recipe for any speech with its text.

    Args:
        data: The examples: signals int16 `[n, T]` at 16 kHz, and as targets the characters `[n, L]` of `spelled`.
        epochs: Passes over the examples.
        augment: Changes signals at every step.
        batch_size: Signals for each step.
        rate: The largest learning rate.
        threads: CPU threads; None measures them.
    """
    return Recipe(
        data=data,
        loss=ctc,
        optimizer=partial(AdamW, lr=rate, weight_decay=0.01),
        schedule=one_cycle,
        metrics={"word_error": word_error},
        selection=Selection(metric="word_error", mode="min", every_epochs=2.0),
        batch_size=batch_size,
        epochs=epochs,
        augment=augment,
        clip_norm=5.0,
        execution=StepExecution(threads=threads),
    )


def spoken_words() -> Data:
    """Training, validation and test signals of a few digits and commands each, of different voices."""
    return Data(train=_signals("train"), validation=_signals("validation"), test=_signals("test"))


def _signals(split: str) -> ArraySet:
    training = split == "train"
    signals = compose(
        read_clips(split),
        SIGNALS_PER_VOICE[split],
        seed=SEEDS[split],
        room=ROOM if training else SIGNAL,
        noisy=not training,
    )
    texts = [" ".join(WORDS[word] for word in words if word) for words in signals.symbols]
    return ArraySet(inputs=signals.samples, targets=spelled(texts))


def spelled(texts: list[str]) -> Array:
    """Spell texts in `SYMBOLS`, padded with blanks, int64 `[n, L]`.

    Lower case; what is no letter, apostrophe or space separates words.

    Raises:
        TrainError: A text has digits, which are spoken in many ways, or letters that are no symbol.
    """
    indices: list[list[int]] = []
    for text in texts:
        strange = sorted({character for character in text.lower() if character.isalnum()} - set(SYMBOLS))
        if strange:
            raise TrainError(
                f"the text {text[:60]!r} has {', '.join(map(repr, strange[:5]))}; write numbers as they are spoken, "
                f"and letters without accents."
            )
        words = "".join(each if each in SYMBOLS[2:] else " " for each in text.lower()).split()
        indices.append([SYMBOLS.index(character) for character in " ".join(words)])
    spelled_L = np.full((len(texts), max(1, *map(len, indices))), BLANK)
    for row, each in zip(spelled_L, indices, strict=True):
        row[: len(each)] = each
    return spelled_L


def ctc(log_probabilities_BUV: Tensor, symbols_BL: Tensor) -> Tensor:
    """CTC loss, divided by the number of characters.

    Graves et al. 2006, "Connectionist Temporal Classification".

    Args:
        log_probabilities_BUV: The network's outputs.
        symbols_BL: The characters of each signal, padded with blanks.
    """
    batch, frames, _ = log_probabilities_BUV.shape
    frames_B = torch.full((batch,), frames)
    characters_B = (symbols_BL != BLANK).sum(1)
    log_probabilities_UBV = log_probabilities_BUV.float().transpose(0, 1)
    return F.ctc_loss(log_probabilities_UBV, symbols_BL, frames_B, characters_B, BLANK, zero_infinity=True)


def word_error(log_probabilities_BUV: Tensor, symbols_BL: Tensor) -> float:
    """Word error rate: deletions, substitutions and insertions over the number of words."""
    heard = [words_of(collapsed(best_U)) for best_U in log_probabilities_BUV.argmax(2).tolist()]
    spoken = [words_of(symbols_L) for symbols_L in symbols_BL.tolist()]
    errors = sum(map(edit_distance, heard, spoken))
    return errors / max(1, sum(map(len, spoken)))


def words_of(symbols: list[int]) -> list[str]:
    """Join characters into words."""
    return list("".join(SYMBOLS[symbol] for symbol in symbols if symbol != BLANK).split())

"""Training recipe: CTC over characters; by default of spoken digits and commands, augmented at every step."""

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor
from torch.optim import AdamW

from penstock.apps.keywords.app import SYMBOLS as WORDS
from penstock.apps.keywords.recipe import PEAK_RATE, augment, collapsed, ctc, error_rate, one_cycle, spoken_signals
from penstock.apps.speech.app import BLANK, SYMBOLS
from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.recipe import ArraySet, Augment, Data, Recipe, Selection, StepExecution

# B batch, T samples, U frames, V symbols, L characters of a signal at most

SIGNALS_PER_VOICE = {"train": 48, "validation": 24, "test": 32}
EPOCHS = 16


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
    signals = spoken_signals(split, SIGNALS_PER_VOICE[split])
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


def word_error(log_probabilities_BUV: Tensor, symbols_BL: Tensor) -> float:
    """Word error rate: deletions, substitutions and insertions over the number of words."""
    heard = [words_of(collapsed(best_U)) for best_U in log_probabilities_BUV.argmax(2).tolist()]
    spoken = [words_of(symbols_L) for symbols_L in symbols_BL.tolist()]
    return error_rate(heard, spoken)


def words_of(symbols: list[int]) -> list[str]:
    """Join characters into words."""
    return list("".join(SYMBOLS[symbol] for symbol in symbols if symbol != BLANK).split())

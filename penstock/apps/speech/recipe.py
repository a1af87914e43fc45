"""Training recipe: CTC over characters; by default of spoken digits and commands, augmented at every step."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.optim import AdamW

from penstock.apps.keywords.app import SYMBOLS as WORDS
from penstock.apps.keywords.recipe import PEAK_RATE, augment, collapsed, error_rate, one_cycle, spoken_signals
from penstock.apps.speech.app import BLANK, SYMBOLS
from penstock.apps.speech.signal_frames import output_frames
from penstock.apps.speech.trim_tail import TrimTail
from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.nn import ctc_loss
from penstock.nn.streaming import mask_of
from penstock.train.recipe import ArraySet, Augment, Data, ExampleOrder, Recipe, Selection, StepExecution

# B batch, T samples, U frames, V symbols, L characters of a signal at most

SIGNALS_PER_VOICE = {"train": 48, "validation": 24, "test": 32}
EPOCHS = 16
BUCKETS = 20
TRIM_TAIL_MS = 200.0


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
    buckets: int = BUCKETS,
    shortest_first: bool = True,
    trim_tail_ms: float = TRIM_TAIL_MS,
) -> Recipe:
    """The recipe for any speech with its text.

    The last three arguments are for utterances with their lengths, as `penstock.apps.speech.corpora.data` gives them;
    signals of one length are shuffled and stay whole.

    Args:
        data: The examples: those of `corpora.data`; or signals int16 `[n, T]` at 16 kHz, and as targets the characters
            `[n, L]` of `spelled`.
        epochs: Passes over the examples.
        augment: Changes signals `[B, T]` and characters `[B, L]` at every step.
        batch_size: Signals for each step.
        rate: The largest learning rate.
        threads: CPU threads; None measures them.
        buckets: Buckets of utterances of similar length, from which the batches are made; 0 for none. The setting
            `order.buckets`, see `ExampleOrder`.
        shortest_first: Begin with the shortest utterances, in the first epoch (SortaGrad). The setting
            `order.shortest_first`.
        trim_tail_ms: The longest tail that is cut from an utterance, so that characters come earlier (TrimTail); 0 for
            none. The setting `augment.max_ms`, see `TrimTail`.
    """
    return Recipe(
        data=data,
        loss=ctc_of_lengths,
        optimizer=partial(AdamW, lr=rate, weight_decay=0.01),
        schedule=one_cycle,
        metrics={"word_error": word_error},
        selection=Selection(metric="word_error", mode="min", every_epochs=2.0),
        batch_size=batch_size,
        epochs=epochs,
        order=ExampleOrder(buckets=buckets, shortest_first=shortest_first),
        augment=TrimTail(max_ms=trim_tail_ms, before=augment),
        clip_norm=5.0,
        # CTC reads its lengths on the host; and a captured step would pad every batch to the longest utterance.
        execution=StepExecution(threads=threads, graph=False),
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
    spelled_L = np.full((len(texts), max([1, *map(len, indices)])), BLANK)
    for row, each in zip(spelled_L, indices, strict=True):
        row[: len(each)] = each
    return spelled_L


def ctc_of_lengths(log_probabilities_BUV: Tensor, targets: Any) -> Tensor:
    """CTC loss, divided by the number of characters; frames behind the end of an utterance have no part in it.

    Args:
        log_probabilities_BUV: The network's outputs.
        targets: The characters `[B, L]`; or those as `symbols`, and as `samples` the length of each signal, `[B]`.
    """
    return ctc_loss(log_probabilities_BUV, *_with_frames(targets, log_probabilities_BUV.shape[1]))


def word_error(log_probabilities_BUV: Tensor, targets: Any) -> float:
    """Word error rate: deletions, substitutions and insertions over the number of words.

    Args:
        log_probabilities_BUV: The network's outputs.
        targets: As of `ctc_of_lengths`.
    """
    symbols_BL, frames_B = _with_frames(targets, log_probabilities_BUV.shape[1])
    best_BU = log_probabilities_BUV.argmax(2)
    if frames_B is not None:
        best_BU = best_BU.where(mask_of(frames_B, best_BU.shape[1]), BLANK)
    heard = [words_of(collapsed(best_U)) for best_U in best_BU.tolist()]
    spoken = [words_of(symbols_L) for symbols_L in symbols_BL.tolist()]
    return error_rate(heard, spoken)


def _with_frames(targets: Any, most: int) -> tuple[Tensor, Tensor | None]:
    """Return the characters, and the output frames of each signal, `most` at most; None for all frames."""
    if not isinstance(targets, Mapping):
        return targets, None
    named = cast(Mapping[str, Tensor], targets)
    # A network whose recurrent layers have wider frames may give one less.
    return named["symbols"], output_frames(named["samples"]).clamp(max=most)


def words_of(symbols: list[int]) -> list[str]:
    """Join characters into words."""
    return list("".join(SYMBOLS[symbol] for symbol in symbols if symbol != BLANK).split())

"""Language models for the recogniser's endpoint beam: characters, so that any word can be written."""

from penstock.apps.speech.app import SYMBOLS
from penstock.apps.speech.recipe import spelled, spoken_words
from penstock.core.speech.ngram import NGram
from penstock.core.speech.ngram_training import train_ngram
from penstock.train.recipe import ArraySet

ORDER = 4


def language_of(texts: list[str], order: int = ORDER) -> NGram:
    """Train a language model on texts, spelled as the recogniser writes them.

    Args:
        texts: One sentence each.
        order: Characters of the longest n-grams: 4 for a few words, 6 and more for sentences.

    Raises:
        TrainError: A text has digits, or letters that are no symbol.
        ApplicationError: There is no text, or too much of it.
    """
    return _trained(spelled(texts).tolist(), order)


def words_language() -> NGram:
    """The language model of the training texts of the default recipe."""
    train = spoken_words().train
    assert isinstance(train, ArraySet), train
    return _trained(train.targets.tolist(), ORDER)


def _trained(symbols: list[list[int]], order: int) -> NGram:
    texts = ("".join(SYMBOLS[symbol] for symbol in each if symbol) for each in symbols)
    return train_ngram(texts, order, "characters", SYMBOLS[1:])

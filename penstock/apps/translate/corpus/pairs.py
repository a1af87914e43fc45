"""Pairs of sentences: what is kept of them, and what must not be trained on."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_CHARACTERS = 400
# A translation is at most this many times as long as the original, plus some characters.
LONGEST, SHORTEST, SLACK = 2.2, 0.45, 12
# Share of letters among the characters that are no spaces.
LEAST_LETTERS = 0.55
_WORD = re.compile(r"[^\W\d_]+")
_PLACEHOLDER = re.compile(r"%(?:\d+\$)?[-+ #0-9.*]*[a-zA-Z]|%\d+|\{\w*\}|\$\w+|@\w+@|\\[a-z]")
# Frequent words of Spanish that are no English ones: a sentence in the wrong language has them.
_SPANISH = frozenset(
    [
        "el",
        "los",
        "las",
        "una",
        "del",
        "que",
        "por",
        "para",
        "con",
        "está",
        "según",
        "también",
        "más",
        "fichero",
        "archivo",
    ]
)
_ENGLISH = frozenset(
    [
        "the",
        "of",
        "and",
        "this",
        "that",
        "with",
        "from",
        "is",
        "are",
        "was",
        "were",
        "your",
        "you",
        "not",
        "when",
        "which",
    ]
)


class Pair(NamedTuple):
    """An English text, its Spanish translation, and where they are from."""

    english: str
    spanish: str
    source: str


def normal(text: str) -> str:
    """Reduce a text to its words in lower case, without accents: two texts with the same are the same."""
    decomposed = unicodedata.normalize("NFD", text.lower())
    letters = "".join(c for c in decomposed if not unicodedata.combining(c))
    return " ".join(re.findall(r"[^\W_]+", letters))


def is_good(pair: Pair) -> bool:
    """Tell whether a pair is worth training on."""
    english, spanish = pair.english, pair.spanish
    if not english or not spanish or max(len(english), len(spanish)) > MAX_CHARACTERS:
        return False
    if not SHORTEST * len(english) - SLACK <= len(spanish) <= LONGEST * len(english) + SLACK:
        return False
    if english == spanish or not all(map(_is_text, (english, spanish))):
        return False
    # The same placeholders stand on both sides, or the pair is of two different messages.
    if sorted(_PLACEHOLDER.findall(english)) != sorted(_PLACEHOLDER.findall(spanish)):
        return False
    return not (_words(spanish) & _ENGLISH or len(_words(english) & _SPANISH) > 1)


def _is_text(text: str) -> bool:
    if not _WORD.search(text) or any(unicodedata.category(c) in ("Cc", "Co", "Cn") for c in text):
        return False
    solid = [c for c in text if not c.isspace()]
    letters = sum(c.isalpha() for c in solid)
    latin = sum(c.isalpha() and c < "ɐ" for c in solid)
    return letters >= LEAST_LETTERS * len(solid) and latin == letters and max(map(len, text.split())) <= 40


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))


def without(pairs: Iterable[Pair], forbidden: frozenset[str]) -> Iterator[Pair]:
    """Leave out pairs that are, once `normal`, one of the forbidden texts in either language."""
    for pair in pairs:
        if normal(pair.english) not in forbidden and normal(pair.spanish) not in forbidden:
            yield pair


def distinct(pairs: Iterable[Pair], most: int = 3) -> Iterator[Pair]:
    """Keep each pair once, and no more than `most` translations of one English text."""
    seen: set[tuple[str, str]] = set()
    translations: dict[str, int] = {}
    for pair in pairs:
        key = pair.english, pair.spanish
        folded = normal(pair.english)
        if key in seen or translations.get(folded, 0) >= most:
            continue
        seen.add(key)
        translations[folded] = translations.get(folded, 0) + 1
        yield pair

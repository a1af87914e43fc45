"""Hot words in the hints of other speech services' clients: `keyterm` and `keywords` of Deepgram, `prompt` of OpenAI.

They are hints: one that cannot be a hot word has no effect, and one that is malformed is refused.
"""

import math
import re
from collections.abc import Iterable, Sequence

from penstock.core.errors import InvalidInput
from penstock.core.speech.hot_words import MAX_BONUS, MAX_HOT_CHARACTERS, MAX_HOT_WORDS, HotWord

# Longest part of a prompt that is a hot word, in words; a longer one is a sentence.
MAX_PROMPT_WORDS = 4
_CUTS = re.compile(r"[,;:.!?\n]+")


def boosted(given: Sequence[tuple[str, str]]) -> tuple[HotWord, ...]:
    """Read Deepgram's parameters.

    Args:
        given: Their names and values: `keyterm=PHRASE`, `keywords=WORD` or `keywords=WORD:BONUS`.

    Raises:
        InvalidInput: A bonus is no number or out of range, or there are too many.
    """
    if len(given) > MAX_HOT_WORDS:
        raise InvalidInput(f"There are {len(given)} keyterm and keywords; at most {MAX_HOT_WORDS} are taken.")
    return limited(_boosted(value) if name == "keywords" else HotWord(value) for name, value in given)


def _boosted(value: str) -> HotWord:
    text, colon, number = value.rpartition(":")
    if not colon:
        return HotWord(value)
    try:
        bonus = float(number)
    except ValueError:
        bonus = math.nan
    if not abs(bonus) <= MAX_BONUS:
        raise InvalidInput(
            f"keywords is {value[:40]!r}; write a word, or a word and its bonus from {-MAX_BONUS:g} to {MAX_BONUS:g}, "
            f"as 'penstock:2'."
        )
    return HotWord(text, bonus)


def prompted(prompt: str, keywords: Iterable[str] = ()) -> tuple[HotWord, ...]:
    """Read OpenAI's `prompt` and `keywords`: of a prompt, the parts between punctuation of four words at most."""
    parts = [part.strip() for part in _CUTS.split(prompt)]
    phrases = [part for part in parts if len(part.split()) <= MAX_PROMPT_WORDS]
    return limited(HotWord(text.strip()) for text in (*keywords, *phrases))


def limited(words: Iterable[HotWord]) -> tuple[HotWord, ...]:
    """The first hot words, as many as a stream may have, without those that are empty, too long or there before."""
    found: dict[str, HotWord] = {}
    for word in words:
        if 0 < len(word.text) <= MAX_HOT_CHARACTERS:
            found.setdefault(word.text, word)
    return tuple(found.values())[:MAX_HOT_WORDS]

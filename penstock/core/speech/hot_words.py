"""Hot words: words and phrases whose transcripts get a bonus in the endpoint beam."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from penstock.core.errors import InvalidInput
from penstock.core.wording.shown import shown

# Of one stream.
MAX_HOT_WORDS, MAX_HOT_CHARACTERS = 100, 64
MAX_BONUS = 20.0

# Phrases that may be under way, the longest first.
HotState: TypeAlias = "tuple[HotNode, ...]"


@final
@dataclass(frozen=True, slots=True)
class HotWord:
    """A word or phrase, with its bonus.

    Args:
        text: Its words, separated by spaces.
        bonus: Added to the logarithm of the probability of a text, each time it is there; None for that of the
            application. Negative numbers make it less likely.
    """

    text: str
    bonus: float | None = None


@final
@dataclass(slots=True, eq=False)
class HotNode:
    """A node of the trie of hot words.

    Attributes:
        children: The next nodes, by symbol.
        bonus: Sum of the bonuses of the phrases that end here.
        ahead: Largest part of a bonus that is given in advance for the symbols so far.
    """

    children: "dict[int, HotNode]" = field(default_factory=dict[int, "HotNode"])
    bonus: float = 0.0
    ahead: float = 0.0


@final
class HotWords:
    """The trie of the hot words of one utterance.

    A part of the bonus is given for each symbol of a phrase, so that the beam does not lose it before its end, and is
    taken back where the phrase is not completed.

    Args:
        words: The symbols of each phrase, and its bonus.
        space: The symbol between words.
    """

    def __init__(self, words: Iterable[tuple[Sequence[int], float]], space: int) -> None:
        self._root, self._space = HotNode(), space
        for symbols, bonus in words:
            node = self._root
            for length, symbol in enumerate(symbols, 1):
                node = node.children.setdefault(symbol, HotNode())
                node.ahead = max(node.ahead, bonus * length / len(symbols))
            node.bonus += bonus

    def step(self, state: HotState, symbol: int, *, begins: bool) -> tuple[float, HotState]:
        """Return the bonus of the phrases that a symbol completes, and the state after it.

        Args:
            state: The state before it.
            symbol: The symbol.
            begins: Whether it begins a word.
        """
        bonus = self.end(state) if symbol == self._space else 0.0
        nodes = (*state, self._root) if begins else state
        return bonus, tuple(node.children[symbol] for node in nodes if symbol in node.children)

    def end(self, state: HotState) -> float:
        """Return the bonus of the phrases that are complete where a word ends."""
        return sum(node.bonus for node in state)

    def ahead(self, state: HotState) -> float:
        """Return what is given in advance for phrases that are under way."""
        return max((node.ahead for node in state), default=0.0)


def checked_hot_words(given: object) -> tuple[HotWord, ...]:
    """Read hot words from JSON: a list of texts, or of `{"text", "bonus"}`.

    Raises:
        InvalidInput: They are something else, too many, or too long.
    """
    if not isinstance(given, list) or len(given) > MAX_HOT_WORDS:
        raise InvalidInput(f"hot_words is {shown(given, 40)}; it must be a list of at most {MAX_HOT_WORDS} words.")
    return tuple(map(_hot_word, given))


def _hot_word(given: Any) -> HotWord:
    fields: dict[str, Any] = given if isinstance(given, dict) else {"text": given}
    text, bonus = fields.get("text"), fields.get("bonus")
    if fields.keys() - {"text", "bonus"} or not isinstance(text, str) or not 0 < len(text) <= MAX_HOT_CHARACTERS:
        raise InvalidInput(
            f"A hot word is {shown(given, 40)}; it must be a text of 1 to {MAX_HOT_CHARACTERS} characters, or one with "
            f"its bonus."
        )
    if bonus is not None:
        number = type(bonus) in (int, float) and math.isfinite(bonus)
        if not number or abs(bonus) > MAX_BONUS:
            raise InvalidInput(
                f"The bonus of a hot word is {shown(bonus, 40)}; it must be from {-MAX_BONUS:g} to {MAX_BONUS:g}."
            )
    return HotWord(text, bonus)

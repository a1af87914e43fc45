"""CTC prefix beam search with a language model and hot words, over the symbols of one utterance.

After Hannun et al. 2014, "First-pass large vocabulary continuous speech recognition using bi-directional recurrent
DNNs", section 2.2. A prefix is a text: spaces at its beginning, at its end and after another space are none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import TypeAlias, final

from penstock.core.spec import Array
from penstock.core.speech.hot_words import HotState, HotWords
from penstock.core.speech.ngram import END, NGramScorer, Unit

# T frames, V symbols

NEVER = -math.inf
# Symbols that are so much less likely than the best of their frame extend no prefix, and prefixes that are so much
# worse than the best are dropped; natural logarithms.
SYMBOL_GAP, PREFIX_GAP = 9.0, 25.0
# Frames between two looks at the clock.
STOP_EACH = 16

ShouldStop: TypeAlias = Callable[[], bool]


class SearchStopped(Exception):
    """The search was stopped before its end."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRules:
    """Symbols and weights of a search.

    Args:
        symbols: The symbols; CTC's blank is the first.
        space: The symbol between words.
        width: Prefixes that are kept after each frame.
        language_weight: Weight of the language model's log-probabilities.
        word_bonus: Added for each word.
        symbol_gap: Symbols that are so much less likely than the best of their frame extend no prefix.
        prefix_gap: Prefixes that are so much worse than the best are dropped.
    """

    symbols: tuple[str, ...]
    space: int
    width: int = 16
    language_weight: float = 0.5
    word_bonus: float = 0.0
    symbol_gap: float = SYMBOL_GAP
    prefix_gap: float = PREFIX_GAP


class _Prefix:
    """A prefix in the trie of all that were reached."""

    __slots__ = (
        "blank",
        "children",
        "earned",
        "hot",
        "label",
        "language",
        "next_blank",
        "next_label",
        "parent",
        "score",
        "stamp",
        "state",
        "symbol",
        "word",
    )

    def __init__(self, parent: "_Prefix | None", symbol: int) -> None:
        self.parent, self.symbol = parent, symbol
        self.children: dict[int, _Prefix] = {}
        # Log-probabilities of its paths that end in a blank, and in its symbol.
        self.blank = self.label = self.next_blank = self.next_label = NEVER
        self.stamp = -1
        # Weighted score of language, words and completed hot words; with what hot words under way are given ahead.
        self.earned = self.language = 0.0
        # States of the language model and of the hot words; the characters of a word that has not ended.
        self.state = 0
        self.hot: HotState = ()
        self.word = ""
        self.score = NEVER


@final
class PrefixBeam:
    """Searches the best text of one utterance after the other.

    Args:
        rules: Symbols and weights.
        language: Scores the text; None without a language model.
        unit: Whether its tokens are words or characters.
    """

    def __init__(self, rules: SearchRules, language: NGramScorer | None = None, unit: Unit = "words") -> None:
        self._rules, self._language, self._by_words = rules, language, unit == "words"
        self._space = rules.space
        self._tokens: list[int | None] = []
        self._end_token: int | None = None
        if language is not None:
            self._tokens = [language.ids.get(symbol) for symbol in rules.symbols]
            self._end_token = language.ids.get(END)

    def search(
        self, log_probability_TV: Array, hot: HotWords | None = None, should_stop: ShouldStop = lambda: False
    ) -> tuple[list[int], float]:
        """Return the symbols of the best text, and its score.

        Args:
            log_probability_TV: `[T, V]`; minus infinity is allowed.
            hot: Its hot words.
            should_stop: Asked now and then.

        Raises:
            SearchStopped: `should_stop` said so.
        """
        root = _Prefix(None, self._space)
        root.blank = 0.0
        if self._language is not None:
            root.state = self._language.start
        beam = [root]
        for frame, row_V in enumerate(log_probability_TV.tolist()):
            if not frame % STOP_EACH and should_stop():
                raise SearchStopped
            beam = self._advance(beam, frame, row_V, hot)
        return self._best(beam, hot)

    def _advance(self, beam: list[_Prefix], frame: int, row_V: Sequence[float], hot: HotWords | None) -> list[_Prefix]:
        space, blank = self._space, row_V[0]
        least = max(row_V) - self._rules.symbol_gap
        extends = [(symbol, value) for symbol, value in enumerate(row_V) if value >= least and symbol]
        # Between words, a space changes nothing.
        rest = _sum(blank, row_V[space])
        touched: list[_Prefix] = []
        for prefix in beam:
            total = _sum(prefix.blank, prefix.label)
            if prefix.stamp != frame:
                _touch(prefix, frame, touched)
            last = prefix.symbol
            if last == space:
                prefix.next_blank = _sum(prefix.next_blank, total + rest)
            else:
                prefix.next_blank = _sum(prefix.next_blank, total + blank)
                prefix.next_label = _sum(prefix.next_label, prefix.label + row_V[last])
            for symbol, value in extends:
                if symbol == last:
                    if symbol == space:
                        continue
                    added = prefix.blank + value
                else:
                    added = total + value
                if added == NEVER:
                    continue
                child = prefix.children.get(symbol)
                if child is None:
                    child = prefix.children[symbol] = self._extended(prefix, symbol, hot)
                if child.stamp != frame:
                    _touch(child, frame, touched)
                child.next_label = _sum(child.next_label, added)
        return self._pruned(touched)

    def _pruned(self, touched: list[_Prefix]) -> list[_Prefix]:
        best = NEVER
        for prefix in touched:
            prefix.blank, prefix.label = prefix.next_blank, prefix.next_label
            prefix.score = _sum(prefix.blank, prefix.label) + prefix.language
            best = max(best, prefix.score)
        least = best - self._rules.prefix_gap
        kept = [prefix for prefix in touched if prefix.score >= least]
        if len(kept) > self._rules.width:
            kept = nlargest(self._rules.width, kept, key=_score_of)
        return kept

    def _extended(self, prefix: _Prefix, symbol: int, hot: HotWords | None) -> _Prefix:
        child = _Prefix(prefix, symbol)
        begins = prefix.symbol == self._space
        child.earned, child.state, child.word = prefix.earned, prefix.state, prefix.word
        if symbol == self._space:
            child.earned += self._word_score(child)
        else:
            child.word += self._rules.symbols[symbol]
            if begins:
                child.earned += self._rules.word_bonus
        if self._language is not None and not self._by_words:
            value, child.state = self._language.score(child.state, self._tokens[symbol])
            child.earned += self._rules.language_weight * value
        child.language = child.earned
        if hot is not None:
            bonus, child.hot = hot.step(prefix.hot, symbol, begins=begins)
            child.earned += bonus
            child.language = child.earned + hot.ahead(child.hot)
        return child

    def _word_score(self, prefix: _Prefix) -> float:
        """End a word, and return its score of a language model by words."""
        word, prefix.word = prefix.word, ""
        if self._language is None or not self._by_words:
            return 0.0
        value, prefix.state = self._language.score(prefix.state, self._language.ids.get(word))
        return self._rules.language_weight * value

    def _best(self, beam: list[_Prefix], hot: HotWords | None) -> tuple[list[int], float]:
        # A text with a space behind it is the same text.
        totals: dict[_Prefix, float] = {}
        for prefix in beam:
            text = prefix
            if prefix.symbol == self._space and prefix.parent is not None:
                text = prefix.parent
            totals[text] = _sum(totals.get(text, NEVER), _sum(prefix.blank, prefix.label))
        best = max(totals, key=lambda text: totals[text] + self._ended(text, hot))
        score = totals[best] + self._ended(best, hot)
        symbols: list[int] = []
        node = best
        while node.parent is not None:
            symbols.append(node.symbol)
            node = node.parent
        return symbols[::-1], score

    def _ended(self, text: _Prefix, hot: HotWords | None) -> float:
        """Score of a text that ends here, beside its paths."""
        if text.parent is None:
            return 0.0
        score = text.earned
        if hot is not None:
            score += hot.end(text.hot)
        if self._language is None:
            return score
        if self._by_words:
            value, _ = self._language.score(text.state, self._language.ids.get(text.word))
        else:
            # Its last word ends: a pause may lie within a sentence.
            value, _ = self._language.score(text.state, self._tokens[self._space])
            if self._end_token is not None:
                value = _sum(value, self._language.score(text.state, self._end_token)[0])
        return score + self._rules.language_weight * value


def _touch(prefix: _Prefix, frame: int, touched: list[_Prefix]) -> None:
    prefix.stamp = frame
    prefix.next_blank = prefix.next_label = NEVER
    touched.append(prefix)


def _score_of(prefix: _Prefix) -> float:
    return prefix.score


def _sum(left: float, right: float) -> float:
    """The logarithm of the sum of two numbers whose logarithms are given."""
    if left < right:
        left, right = right, left
    gap = right - left
    # Below -36, double precision has nothing to add; NaN where both are minus infinity.
    return left + math.log1p(math.exp(gap)) if gap > -36.0 else left

"""Decode the frames of utterances again: prefix beam, language model, hot words, and the times of words."""

from collections.abc import Iterable
from typing import NamedTuple, final

import numpy as np

from penstock.core.spec import Array
from penstock.core.speech.ctc_alignment import aligned_words
from penstock.core.speech.endpoint_beam import EndpointBeam, Redecoded
from penstock.core.speech.hot_words import HotWord, HotWords
from penstock.core.speech.ngram import NGram, NGramScorer
from penstock.core.speech.prefix_beam import PrefixBeam, SearchRules, ShouldStop
from penstock.core.speech.spoken import Word

# T frames, V symbols

# Frames whose blank has this probability or more add nothing: one stands for all that follow one another.
SURE_BLANK = 0.999
BLANK_LOG_PROBABILITY = float(np.log(SURE_BLANK))


class UtteranceFrames(NamedTuple):
    """The frames of an utterance, without those that are surely blank.

    Args:
        log_probability_TV: float16 `[T, V]`.
        frame_T: int32 `[T]`, the number of each in the signal.
    """

    log_probability_TV: Array
    frame_T: Array


def sure_blank(symbols: int) -> Array:
    """Return the frame that stands for frames that are surely blank, float16 `[V]`."""
    blank_V = np.full(symbols, -np.inf, np.float16)
    blank_V[0] = 0
    return blank_V


@final
class UtteranceDecoder:
    """Decodes utterances of one application.

    Args:
        symbols: Labels of the output.
        beam: Its declaration.
        language: The language model of the bundle; None without one.
    """

    def __init__(self, symbols: tuple[str, ...], beam: EndpointBeam, language: NGram | None) -> None:
        self._symbols, self._beam = symbols, beam
        self._ids = {symbol: index for index, symbol in enumerate(symbols) if index}
        self._space = self._ids[" "]
        rules = SearchRules(
            symbols=symbols,
            space=self._space,
            width=beam.width,
            language_weight=beam.language_weight,
            word_bonus=beam.word_bonus,
        )
        scorer = None if language is None else NGramScorer(language)
        self._search = PrefixBeam(rules, scorer, "words" if language is None else language.unit)

    def decode(
        self, frames: UtteranceFrames, hot_words: Iterable[HotWord] = (), should_stop: ShouldStop = lambda: False
    ) -> Redecoded:
        """Decode an utterance.

        Args:
            frames: Its frames.
            hot_words: Of its stream, beside those of the application.
            should_stop: Asked now and then.

        Raises:
            SearchStopped: `should_stop` said so.
        """
        hot = self._hot_words((*self._beam.hot_words, *hot_words))
        symbols, _ = self._search.search(frames.log_probability_TV, hot, should_stop)
        frame_s = self._beam.frame_s
        words = tuple(
            Word(
                text="".join(self._symbols[symbol] for symbol in word.symbols),
                start_s=round(int(frames.frame_T[word.begin]) * frame_s, 3),
                end_s=round((int(frames.frame_T[word.end - 1]) + 1) * frame_s, 3),
                probability=round(word.probability, 4),
            )
            for word in aligned_words(frames.log_probability_TV, symbols, self._space)
        )
        return Redecoded(text=" ".join(word.text for word in words), words=words)

    def _hot_words(self, words: Iterable[HotWord]) -> HotWords | None:
        spelled: list[tuple[list[int], float]] = []
        for word in words:
            symbols = self._spelled(word.text)
            if symbols:
                spelled.append((symbols, self._beam.hot_bonus if word.bonus is None else word.bonus))
        return HotWords(spelled, self._space) if spelled else None

    def _spelled(self, text: str) -> list[int]:
        """The symbols of a text as it is written here, or in lower case; none where a character is no symbol."""
        for form in (text, text.lower()):
            characters = " ".join(form.split())
            if all(character in self._ids for character in characters):
                return [self._ids[character] for character in characters]
        return []

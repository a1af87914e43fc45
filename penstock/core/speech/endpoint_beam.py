"""The declaration of the endpoint beam: a second, better decoding of each utterance when it has ended."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from penstock.core.errors import ApplicationError
from penstock.core.speech.hot_words import MAX_BONUS, MAX_HOT_WORDS, HotWord
from penstock.core.speech.ngram import NGram
from penstock.core.speech.spoken import Word

MAX_WIDTH = 256
MAX_WAIT_S = 10.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Redecoded:
    """An utterance that was decoded again.

    Args:
        text: Its text.
        words: Its words, with times in seconds from where the signal began.
    """

    text: str
    words: tuple[Word, ...]


# `revise(event, redecoded)` returns the event that ends an utterance, with its better text.
Revise: TypeAlias = Callable[[Any, Redecoded], Any]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointBeam:
    """Decode each utterance again at its end, by a prefix beam search in a process beside the front-end.

    For outputs that are log-probabilities of CTC's symbols: the output's labels are characters, CTC's blank first, with
    a space. `Live.speech` says where utterances end. The text so far stays greedy.

    Args:
        frame_s: Time of an output frame in seconds.
        revise: Puts the better text into the event that ends an utterance. None leaves the application's own events
            greedy; the clients of speech services get the better text in any case.
        language: Makes the language model of a new bundle, or its import path; None for a beam without one. It is
            called when a bundle is written, and stored there.
        language_weight: Weight of the language model's log-probabilities.
        word_bonus: Added for each word, against the language model's preference for few.
        width: Prefixes that are kept after each frame.
        hot_words: Words that are likelier than the language model says.
        hot_bonus: Bonus of a hot word without one of its own, a natural logarithm.
        max_wait_s: Time that the end of a live utterance waits for the better text, in seconds; the greedy text is
            given after that.

    Raises:
        ApplicationError: A field is out of range.
    """

    frame_s: float
    revise: Revise | None = None
    language: Callable[[], NGram] | str | None = None
    language_weight: float = 0.5
    word_bonus: float = 0.5
    width: int = 16
    hot_words: tuple[HotWord, ...] = ()
    hot_bonus: float = 4.0
    max_wait_s: float = 1.0

    def __post_init__(self) -> None:
        for name, good, must in (
            ("frame_s", _is_number(self.frame_s, 1e-4, 10), "a number of seconds above 0"),
            ("revise", self.revise is None or callable(self.revise), "a function of an event and its better text"),
            (
                "language",
                self.language is None or isinstance(self.language, str) or callable(self.language),
                "a function that makes an NGram, or its import path",
            ),
            ("language_weight", _is_number(self.language_weight, 0, 10), "a number from 0 to 10"),
            ("word_bonus", _is_number(self.word_bonus, -10, 10), "a number from -10 to 10"),
            ("width", type(self.width) is int and 1 <= self.width <= MAX_WIDTH, f"from 1 to {MAX_WIDTH}"),
            (
                "hot_words",
                len(self.hot_words) <= MAX_HOT_WORDS and all(isinstance(word, HotWord) for word in self.hot_words),
                f"a tuple of at most {MAX_HOT_WORDS} HotWord",
            ),
            ("hot_bonus", _is_number(self.hot_bonus, 0, MAX_BONUS), f"a number from 0 to {MAX_BONUS:g}"),
            ("max_wait_s", _is_number(self.max_wait_s, 1e-3, MAX_WAIT_S), f"above 0, to {MAX_WAIT_S:g} seconds"),
        ):
            if not good:
                value = " ".join(repr(getattr(self, name)).split())[:80]
                raise ApplicationError(f"EndpointBeam has {name}={value}; it must be {must}.")


def _is_number(value: object, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most  # pyright: ignore[reportOperatorIssue]

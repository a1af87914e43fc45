"""Spoken words with their times, in one form for every protocol: the meaning of a live application's events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """One word.

    Args:
        text: The word, without spaces around it.
        start_s: Its start, in seconds from where the signal began: the start of the stream, or the last flush.
        end_s: Its end, likewise.
        probability: Of the word, 0 to 1; 1 where the application gives none.
    """

    text: str
    start_s: float
    end_s: float
    probability: float = 1.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Speech:
    """The part of what is spoken that one event adds.

    An utterance ends with an event that is `final`, and where a protocol ends it: at a flush, at the end of the stream,
    or after a pause that its client chose.

    Args:
        words: Words that were recognised, in order.
        delta: Text to append to the text of the utterance, with its spaces; it may end within a word, which is then in
            the `words` of a later event. None for the words, separated by spaces.
        final: Whether the utterance ends with this event.
        end_s: Where the utterance ends, on the clock of the words; None for all that was recognised with this event.
            Only with `final`, for the endpoint beam.
        text: Text of the whole utterance, where decoding it again at its end changed it; only with `final`. `words`
            are then all words of the utterance, in place of those before.
    """

    words: Sequence[Word] = ()
    delta: str | None = None
    final: bool = False
    end_s: float | None = None
    text: str | None = None


# `speech(event)` says what was spoken; None if the event says nothing of that.
SpeechOf: TypeAlias = Callable[[Any], Speech | None]

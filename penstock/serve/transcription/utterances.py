"""Utterances: what a live application hears, from the events of its results, in one form for all protocols.

`hear` takes what each result adds and how far into the signal it reaches, and returns what changed. There is no clock:
a pause is time of the signal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias, final

from penstock.core.speech.spoken import Speech, Word

# Longest text of one utterance, for applications that never end one; what is beyond it begins the next.
MAX_TEXT = 10_000


class Cause(Enum):
    """Cause of the end of an utterance: the application, a pause, its length, a flush or the end of the stream."""

    APPLICATION = "application"
    PAUSE = "pause"
    LENGTH = "length"
    FLUSH = "flush"


@final
@dataclass(frozen=True, slots=True)
class Began:
    """Speech began at this second of the signal."""

    at_s: float


@final
@dataclass(frozen=True, slots=True)
class Grew:
    """This was added to the text of the utterance."""

    delta: str


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Utterance:
    """An utterance that ended.

    Args:
        text: Its text.
        words: Its words, with times in seconds from the start of the stream.
        start_s: Where its part of the signal begins: the end of that before it.
        end_s: Where its part ends, behind its last word.
        cause: Why it ended.
    """

    text: str
    words: Sequence[Word]
    start_s: float
    end_s: float
    cause: Cause


Change: TypeAlias = Began | Grew | Utterance


@final
class Utterances:
    """The utterances of one stream.

    Args:
        pause_s: Silence after which an utterance ends; None to leave that to the application.
        max_s: Length at which an utterance is ended after a word; None for any.

    Attributes:
        pause_s: May be changed between two calls.
        text: Text of the open utterance, empty if there is none.
        words: Its words.
        start_s: Where its part of the signal begins.
        last_word_s: End of the last word of all, or of the text that no word has yet; None before the first.
    """

    def __init__(self, pause_s: float | None = None, max_s: float | None = None) -> None:
        self.pause_s, self._max_s = pause_s, max_s
        self.text, self.start_s = "", 0.0
        self.words: list[Word] = []
        self.last_word_s: float | None = None
        self._open = False
        self._began_s = self._heard_s = 0.0
        # Where the text begins that no word has yet.
        self._tail_s = 0.0
        # Words of utterances that a pause ended before the application gave them, and whether the text goes on with
        # the last of them.
        self._owed: list[str] = []
        self._is_rest = False

    def hear(self, speech: Speech | None, until_s: float) -> list[Change]:
        """Take what a result adds.

        Args:
            speech: What was spoken; its words have times from the start of the stream.
            until_s: Seconds of the signal that are recognised with it.
        """
        changes: list[Change] = []
        if speech is not None:
            self._add(speech, until_s, changes)
            if speech.final:
                self._owed = []
        if not self._open:
            return changes
        if speech is not None and speech.final:
            if speech.text is not None:
                self.text, self.words = speech.text, list(speech.words)
            end_s = until_s if speech.end_s is None else min(max(speech.end_s, self.start_s), until_s)
            changes.append(self._end(end_s, Cause.APPLICATION))
        elif self.pause_s is not None and until_s - self._heard_s >= self.pause_s:
            self._complete()
            changes.append(self._end(until_s, Cause.PAUSE))
        elif self._is_long(speech, until_s):
            changes.append(self._cut(until_s))
        return changes

    def end(self, until_s: float) -> Utterance:
        """End what is open, at a flush or at the end of the stream; it may be empty."""
        self._owed = []
        return self._end(until_s, Cause.FLUSH)

    def _add(self, speech: Speech, until_s: float, changes: list[Change]) -> None:
        words, delta = self._not_owed(speech.words), speech.delta
        if speech.text is not None:
            # Its words are those of the whole utterance, of which some may be here.
            delta = (delta or "") if self._open else speech.text
        elif delta is None:
            delta = " ".join(word.text for word in words)
            if self.text and delta:
                delta = f" {delta}"
        if not delta and not words:
            return
        if not self._open:
            self._open, self._began_s = True, words[0].start_s if words else until_s
            changes.append(Began(self._began_s))
            self._is_rest = bool(self._owed) and not delta[:1].isspace()
            delta = delta.lstrip()
        was_whole = not self._tail
        self.text += delta
        if speech.text is None:
            self.words += words
        # A word that is not complete lasts until now.
        self._heard_s = words[-1].end_s if words and not self._tail else until_s
        self.last_word_s = words[-1].end_s if words and speech.final else self._heard_s
        if self._tail and (was_whole or words):
            self._tail_s = until_s
        if delta:
            changes.append(Grew(delta))

    @property
    def words_so_far(self) -> list[Word]:
        """The words of the open utterance, and of its text that has none yet, with the times of its results."""
        return self.words + [Word(text=text, start_s=self._tail_s, end_s=self._heard_s) for text in self._tail]

    @property
    def _tail(self) -> list[str]:
        """The text behind the last word, cut at spaces."""
        return self.text.split()[len(self.words) :]

    def _complete(self) -> None:
        """Make words of the text that has none yet."""
        tail, self.words = self._tail, self.words_so_far
        if tail and self._owed and self._is_rest:
            # The word has several pauses in it.
            tail = [*self._owed[:-1], self._owed[-1] + tail[0], *tail[1:]]
        self._owed = tail

    def _not_owed(self, words: Sequence[Word]) -> Sequence[Word]:
        """The words without those, and without the beginning of that, which were made of text before."""
        if not (words and self._owed):
            return words
        owed, self._owed = self._owed[: len(words)], self._owed[len(words) :]
        *late, last = (word.text for word in words[: len(owed)])
        rest = last.removeprefix(owed[-1])
        if late != owed[:-1] or rest == last or (rest and self._owed):
            self._owed = []
            return words
        if not rest:
            return words[len(owed) :]
        word = words[len(owed) - 1]
        # Its beginning was told with the utterance before.
        start_s = min(max(word.start_s, self.start_s), word.end_s)
        return [replace(word, text=rest, start_s=start_s), *words[len(owed) :]]

    def _is_long(self, speech: Speech | None, until_s: float) -> bool:
        if speech is None:
            return False
        by_time = self._max_s is not None and bool(speech.words) and until_s - self._began_s >= self._max_s
        return by_time or len(self.text) > MAX_TEXT

    def _cut(self, until_s: float) -> Utterance:
        """End the utterance after its last whole word; the rest begins the next one."""
        at = len(self.text) if not self._tail else self.text.rfind(" ") + 1 or len(self.text)
        rest = self.text[at:].lstrip()
        self.text = self.text[:at].rstrip()
        # What follows the word is of the next one.
        end_s = max(self.start_s, self.words[-1].end_s) if self.words else until_s
        ended = self._end(min(end_s, until_s), Cause.LENGTH)
        if rest:
            self._open, self.text, self._began_s = True, rest, until_s
        return ended

    def _end(self, end_s: float, cause: Cause) -> Utterance:
        ended = Utterance(text=self.text.strip(), words=self.words, start_s=self.start_s, end_s=end_s, cause=cause)
        self.text, self.words, self.start_s, self._open = "", [], end_s, False
        return ended


def shifted(speech: Speech, by_s: float) -> Speech:
    """The same with words, and an end, that are so much later."""
    words = [replace(word, start_s=word.start_s + by_s, end_s=word.end_s + by_s) for word in speech.words]
    return replace(speech, words=words, end_s=None if speech.end_s is None else speech.end_s + by_s)

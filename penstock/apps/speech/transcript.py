"""From CTC's frames to text: characters as they are certain, words with their times, and the ends of utterances.

Greedy, and append only: what was told is never taken back. Pure Python over the frames' best symbols, because most
chunks have none, and this runs for every chunk of every stream.
"""

import math
from typing import Any

from penstock.core.spec import Array
from penstock.core.speech.endpoint_beam import Redecoded
from penstock.core.speech.spoken import Speech, Word

# U frames of an output, V symbols

BLANK, SPACE = 0, 1
# An utterance ends after so much silence where nothing was said, after so much behind a word, and after so long at the
# latest: the rules of Kaldi's and sherpa-onnx's endpointing.
SILENCE_S, AFTER_SPEECH_S, LONGEST_S = 2.4, 1.2, 20.0


def transcribed(
    output_U: Array, memory: Any, last: bool, *, symbols: tuple[str, ...], frame_s: float
) -> tuple[dict[str, Any] | None, list[Any]]:
    """Return what is new in these frames.

    Repeated symbols count once and blanks not at all: Graves et al. 2006, "Connectionist Temporal Classification",
    section 3.1.

    Args:
        output_U: `[U, V]`, log-probabilities of the symbols.
        memory: What the last call returned; None at first.
        last: Whether the stream ends here, and its last word and utterance with it.
        symbols: The symbols; `-` first and the space second.
        frame_s: Time of a frame in seconds.

    Returns:
        The event, or None where nothing is new: `text`, the new characters; `words`, those that ended, each with
        `word`, `probability` (the geometric mean of its characters'), `begin_s` and `time_s`, its end in the signal;
        and where an utterance ends `final`, with `end_s`, its end in the signal. And the memory for the next call.
    """
    utterance = _Utterance(memory, symbols, frame_s)
    best_U: list[int] = output_U.argmax(1).tolist() if len(output_U) else []
    for frame, symbol in enumerate(best_U):
        utterance.take(symbol, output_U[frame])
    if last:
        utterance.end()
        utterance.join_next()
    return utterance.event(), utterance.memory()


def spoken(event: dict[str, Any]) -> Speech:
    """Return what an event says was spoken, for the clients of other makers' services."""
    final, end_s = event.get("final", False), event.get("end_s")
    if "utterance" not in event:
        return Speech(words=_words(event["words"]), delta=event["text"], final=final, end_s=end_s)
    better = event["utterance"]
    return Speech(words=_words(better["words"]), delta=event["text"], final=final, end_s=end_s, text=better["text"])


def revised(event: dict[str, Any], redecoded: Redecoded) -> dict[str, Any]:
    """Return the event that ends an utterance with `utterance`: its text and all of its words, decoded again."""
    words = [
        {
            "word": word.text,
            "probability": word.probability,
            "begin_s": round(word.start_s, 2),
            "time_s": round(word.end_s, 2),
        }
        for word in redecoded.words
    ]
    return event | {"utterance": {"text": redecoded.text, "words": words}}


def _words(words: list[dict[str, Any]]) -> list[Word]:
    return [
        Word(text=each["word"], start_s=each["begin_s"], end_s=each["time_s"], probability=each["probability"])
        for each in words
    ]


class _Utterance:
    """The utterance that is heard.

    Args:
        memory: Of the frames before.
        symbols: The symbols.
        frame_s: Time of a frame in seconds.
    """

    def __init__(self, memory: Any, symbols: tuple[str, ...], frame_s: float) -> None:
        self._symbols, self._frame_s = symbols, frame_s
        # The last symbol, the frames of the stream, those of the utterance and of the silence in it, whether it has
        # text; of the word: its characters, its first frame, the frame of its last character, the sum of their
        # log-probabilities.
        fresh = (BLANK, 0, 0, 0, False, "", 0, 0, 0.0, "", [])
        (
            self._before,
            self._frames,
            self._heard,
            self._silent,
            self._has_text,
            self._word,
            self._begin,
            self._until,
            self._log,
            self._text,
            words,
        ) = memory or fresh
        self._words: list[dict[str, Any]] = [*words]
        self._final, self._end_s = False, 0.0
        # Of the next utterance, where one has ended in these frames: they come with the next event.
        self._next_text, self._next_words = "", list[dict[str, Any]]()

    def take(self, symbol: int, log_probability_V: Array) -> None:
        """Take the best symbol of a frame."""
        self._frames += 1
        self._heard += 1
        self._silent += 1
        if symbol not in (self._before, BLANK):
            if symbol == SPACE:
                self._end_word()
            else:
                self._add(self._symbols[symbol], float(log_probability_V[symbol]))
        if symbol not in (BLANK, SPACE):
            self._silent, self._until = 0, self._frames
        self._before = symbol
        silence_s = self._silent * self._frame_s
        if silence_s >= (AFTER_SPEECH_S if self._has_text else SILENCE_S) or self._heard * self._frame_s >= LONGEST_S:
            self.end()

    def end(self) -> None:
        """End the word and the utterance."""
        self._end_word()
        if self._has_text:
            self._final, self._end_s = True, round(self._frames * self._frame_s, 3)
        self._heard = self._silent = 0
        self._has_text = False

    def event(self) -> dict[str, Any] | None:
        """Return what is new; None if nothing is."""
        if not (self._text or self._words or self._final):
            return None
        event: dict[str, Any] = {"text": self._text, "words": self._words}
        return event | {"final": True, "end_s": self._end_s} if self._final else event

    def memory(self) -> list[Any]:
        """Return what the next frames need, as JSON values."""
        utterance = self._before, self._frames, self._heard, self._silent, self._has_text
        word = self._word, self._begin, self._until, round(self._log, 4)
        return [*utterance, *word, self._next_text, self._next_words]

    def join_next(self) -> None:
        """Put what belongs to the next utterance behind this one, as no event follows."""
        if self._next_text:
            # The text before it may be in earlier events.
            self._text += f" {self._next_text}"
        self._words += self._next_words
        self._end_s = round(self._frames * self._frame_s, 3)
        self._next_text, self._next_words = "", []

    def _add(self, character: str, log_probability: float) -> None:
        if not self._word:
            # Between the words of an utterance, and not before the first.
            if self._has_text:
                self._say(" ")
            self._begin, self._log = self._frames - 1, 0.0
        self._word += character
        self._log += log_probability
        self._say(character)
        self._has_text = True

    def _say(self, text: str) -> None:
        if self._final:
            self._next_text += text
        else:
            self._text += text

    def _end_word(self) -> None:
        if self._word:
            (self._next_words if self._final else self._words).append(
                {
                    "word": self._word,
                    "probability": round(math.exp(self._log / len(self._word)), 4),
                    "begin_s": round(self._begin * self._frame_s, 2),
                    "time_s": round(self._until * self._frame_s, 2),
                }
            )
            self._word = ""

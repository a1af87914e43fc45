"""Subword tokens by byte-pair encoding, with the vocabulary as data.

Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units".

The whole method, which `device/web/subwords.js` has too; `tests/data/subwords.json` tests both:

1. Normalize the text to NFC, replace each run of white space by one space, and put one space before the text.
2. Split it into pieces: a run of letters and marks (Unicode categories L and M), or one other character; the space
   before a piece belongs to it. A piece has 64 characters at most.
3. Split each piece into characters; a character that is not in the vocabulary is split into its bytes in UTF-8.
4. While some pair of neighbours is in the list of merges, join the leftmost pair of those that come first in the list.

The numbers of tokens are: the special ones, 256 bytes, the characters, then one token for each merge.
"""

import codecs
import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import final

from penstock.core.errors import ApplicationError

SPECIAL = 4
BYTES = 256
# Joining the pairs of a piece takes the square of its length.
MAX_PIECE = 64
_CACHED_PIECES = 1 << 16


@final
class Subwords:
    """Converts text to tokens and back.

    Args:
        characters: Characters with a token of their own.
        merges: Pairs of texts to join, the most important first.
        special: Number of tokens without a text, the first ones: for padding, the beginning and the end of an answer.

    Raises:
        ApplicationError: A character is none, a merge joins what is no token, or `special` is negative.
    """

    def __init__(self, characters: Sequence[str], merges: Sequence[tuple[str, str]], special: int = SPECIAL) -> None:
        self.characters, self.merges, self.special = list(characters), list(merges), special
        if type(special) is not int or special < 0:
            raise ApplicationError(f"a vocabulary has special={special!r}; give a whole number, at least 0.")
        for character in self.characters:
            if len(character) != 1:
                raise ApplicationError(f"a vocabulary has {character!r}, which is not one character.")
        self._texts = [bytes([byte]) for byte in range(BYTES)]
        self._texts += [text.encode() for text in (*self.characters, *(one + other for one, other in self.merges))]
        self._numbers = {character: special + BYTES + place for place, character in enumerate(self.characters)}
        known = dict(self._numbers)
        # From a pair of tokens to the token of both; tokens of later merges have higher numbers.
        self._pairs: dict[tuple[int, int], int] = {}
        for number, (one, other) in enumerate(self.merges, start=special + BYTES + len(self.characters)):
            if one not in known or other not in known:
                raise ApplicationError(f"a vocabulary merges {one!r} and {other!r}, which are not both tokens before.")
            self._pairs[known[one], known[other]] = number
            known.setdefault(one + other, number)
        self._of_piece = lru_cache(_CACHED_PIECES)(self._merged)

    @classmethod
    def read(cls, file: str | Path) -> "Subwords":
        """Read a vocabulary that `write` wrote.

        Raises:
            ApplicationError: It is none.
        """
        try:
            found = json.loads(Path(file).read_text(encoding="utf-8"))
            merges = [line.split("\t") for line in found["merges"]]
            return cls(found["characters"], [(one, other) for one, other in merges], found.get("special", SPECIAL))
        except (ApplicationError, OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            cause = f"{error}" if isinstance(error, ApplicationError) else f"{type(error).__name__}: {error}"
            raise ApplicationError(
                f"{file} is no vocabulary of subwords ({cause.rstrip('.')}); "
                f"penstock.core.texts.learn_subwords.learn_subwords(texts, size).write(FILE) writes one."
            ) from None

    def write(self, file: str | Path) -> None:
        """Write the vocabulary as JSON."""
        merges = [f"{one}\t{other}" for one, other in self.merges]
        found = {"special": self.special, "characters": "".join(self.characters), "merges": merges}
        Path(file).write_text(json.dumps(found, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")

    def __len__(self) -> int:
        return self.special + len(self._texts)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return [token for piece in pieces(text) for token in self._of_piece(piece)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; special ones are left out."""
        return "".join(self.parts(tokens))

    def parts(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of each token as it comes, and the rest; a character of several tokens comes with its last."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        is_first = True
        for token in tokens:
            known = self.special <= token < len(self)
            text = decoder.decode(self._texts[token - self.special] if known else b"")
            yield text.removeprefix(" ") if is_first else text
            is_first = is_first and not text
        yield decoder.decode(b"", final=True)

    def _merged(self, piece: str) -> tuple[int, ...]:
        tokens: list[int] = []
        for character in piece:
            number = self._numbers.get(character)
            tokens += [self.special + byte for byte in character.encode()] if number is None else [number]
        while len(tokens) > 1:
            joined = [self._pairs.get(pair) for pair in pairwise(tokens)]
            first = min((number for number in joined if number is not None), default=None)
            if first is None:
                break
            place = joined.index(first)
            tokens[place : place + 2] = [first]
        return tuple(tokens)


@cache
def read_subwords(file: Path) -> Subwords:
    """Read a vocabulary once a process.

    Raises:
        ApplicationError: It is none.
    """
    return Subwords.read(file)


def pieces(text: str) -> Iterator[str]:
    """Split a text into the pieces that tokens do not cross."""
    text = " " + " ".join(unicodedata.normalize("NFC", text).split())
    begin = 0
    for place, character in enumerate(text):
        if place == begin or (character != " " and text[begin:place] == " "):
            continue
        joins = _is_letter(character) and _is_letter(text[place - 1]) and place - begin < MAX_PIECE
        if not joins:
            yield text[begin:place]
            begin = place
    if text[begin:].strip():
        yield text[begin:]


def _is_letter(character: str) -> bool:
    # The first is faster, and true for category L alone.
    return character.isalpha() or unicodedata.category(character)[0] == "M"

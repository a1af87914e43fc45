"""Subword tokens by byte-pair encoding.

Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units".

The whole method, so that it can be written in another language too:

1. Normalize the text to NFC, replace each run of white space by one space, and put one space before the text.
2. Split it into pieces: a run of letters and marks (Unicode categories L and M), or one other character; the space
   before a piece belongs to it.
3. Split each piece into characters; a character that is not in the vocabulary is split into its bytes in UTF-8.
4. While some pair of neighbours is in the list of merges, join the leftmost pair of those that come first in the list.

The numbers of tokens are: the special ones, 256 bytes, the characters, then one token for each merge.
"""

import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import final

PADDING, FIRST, END, SYNTHETIC = range(4)
SPECIAL = 4
BYTES = 256
VOCABULARY = Path(__file__).parent / "data" / "vocabulary.json"
_CACHED_PIECES = 1 << 16


@final
class Tokenizer:
    """Converts text to tokens and back.

    Args:
        characters: Characters with a token of their own.
        merges: Pairs of texts to join, the most important first.
    """

    def __init__(self, characters: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        self.characters, self.merges = list(characters), list(merges)
        self._texts = [bytes([byte]) for byte in range(BYTES)]
        self._texts += [text.encode() for text in (*self.characters, *(one + other for one, other in self.merges))]
        self._numbers = {character: SPECIAL + BYTES + place for place, character in enumerate(self.characters)}
        known = dict(self._numbers)
        # From a pair of tokens to the token of both; tokens of later merges have higher numbers.
        self._pairs: dict[tuple[int, int], int] = {}
        for number, (one, other) in enumerate(self.merges, start=SPECIAL + BYTES + len(self.characters)):
            self._pairs[known[one], known[other]] = number
            known.setdefault(one + other, number)
        self._of_piece = lru_cache(_CACHED_PIECES)(self._merged)

    @classmethod
    def read(cls, file: Path = VOCABULARY) -> "Tokenizer":
        """Read a vocabulary that `write` wrote."""
        found = json.loads(file.read_text())
        merges = [line.split("\t") for line in found["merges"]]
        return cls(found["characters"], [(one, other) for one, other in merges])

    def write(self, file: Path) -> None:
        """Write the vocabulary as JSON."""
        merges = [f"{one}\t{other}" for one, other in self.merges]
        found = {"characters": "".join(self.characters), "merges": merges}
        file.write_text(json.dumps(found, ensure_ascii=False, indent=0) + "\n")

    def __len__(self) -> int:
        return SPECIAL + len(self._texts)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        return [token for piece in pieces(text) for token in self._of_piece(piece)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens; special ones are left out."""
        known = [self._texts[token - SPECIAL] for token in tokens if token >= SPECIAL]
        return b"".join(known).decode(errors="replace").removeprefix(" ")

    def _merged(self, piece: str) -> tuple[int, ...]:
        tokens: list[int] = []
        for character in piece:
            number = self._numbers.get(character)
            tokens += [SPECIAL + byte for byte in character.encode()] if number is None else [number]
        while len(tokens) > 1:
            joined = [self._pairs.get(pair) for pair in pairwise(tokens)]
            first = min((number for number in joined if number is not None), default=None)
            if first is None:
                break
            place = joined.index(first)
            tokens[place : place + 2] = [first]
        return tuple(tokens)


def pieces(text: str) -> Iterator[str]:
    """Split a text into the pieces that tokens do not cross."""
    text = " " + " ".join(unicodedata.normalize("NFC", text).split())
    begin = 0
    for place, character in enumerate(text):
        if place == begin or (character != " " and text[begin:place] == " "):
            continue
        if not (_is_letter(character) and _is_letter(text[place - 1])):
            yield text[begin:place]
            begin = place
    if text[begin:].strip():
        yield text[begin:]


def _is_letter(character: str) -> bool:
    # The first is faster, and true for category L alone.
    return character.isalpha() or unicodedata.category(character)[0] == "M"

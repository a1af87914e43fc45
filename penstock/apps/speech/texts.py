"""English texts to be spoken: WordNet's examples, definitions and words, and lines of other files."""

import re
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.apps.speech.recipe import spelled, words_of
from penstock.core.errors import TrainError

WORDNET = Path("/usr/share/wordnet")
WORDS = 2, 22
# Characters that every synthesizer takes; others are in names and formulas.
SPOKEN = re.compile(r"[A-Za-z ,.;:!?'-]+")
# An example belongs to a split by a hash of its words, so that the splits do not depend on what else there is.
HASHED_PARTS = 64
HELD_OUT = {"validation": 0, "test": 1}
# Of a text that is drawn.
SHARES = {"examples": 0.45, "definitions": 0.25, "words": 0.1, "lines": 0.2}
LISTED_WORDS = 2, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """Texts of a split, by their kind.

    Args:
        examples: Examples of WordNet.
        definitions: Its definitions.
        words: Its words and phrases, which are spoken as short lists.
        lines: Lines of other files.
    """

    examples: Sequence[str]
    definitions: Sequence[str] = ()
    words: Sequence[str] = ()
    lines: Sequence[str] = ()

    def drawn(self, rng: np.random.Generator) -> str:
        """Draw a text."""
        kinds = [name for name in SHARES if getattr(self, name)]
        shares = np.array([SHARES[name] for name in kinds])
        kind = kinds[int(rng.choice(len(kinds), p=shares / shares.sum()))]
        among: Sequence[str] = getattr(self, kind)
        if kind != "words":
            return among[int(rng.integers(len(among)))]
        picked = rng.integers(len(among), size=int(rng.integers(*LISTED_WORDS, endpoint=True)))
        return ", ".join(among[int(number)] for number in picked)


def read_texts(split: str, wordnet: Path = WORDNET, files: Iterable[Path] = (), without: Iterable[Path] = ()) -> Texts:
    """Read the texts of a split; only `"train"` has others than examples.

    Args:
        split: `"train"`, `"validation"` or `"test"`.
        wordnet: Folder of WordNet's files.
        files: Text files, a sentence a line.
        without: Text files with lines that must not be among the texts, such as those of a test.

    Raises:
        TrainError: WordNet is not there, or has no example for the split, or a file cannot be read.
    """
    glosses = _glosses(wordnet)
    banned = {normalized(line) for file in without for line in _lines(file)}
    examples = _usable((example for gloss in glosses for example in re.findall(r'"([^"]+)"', gloss)), banned)
    own = [text for text in examples if split_of(text) == split]
    if not own:
        raise TrainError(f"{wordnet} has no example for {split}; give the whole of WordNet.")
    if split != "train":
        return Texts(examples=own)
    held_out = banned | {normalized(text) for text in examples if split_of(text) != "train"}
    return Texts(
        examples=own,
        definitions=_usable((re.sub(r'\([^)]*\)|"[^"]*"', " ", gloss).split(";")[0] for gloss in glosses), held_out),
        words=_words(wordnet),
        lines=_usable((line for file in files for line in _lines(file)), held_out),
    )


def split_of(text: str) -> str:
    """Return the split of an example."""
    part = zlib.crc32(normalized(text).encode()) % HASHED_PARTS
    return next((split for split, own in HELD_OUT.items() if part == own), "train")


def normalized(text: str) -> str:
    """Return the words of a text in the symbols of the network; empty if it has others."""
    try:
        return " ".join(words_of(spelled([text])[0].tolist()))
    except TrainError:
        return ""


def _usable(found: Iterable[str], banned: Collection[str]) -> list[str]:
    """Keep the texts of few words that every synthesizer can speak, each once."""
    kept: dict[str, str] = {}
    for text in found:
        text = " ".join(text.split())
        if not SPOKEN.fullmatch(text):
            continue
        words = normalized(text)
        if WORDS[0] <= len(words.split()) <= WORDS[1] and words not in banned:
            kept.setdefault(words, text)
    return list(kept.values())


def _words(folder: Path) -> list[str]:
    """Read WordNet's words and phrases: field 5 of a line and every second one after it."""
    found: dict[str, None] = {}
    for file in sorted(folder.glob("data.*")):
        for line in _lines(file):
            fields = line.split()
            if not line.startswith(" ") and len(fields) > 4:
                count = int(fields[3], 16)
                for word in fields[4 : 4 + 2 * count : 2]:
                    word = word.partition("(")[0].replace("_", " ")
                    # Abbreviations are spoken letter by letter.
                    if SPOKEN.fullmatch(word) and word[1:].islower() and len(word) > 2 and "." not in word:
                        found[word] = None
    return list(found)


def _glosses(folder: Path) -> list[str]:
    found = [line.partition("| ")[2] for file in sorted(folder.glob("data.*")) for line in _lines(file)]
    if not found:
        raise TrainError(
            f"{folder} has no files data.* of WordNet; install wordnet-base, or name its folder by --wordnet."
        )
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise TrainError(f"{file} cannot be read ({error.strerror}).") from None

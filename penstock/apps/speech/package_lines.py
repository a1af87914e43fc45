"""Write more English sentences, a line each: `python -m penstock.apps.speech.package_lines PACKAGES > lines.txt`.

PACKAGES is a folder with Debian's libreoffice-help-en-us and asterisk-core-sounds-en, as `apt-get download` leaves
them. The sentences are those of the help pages of LibreOffice, and made-up phrases of telephone systems. The prompts of
Asterisk are a test of the recogniser: a prompt, or a sentence of one, is left out.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.apps.speech.texts import normalized
from penstock.apps.translate.corpus.held_out import LEAST_WORDS, read_prompts
from penstock.apps.translate.corpus.help_pages import help_texts
from penstock.apps.translate.corpus.phrases import phrase_pairs
from penstock.core.errors import PenstockError, TrainError

HELP, PROMPTS = "libreoffice-help-en-us", "asterisk-core-sounds-en"
PHRASES = 20_000
SEED = 0
_ENDS = re.compile(r"(?<=[.!?:])\s+")


def package_lines(packages: Path) -> Iterator[str]:
    """Yield the sentences, each once.

    Raises:
        TrainError: A package is missing or damaged.
    """
    seen = forbidden_words(package_of(packages, PROMPTS))
    for text in _texts(package_of(packages, HELP)):
        for sentence in _ENDS.split(text):
            words = normalized(sentence)
            if words and words not in seen:
                seen.add(words)
                yield " ".join(sentence.split())


def forbidden_words(prompts: Path) -> set[str]:
    """Return the words of each prompt, and of each of its sentences, of three words or more."""
    found = read_prompts(prompts).values()
    parts = {normalized(part) for text in found for part in (text, *re.split(r"[.!?,;]", text))}
    return {part for part in parts if len(part.split()) >= LEAST_WORDS}


def package_of(folder: Path, name: str) -> Path:
    """Find a package in a folder.

    Raises:
        TrainError: It is not there.
    """
    found = sorted(folder.glob(f"{name}_*.deb"))
    if not found:
        raise TrainError(f"{folder} has no package {name}; run 'apt-get download {name}' there.")
    return found[-1]


def _texts(help_pages: Path) -> Iterator[str]:
    yield from help_texts(help_pages, "en-US")
    for pair in phrase_pairs(PHRASES, SEED):
        yield pair.english


def main(argv: Sequence[str] | None = None) -> None:
    """Print the sentences."""
    parser = argparse.ArgumentParser(prog="python -m penstock.apps.speech.package_lines", description=__doc__)
    parser.add_argument("packages", type=Path)
    parsed = parser.parse_args(argv)
    try:
        for line in package_lines(parsed.packages):
            print(line)
    except (PenstockError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()

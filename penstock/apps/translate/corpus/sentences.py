"""Sentences in one language from Debian packages: examples of WordNet, fortunes, manual pages."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.apps.translate.corpus.archives import files_in

LEAST_WORDS, MOST_WORDS = 3, 40
_EXAMPLE = re.compile(r'"([^"]+)"')
_MACRO = re.compile(r"\\f.|\\-|\\\(..|\\[&|~e]|\\m\[\w*\]")


def wordnet_examples(package: Path) -> Iterator[str]:
    """Example sentences of wordnet-base, in English."""
    for _, content in files_in(
        package, lambda path: "/wordnet/data." in path or ("/wordnet/" in path and "/data." in path)
    ):
        for line in content.decode(errors="replace").splitlines():
            _, _, gloss = line.partition(" | ")
            yield from filter(_is_sentence, _EXAMPLE.findall(gloss))


def fortunes(package: Path) -> Iterator[str]:
    """Sentences of fortunes-es, in Spanish."""
    for _, content in files_in(package, lambda path: path.endswith(".fortunes")):
        for fortune in content.decode(errors="ignore").split("\n%\n"):
            yield from _split(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", fortune).split()))


def manual_pages(package: Path) -> Iterator[str]:
    """Sentences of manpages-es, in Spanish."""
    for _, content in files_in(package, lambda path: "/man/es/man" in path and path.endswith(".gz")):
        paragraph: list[str] = []
        for line in gzip.decompress(content).decode(errors="ignore").splitlines():
            if line.startswith((".", "'")):
                yield from _split(" ".join(" ".join(paragraph).split()))
                paragraph = []
            else:
                paragraph.append(_MACRO.sub("", line))


def _split(text: str) -> Iterator[str]:
    yield from filter(_is_sentence, re.split(r"(?<=[.!?]) +(?=[A-ZÁÉÍÓÚÑ¿¡])", text))


def _is_sentence(text: str) -> bool:
    return LEAST_WORDS <= len(text.split()) <= MOST_WORDS and re.search(r"[|<>\\{}\[\]=*_#@~^]", text) is None

"""Pairs from the help pages of LibreOffice, whose paragraphs have the same ids in every language."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

from penstock.apps.translate.corpus.archives import files_in
from penstock.apps.translate.corpus.pairs import Pair

_ROOT = "usr/share/libreoffice/help/"
_ID = re.compile(r"(par|hd|tit)_id\w+")
_VOID = {"br", "img", "meta", "link", "input", "hr"}


class _Paragraphs(HTMLParser):
    """The text of each element that has an id of a paragraph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._open: list[str | None] = []
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:
            self._text.append(" ")
            return
        name = dict(attrs).get("id") or ""
        found = name if tag in ("p", "h1", "h2", "h3", "h4", "h5") and _ID.fullmatch(name) else None
        if found is not None:
            self._text = []
        self._open.append(found)

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID or not self._open:
            return
        name = self._open.pop()
        if name is not None:
            self.found.setdefault(name, " ".join("".join(self._text).split()))

    def handle_data(self, data: str) -> None:
        self._text.append(data)


def help_pairs(english: Path, spanish: Path) -> Iterator[Pair]:
    """Align the paragraphs of libreoffice-help-en-us and libreoffice-help-es.

    Args:
        english: The .deb of the English pages.
        spanish: The .deb of the Spanish pages.
    """
    pages = dict(_pages(english, "en-US"))
    for path, translated in _pages(spanish, "es"):
        original = pages.get(path, {})
        for name, text in translated.items():
            if name in original:
                yield Pair(original[name], text, "libreoffice-help")


def help_texts(package: Path, language: str) -> Iterator[str]:
    """Yield the paragraphs of the help pages of one language.

    Args:
        package: The .deb of the pages.
        language: Its folder, such as `en-US`.
    """
    for _, found in _pages(package, language):
        yield from found.values()


def _pages(package: Path, language: str) -> Iterator[tuple[str, dict[str, str]]]:
    root = f"{_ROOT}{language}/text/"
    for path, content in files_in(package, lambda path: path.startswith(root) and path.endswith(".html")):
        parser = _Paragraphs()
        parser.feed(content.decode())
        yield str(PurePosixPath(path).relative_to(root)), parser.found

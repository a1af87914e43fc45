"""Pairs from the message catalogues of programs (.mo): sentences that people translated."""

import gettext
import html
import io
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.apps.translate.corpus.archives import files_in
from penstock.apps.translate.corpus.pairs import Pair

_CATALOGUE = re.compile(r"(^|/)(es|es_\w+)/LC_MESSAGES/[^/]+\.mo$")
# A letter of a menu that the keyboard opens: "Save _As", "&File", "~Edit".
_MNEMONIC = re.compile(r"[_&~](?=\w)")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")


def catalogue_pairs(package: Path) -> Iterator[Pair]:
    """Read the Spanish catalogues of a package.

    Yields:
        English and Spanish messages, without mnemonics and markup.
    """
    for path, content in files_in(package, lambda path: _CATALOGUE.search(path) is not None):
        try:
            messages = gettext.GNUTranslations(io.BytesIO(content))._catalog  # type: ignore[attr-defined]
        except (OSError, UnicodeDecodeError, ValueError, LookupError):
            # A damaged catalogue of one program; there are thousands.
            continue
        for key, spanish in messages.items():
            english, form = key if isinstance(key, tuple) else (key, 0)
            # A context stands before the message. Plural forms have the singular as their key.
            english = english.rpartition("\x04")[2]
            if english and form == 0 and isinstance(spanish, str):
                yield Pair(plain(english), plain(spanish), path.rpartition("/")[2])


def plain(message: str) -> str:
    """Return a message without mnemonics, markup and line breaks."""
    if len(_MNEMONIC.findall(message)) == 1 and "://" not in message:
        message = _MNEMONIC.sub("", message)
    message = html.unescape(_TAG.sub(" ", message))
    return " ".join(message.replace("\\n", " ").split())

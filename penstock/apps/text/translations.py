"""Sentences of many languages: the translations that the package Django ships, read without importing it."""

import importlib.util
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

from penstock.apps.text.app import CODES
from penstock.core.errors import TrainError

# "%(name)s", "%d", "{name}": no language.
PLACEHOLDER = re.compile(r"%\(\w+\)[a-z]|%[a-z]|\{\w*\}|<[^>]*>|&\w+;")
FIELD = re.compile(r'(msgid(?:_plural)?|msgstr(?:\[\d+\])?|msgctxt)\s+(".*")$')
MIN_LETTERS = 3
# Of ten original sentences, all translations of the first are the test set, and of the second the validation set.
PARTS = 10
SPLITS = {0: "test", 1: "validation"}

Labelled = list[tuple[str, int]]


def sentences() -> dict[str, Labelled]:
    """Texts and the numbers of their languages, by `"train"`, `"validation"` and `"test"`.

    An original sentence and all its translations are in one part. A text of several languages is left out.

    Raises:
        TrainError: Django is not installed.
    """
    original: dict[str, dict[str, str]] = defaultdict(dict)
    for file in sorted(_folder().glob("**/locale/*/LC_MESSAGES/*.po")):
        code = file.parent.parent.name.partition("_")[0]
        for english, translation in _entries(file.read_text(encoding="utf-8")):
            for language, text in (("en", english), (code, translation)):
                cleaned = " ".join(PLACEHOLDER.sub(" ", text).split())
                if language in CODES and sum(map(str.isalpha, cleaned)) >= MIN_LETTERS:
                    original[language].setdefault(cleaned, english)
    languages = Counter(text for texts in original.values() for text in texts)
    parts: dict[str, Labelled] = {"train": [], "validation": [], "test": []}
    for label, code in enumerate(CODES):
        for text, english in sorted(original[code].items()):
            if languages[text] == 1:
                parts[SPLITS.get(crc32(english.encode()) % PARTS, "train")].append((text, label))
    return parts


def _folder() -> Path:
    found = importlib.util.find_spec("django")
    if found is None or found.origin is None:
        raise TrainError(
            "the texts come from the package django, which is not installed; pip install 'penstock-nn[apps]'."
        )
    return Path(found.origin).parent


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Pairs of an original sentence and its translation, from a gettext file."""
    for block in re.split(r"\n\s*\n", text):
        # gettext's unchecked guess from a similar sentence, or an obsolete entry.
        if "#, fuzzy" in block or block.startswith("#~"):
            continue
        fields: dict[str, str] = {}
        current = ""
        for line in block.splitlines():
            if found := FIELD.match(line):
                current = found[1]
                fields[current] = json.loads(found[2])
            elif line.startswith('"') and current:
                fields[current] += json.loads(line)
        if english := fields.get("msgid"):
            yield from ((english, made) for name, made in fields.items() if name.startswith("msgstr") and made)

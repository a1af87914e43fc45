"""The test set: prompts of a telephone system in English and Spanish. None of them is trained on."""

import gzip
from pathlib import Path

from penstock.apps.translate.corpus.archives import files_in
from penstock.apps.translate.corpus.pairs import Pair, normal

# Shorter prompts are single words and letters.
LEAST_WORDS = 3


def read_prompts(package: Path) -> dict[str, str]:
    """The prompts of asterisk-core-sounds-en or -es: texts by the name of their recording."""
    found: dict[str, str] = {}
    for _, content in files_in(package, lambda path: path.endswith((".txt.gz", ".txt"))):
        text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        for line in text.decode().splitlines():
            name, colon, prompt = line.partition(":")
            if colon and not name.startswith(";"):
                found.setdefault(name.strip(), " ".join(prompt.split()))
    return found


def prompt_pairs(english: Path, spanish: Path, least_words: int = LEAST_WORDS) -> list[Pair]:
    """The prompts that both packages have. Descriptions of sounds, in brackets, are left out.

    Args:
        english: The .deb of asterisk-core-sounds-en.
        spanish: The .deb of asterisk-core-sounds-es.
        least_words: Words of the English prompt, at least.
    """
    originals, translations = read_prompts(english), read_prompts(spanish)
    pairs = [Pair(text, translations[name], "prompts") for name, text in originals.items() if name in translations]
    return [
        pair for pair in pairs if len(pair.english.split()) >= least_words and "[" not in pair.english + pair.spanish
    ]


def forbidden_texts(english: Path, spanish: Path) -> frozenset[str]:
    """The texts that must not be trained on: every prompt in either language, and each of its sentences.

    Prompts of one or two words, such as "Wednesday" or "Thank you.", are no secret and stay.
    """
    prompts = [*read_prompts(english).values(), *read_prompts(spanish).values()]
    texts = {normal(part) for prompt in prompts for part in (prompt, *prompt.replace("!", ".").split("."))}
    return frozenset(text for text in texts if len(text.split()) >= LEAST_WORDS)

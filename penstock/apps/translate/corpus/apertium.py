"""Pairs made by Apertium, a translator of rules and dictionaries (Debian package apertium-eng-spa)."""

import subprocess
from collections.abc import Iterator, Sequence

from penstock.apps.translate.corpus.pairs import Pair
from penstock.core.errors import TrainError


def translated(texts: Sequence[str], mode: str) -> list[str]:
    """Translate texts, one line each.

    Args:
        texts: Texts without line breaks.
        mode: `"eng-spa"` or `"spa-eng"`.

    Raises:
        TrainError: Apertium is not installed, or has lost a line.
    """
    try:
        made = subprocess.run(["apertium", "-u", mode], input="\n".join(texts) + "\n", capture_output=True, text=True)
    except FileNotFoundError:
        raise TrainError("apertium is not installed; run 'apt-get install apertium-eng-spa'.") from None
    lines = made.stdout.removesuffix("\n").split("\n")
    if made.returncode or len(lines) != len(texts):
        raise TrainError(f"apertium {mode} gave {len(lines):,} lines for {len(texts):,}; translate fewer at once.")
    return [" ".join(line.split()) for line in lines]


def forward_pairs(english: Sequence[str]) -> Iterator[Pair]:
    """Pairs of human English and Apertium's Spanish; the trainer marks them by their source."""
    for text, made in zip(english, translated(english, "eng-spa"), strict=True):
        yield Pair(text, made, "apertium")


def backward_pairs(spanish: Sequence[str]) -> Iterator[Pair]:
    """Pairs of Apertium's English and human Spanish: Sennrich et al. 2016, "Improving Neural Machine Translation Models
    with Monolingual Data".
    """
    for text, made in zip(spanish, translated(spanish, "spa-eng"), strict=True):
        yield Pair(made, text, "back-translation")

"""Subword tokens of English and Spanish, see `penstock.core.subwords`."""

from pathlib import Path

from penstock.core.subwords import Subwords, read_subwords

# Tokens without a text.
PADDING, FIRST, END, SYNTHETIC = range(4)
VOCABULARY = Path(__file__).parent / "data" / "vocabulary.json"


def tokenizer() -> Subwords:
    """The vocabulary, read at its first use."""
    return read_subwords(VOCABULARY)

"""Counts in sentences."""

import pytest

from penstock.core.wording.counted import counted


@pytest.mark.parametrize(
    ("number", "words", "sentence"),
    [
        (0, ("file",), "0 files"),
        (1, ("file",), "1 file"),
        (2_000, ("file",), "2,000 files"),
        (1, ("axis is", "axes are"), "1 axis is"),
        (2, ("axis is", "axes are"), "2 axes are"),
    ],
)
def test_the_noun_agrees_with_the_count(number: int, words: tuple[str, ...], sentence: str) -> None:
    assert counted(number, *words) == sentence

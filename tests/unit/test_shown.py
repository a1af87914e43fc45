"""Values of strangers in sentences."""

import pytest

from penstock.core.wording.shown import shortened, shown


def deep() -> list[object]:
    found: list[object] = []
    for _ in range(50):
        found = [found] * 50
    return found


@pytest.mark.parametrize(
    "value",
    ["a" * 1_000, "é" * 1_000, "\U000e0001" * 1_000, "\ud800" * 90, deep(), {"a" * 99: deep()}, 10**60, 1.5, None],
)
@pytest.mark.parametrize("most", [10, 40, 80])
def test_a_value_of_any_size_is_cut_to_its_bytes(value: object, most: int) -> None:
    assert 0 < len(shown(value, most).encode()) <= most


def test_a_short_value_is_whole() -> None:
    assert shown("flac") == "'flac'"
    assert shown([1, 2]) == "[1, 2]"


def test_a_cut_text_ends_with_an_ellipsis_and_whole_characters() -> None:
    assert shortened("äöüäöü", 8) == "äö…"
    assert shortened("äöü", 6) == "äöü"

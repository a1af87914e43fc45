"""The prefix beam, against texts and scores of flashlight-text."""

import json
import math

import pytest

from penstock.core.speech.prefix_beam import PrefixBeam, SearchRules
from tests.support.flashlight_golden import FILE, SPACE, SYMBOLS, WEIGHT, emissions, scorer

CASES = json.loads(FILE.read_text())["cases"]
EXACT = SearchRules(
    symbols=SYMBOLS, space=SPACE, width=200, language_weight=WEIGHT, symbol_gap=math.inf, prefix_gap=math.inf
)
USUAL = SearchRules(symbols=SYMBOLS, space=SPACE, width=16, language_weight=WEIGHT)


def test_half_of_the_cases_have_a_language_model() -> None:
    assert len(CASES) == 60
    assert len({case["text"] for case in CASES}) > 50


@pytest.mark.thorough
def test_texts_and_scores_are_those_of_flashlight() -> None:
    plain, with_language = PrefixBeam(EXACT), PrefixBeam(EXACT, scorer(), "characters")
    for case in CASES:
        search = with_language if case["seed"] % 2 else plain
        symbols, score = search.search(emissions(case["seed"]))
        assert "".join(SYMBOLS[symbol] for symbol in symbols) == case["text"], case
        assert score == pytest.approx(case["score"], abs=0.1), case


def test_a_beam_of_the_usual_width_loses_little() -> None:
    plain, with_language = PrefixBeam(USUAL), PrefixBeam(USUAL, scorer(), "characters")
    same = 0
    for case in CASES:
        search = with_language if case["seed"] % 2 else plain
        symbols, score = search.search(emissions(case["seed"]))
        same += "".join(SYMBOLS[symbol] for symbol in symbols) == case["text"]
        assert case["score"] - 2 < score < case["score"] + 0.01, case
    assert same >= 55

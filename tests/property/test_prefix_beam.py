"""The prefix beam search, against the sum over all paths of every text."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.spec import Array
from penstock.core.speech.ctc_alignment import aligned_words
from penstock.core.speech.hot_words import HotWords
from penstock.core.speech.ngram import NGram, NGramScorer, Unit
from penstock.core.speech.ngram_training import train_ngram
from penstock.core.speech.prefix_beam import PrefixBeam, SearchRules

# The blank, the space and two letters.
SYMBOLS = ("-", " ", "a", "b")
SPACE = 1
WEIGHT, WORD_BONUS = 0.7, 0.4
WIDE = SearchRules(
    symbols=SYMBOLS,
    space=SPACE,
    width=10_000,
    language_weight=WEIGHT,
    word_bonus=WORD_BONUS,
    symbol_gap=math.inf,
    prefix_gap=math.inf,
)
TEXTS = ["a b", "ab", "ab a", "b a ab", "ba", "b ab"]
MODELS = {
    None: None,
    "characters": train_ngram(TEXTS, 3, "characters", SYMBOLS[1:]),
    "words": train_ngram(TEXTS, 2, "words"),
}


def collapsed(path: tuple[int, ...]) -> str:
    """The text of a path, with single spaces between words alone."""
    symbols = [symbol for symbol, _ in itertools.groupby(path)]
    return " ".join("".join(SYMBOLS[symbol] for symbol in symbols if symbol).split())


def language_score(model: NGram, text: str) -> float:
    """Log-probability of a text by the definition of backoff, without states."""
    tokens = ["<s>", *(text.split() if model.unit == "words" else text)]
    known = {
        tuple(model.tokens[index] for index in ids): (float(value), float(backoff))
        for order in model.orders
        for ids, value, backoff in zip(order.ids_GN, order.log_probability_G, order.backoff_G, strict=True)
    }

    def after(context: tuple[str, ...], token: str) -> float:
        if (*context, token) in known:
            return known[*context, token][0]
        if not context:
            return known[("<unk>",)][0]
        return known.get(context, (0, 0))[1] + after(context[1:], token)

    longest = len(model.orders) - 1

    def at(index: int, token: str) -> float:
        return after(tuple(tokens[max(0, index - longest) : index]), token)

    score = sum(at(index, tokens[index]) for index in range(1, len(tokens)))
    if model.unit == "characters":
        score += float(np.logaddexp(at(len(tokens), " "), at(len(tokens), "</s>")))
    return score


def hot_score(text: str, hot: dict[str, float]) -> float:
    """Bonuses of the phrases of a text."""
    words = text.split()
    return sum(
        bonus
        for phrase, bonus in hot.items()
        for begin in range(len(words))
        if words[begin : begin + len(phrase.split())] == phrase.split()
    )


def best_by_force(log_probability_TV: Array, model: NGram | None, hot: dict[str, float]) -> dict[str, float]:
    """The score of every text."""
    frames, symbols = log_probability_TV.shape
    totals: dict[str, float] = {}
    for path in itertools.product(range(symbols), repeat=frames):
        value = float(sum(log_probability_TV[frame, symbol] for frame, symbol in enumerate(path)))
        text = collapsed(path)
        totals[text] = float(np.logaddexp(totals.get(text, -math.inf), value))
    for text in totals:
        totals[text] += WORD_BONUS * len(text.split()) + hot_score(text, hot)
        if model is not None and text:
            totals[text] += WEIGHT * language_score(model, text)
    return totals


def trie_of(hot: dict[str, float]) -> HotWords | None:
    words = [([SYMBOLS.index(character) for character in phrase], bonus) for phrase, bonus in hot.items()]
    return HotWords(words, SPACE) if hot else None


def written(symbols: list[int]) -> str:
    return "".join(SYMBOLS[symbol] for symbol in symbols)


@st.composite
def frames(draw: st.DrawFn, longest: int = 5) -> Array:
    count = draw(st.integers(1, longest))
    seed = draw(st.integers(0, 2**32 - 1))
    logits_TV = np.random.default_rng(seed).normal(size=(count, len(SYMBOLS))) * draw(st.sampled_from((0.5, 2.0, 6.0)))
    return logits_TV - np.logaddexp.reduce(logits_TV, 1, keepdims=True)


PHRASES = st.dictionaries(
    st.sampled_from(("a", "b", "ab", "a b", "ba", "a b a", "aa")), st.sampled_from((-3.0, 0.5, 4.0)), max_size=3
)


@given(frames(), st.sampled_from(sorted(MODELS, key=str)), PHRASES)
@settings(max_examples=150, deadline=None)
def test_a_wide_beam_finds_the_best_text_and_its_score(
    log_probability_TV: Array, unit: Unit | None, hot: dict[str, float]
) -> None:
    model = MODELS[unit]
    beam = PrefixBeam(WIDE, None if model is None else NGramScorer(model), unit or "words")
    symbols, score = beam.search(log_probability_TV, trie_of(hot))
    scores = best_by_force(log_probability_TV, model, hot)
    # Scores may be equal: the best one is compared, and that of the text.
    assert score == pytest.approx(max(scores.values()), abs=1e-6)
    assert scores[written(symbols)] == pytest.approx(score, abs=1e-6)


@pytest.mark.thorough
@given(frames(longest=40), st.integers(1, 8))
@settings(deadline=None)
def test_a_narrow_beam_gives_a_text_with_a_path_and_never_a_better_score(log_probability_TV: Array, width: int) -> None:
    narrow = SearchRules(symbols=SYMBOLS, space=SPACE, width=width)
    wide = SearchRules(symbols=SYMBOLS, space=SPACE, width=2_000, symbol_gap=math.inf, prefix_gap=math.inf)
    symbols, score = PrefixBeam(narrow).search(log_probability_TV)
    text = written(symbols)
    assert text == " ".join(text.split())
    assert score <= PrefixBeam(wide).search(log_probability_TV)[1] + 1e-9


@given(frames(longest=6))
@settings(deadline=None)
def test_words_are_aligned_with_the_best_path_of_their_text(log_probability_TV: Array) -> None:
    symbols, _ = PrefixBeam(WIDE).search(log_probability_TV)
    paths = [
        path
        for path in itertools.product(range(len(SYMBOLS)), repeat=len(log_probability_TV))
        if collapsed(path) == written(symbols)
    ]
    best = max(paths, key=lambda path: sum(log_probability_TV[frame, symbol] for frame, symbol in enumerate(path)))
    words = aligned_words(log_probability_TV, symbols, SPACE)
    spans = [
        (frames[0], frames[-1] + 1)
        for is_letter, run in itertools.groupby(enumerate(best), lambda each: each[1] != SPACE)
        if is_letter and (frames := [frame for frame, symbol in run if symbol])
    ]
    assert [(word.begin, word.end) for word in words] == spans
    assert [written(list(word.symbols)) for word in words] == written(symbols).split()
    assert all(0 < word.probability <= 1 for word in words)


def test_a_language_model_and_a_hot_word_change_the_text() -> None:
    # Of the second letter nothing is known.
    log_probability_TV = np.log(np.array([[0.01, 0.01, 0.97, 0.01], [0.9, 0.04, 0.03, 0.03], [0.02, 0.02, 0.5, 0.46]]))
    assert written(PrefixBeam(WIDE).search(log_probability_TV)[0]) == "aa"
    model = train_ngram(["ab", "ab", "ab ab"], 2, "characters", SYMBOLS[1:])
    assert written(PrefixBeam(WIDE, NGramScorer(model), "characters").search(log_probability_TV)[0]) == "ab"
    assert written(PrefixBeam(WIDE).search(log_probability_TV, trie_of({"ab": 1.0}))[0]) == "ab"
    # A part of a phrase gets nothing in the end.
    assert written(PrefixBeam(WIDE).search(log_probability_TV, trie_of({"ab b": 1.0}))[0]) == "aa"

"""Language models: trained, stored, read from ARPA files, and refused where they are broken."""

import gzip
import math
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import ApplicationError
from penstock.core.speech.arpa import parse_arpa, read_arpa
from penstock.core.speech.ngram import MAX_NGRAMS, NGram, NGramOrder, NGramScorer, Unit
from penstock.core.speech.ngram_training import train_ngram

TEXTS = st.lists(st.lists(st.sampled_from(("a", "ab", "b", "c")), max_size=6).map(" ".join), min_size=1, max_size=12)

# log10 of 0.5 is -0.30103.
ARPA = """
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1.0\t<unk>
-99\t<s>\t-0.30103
-0.69897\tone\t-0.1
-0.30103\t</s>

\\2-grams:
-0.2\t<s> one
-0.3\tone </s>

\\end\\
"""


def states_of(scorer: NGramScorer, tokens: int) -> set[int]:
    """All states that three tokens lead to."""
    states = {0, scorer.start}
    for _ in range(3):
        states |= {scorer.score(state, token)[1] for state in states for token in range(tokens)}
    return states


@given(TEXTS, st.integers(1, 4), st.sampled_from(("words", "characters")))
@settings(max_examples=60, deadline=None)
def test_probabilities_after_any_text_sum_to_one(texts: list[str], order: int, unit: Unit) -> None:
    if not any(texts):
        with pytest.raises(ApplicationError, match="there is no text"):
            train_ngram(texts, order, unit)
        return
    model = train_ngram(texts, order, unit, alphabet=("d",))
    scorer = NGramScorer(model)
    for state in states_of(scorer, len(model.tokens)):
        total = sum(math.exp(scorer.score(state, token)[0]) for token in range(len(model.tokens)))
        assert total == pytest.approx(1, abs=1e-5)


def test_what_was_seen_is_likelier_and_what_was_not_is_possible() -> None:
    model = train_ngram(["one two", "one two", "one three"], 2)
    scorer = NGramScorer(model)
    _, after_one = scorer.score(scorer.start, scorer.ids["one"])
    two, three, one = (scorer.score(after_one, scorer.ids[word])[0] for word in ("two", "three", "one"))
    assert two > three > one > -10
    # A word of no text is as likely wherever it stands behind the same state.
    assert scorer.score(after_one, None)[0] == scorer.score(after_one, scorer.ids["<unk>"])[0]


def test_interpolated_kneser_ney_by_hand() -> None:
    # Bigrams: <s>a, ab, b</s> twice, <s>b, ba, a</s> once; discounts 1/(1+2*3)... of the counts 2, 2, 2, 1, 1, 1.
    model = train_ngram(["a b", "a b", "b a"], 2)
    scorer = NGramScorer(model)
    discount = 3 / (3 + 2 * 3)
    # Continuations of </s>, a and b: behind two tokens each; a count of one is there nowhere, so that 0.5 is taken off.
    unigram = (2 - 0.5) / 6 + 0.5 * 3 / 6 / 4
    bigram = (2 - discount) / 3 + discount * 2 / 3 * unigram
    _, after_a = scorer.score(scorer.start, scorer.ids["a"])
    assert math.exp(scorer.score(after_a, scorer.ids["b"])[0]) == pytest.approx(bigram, rel=1e-5)


def test_a_model_is_stored_and_read() -> None:
    model = train_ngram(["one two", "two one"], 3, "characters")
    found = NGram.from_bytes(model.to_bytes())
    assert (found.unit, found.tokens) == (model.unit, model.tokens)
    for ours, theirs in zip(model.orders, found.orders, strict=True):
        for name in ("ids_GN", "log_probability_G", "backoff_G"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    with pytest.raises(ApplicationError, match="cannot be read"):
        NGram.from_bytes(model.to_bytes()[:-1])
    with pytest.raises(ApplicationError, match="cannot be read"):
        NGram.from_bytes(b"")


def test_an_arpa_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.arpa").write_text(ARPA)
    with gzip.open(tmp_path / "model.arpa.gz", "wt") as file:
        file.write(ARPA)
    for name in ("model.arpa", "model.arpa.gz"):
        scorer = NGramScorer(read_arpa(tmp_path / name))
        value, after = scorer.score(scorer.start, scorer.ids["one"])
        assert value == pytest.approx(-0.2 * math.log(10))
        assert scorer.score(after, scorer.ids["</s>"])[0] == pytest.approx(-0.3 * math.log(10))
        # Backoffs of "one" and of "<s>", and the unknown word alone.
        assert scorer.score(after, scorer.ids["one"])[0] == pytest.approx((-0.1 - 0.69897) * math.log(10), rel=1e-5)
        assert scorer.score(scorer.start, None)[0] == pytest.approx((-0.30103 - 1.0) * math.log(10), rel=1e-5)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("", "it has no line '\\data\\'."),
        (ARPA.replace("ngram 2=2", "ngram 3=2"), "orders are counted from 1"),
        (ARPA.replace("ngram 2=2", "ngram 2=many"), "orders are counted from 1"),
        (ARPA.replace("ngram 2=2", f"ngram 2={MAX_NGRAMS:d}"), "at most 1,000,000 are taken"),
        (ARPA.replace("ngram 2=2", "ngram 2=3"), "it has 2 2-grams; its head says 3."),
        (ARPA.replace("ngram 2=2", "ngram 2=1"), "there are more 2-grams than the 1 of its head."),
        (ARPA.replace("\\end\\", ""), "it ends within its 2-grams."),
        (ARPA.replace("\\2-grams:", "\\3-grams:"), "where the 1-grams end."),
        (ARPA.replace("-0.3\tone </s>", "-0.3\tone"), "has 2 fields; a 2-gram has 3 or one more."),
        (ARPA.replace("-0.3\tone </s>", "-0.3\tone two"), "has 'two', which is no 1-gram."),
        (ARPA.replace("-0.3\tone </s>", "-0.3\t<s> one"), "has an n-gram that is there twice."),
        (ARPA.replace("-0.3\tone", "zero\tone"), "has 'zero' where a logarithm belongs."),
        (ARPA.replace("-0.3\tone", "nan\tone"), "has 'nan' where a logarithm belongs."),
        (ARPA.replace("-0.3\tone", "0.3\tone"), "a probability is at most 1."),
    ],
)
def test_a_broken_arpa_file_is_refused_in_one_sentence(tmp_path: Path, broken: str, reason: str) -> None:
    (tmp_path / "model.arpa").write_text(broken)
    with pytest.raises(ApplicationError) as refused:
        read_arpa(tmp_path / "model.arpa")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\x1f\x8b\x08\x00rest"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, data: bytes) -> None:
    for name in ("model.arpa", "model.arpa.gz"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ApplicationError, match="the ARPA file"):
            read_arpa(tmp_path / name)
    with pytest.raises(ApplicationError, match="cannot be read"):
        read_arpa(tmp_path / "none.arpa")


@given(st.text(alphabet="\\data1gramsn:=- \n\t0.3<>/ok", max_size=80), st.integers(0, len(ARPA)), st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_any_damage_is_refused_or_harmless(put: str, at: int, drop: int) -> None:
    text = ARPA[:at] + put + ARPA[at + drop :]
    # Nothing else is raised.
    with suppress(ApplicationError):
        scorer = NGramScorer(parse_arpa(text))
        assert math.isfinite(scorer.score(scorer.start, None)[0])


def test_an_n_gram_without_its_beginning_is_refused() -> None:
    numbers = np.full(2, -1, np.float32)
    first = NGramOrder(np.array([[0], [1]], np.int32), numbers, numbers)
    second = NGramOrder(np.zeros((0, 2), np.int32), numbers[:0], numbers[:0])
    third = NGramOrder(np.array([[0, 1, 0]], np.int32), numbers[:1], numbers[:1])
    with pytest.raises(ApplicationError, match="without the 2-gram that it begins with"):
        NGramScorer(NGram(unit="words", tokens=("a", "b"), orders=(first, second, third)))
    with pytest.raises(ApplicationError, match="is there twice"):
        NGram(unit="words", tokens=("a", "b"), orders=(NGramOrder(np.zeros((2, 1), np.int32), numbers, numbers),))
    with pytest.raises(ApplicationError, match="not in the vocabulary"):
        NGram(unit="words", tokens=("a",), orders=(first,))
    with pytest.raises(ApplicationError, match="is no character"):
        NGram(unit="characters", tokens=("a", "bc"), orders=(first,))

"""ChrF of a trained translator and of Apertium on the prompts of Asterisk.

Popovic 2015, "chrF: character n-gram F-score for automatic MT evaluation", as sacrebleu computes it by default.
"""

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.apps.translate.corpus.phrases import phrase_pairs
from penstock.apps.translate.evaluate import evaluate, read_prompts, scores

# Drawn sentences of the grammar, whose words are taken to be all of its words.
PHRASES = 40_000
# Prompts of whose words at most this share is among those of the grammar.
MOST_KNOWN = 0.5
_WORD = re.compile(r"[a-z']+")


def chrf(bundle: Path, prompts: Path, way: str, *, few_known: bool = False) -> list[float]:
    """Return chrF of one way of translating.

    Args:
        bundle: The trained translator.
        prompts: The test set, which `make_data` writes.
        way: `"greedy"`, `"beam"` or `"apertium"`.
        few_known: Score only the prompts with few words of the grammar in `corpus/phrases.py`, whose author had seen
            prompts of the test set.
    """
    pairs = read_prompts(prompts)
    made = _translations(bundle, prompts)[way]
    chosen = [row for row, (english, _) in enumerate(pairs) if not few_known or _share_known(english) <= MOST_KNOWN]
    return [scores([made[row] for row in chosen], [pairs[row][1] for row in chosen])["chrF"]]


@cache
def _translations(bundle: Path, prompts: Path) -> dict[str, list[str]]:
    with TemporaryDirectory() as folder:
        ways = evaluate(bundle / "weights.safetensors", prompts, Path(folder), apertium=True)
        return {way: (Path(folder) / f"{way}.txt").read_text().splitlines() for way in ways}


@cache
def _grammar_words() -> frozenset[str]:
    return frozenset(word for pair in phrase_pairs(PHRASES, seed=0) for word in _words(pair.english))


def _share_known(english: str) -> float:
    words = _words(english)
    return len(words & _grammar_words()) / max(len(words), 1)


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))

"""Write `tests/data/flashlight_beam.json`: texts and scores of flashlight-text, the oracle of the prefix beam.

flashlight-text 0.0.7 has wheels for few versions of Python, so that it is no dependency. Where it is installed,
`python -m tests.support.flashlight_golden` makes the file anew.
"""

import itertools
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.spec import Array
from penstock.core.speech.ngram import NGramScorer
from penstock.core.speech.ngram_training import train_ngram

FILE = Path(__file__).parents[1] / "data" / "flashlight_beam.json"
# The blank, the space, which flashlight treats as a letter and which is therefore never spoken here, and letters.
SYMBOLS = ("-", " ", *"abcdefgh")
SPACE, NEVER = 1, -1e4
TEXTS = ("abc", "bad", "cabbage", "deaf", "egg", "face", "head", "badge", "cage", "ace", "hedge", "beach")
ORDER, WEIGHT, WIDTH = 3, 0.8, 4_000


def emissions(seed: int) -> Array:
    """Log-probabilities of a case, `[T, V]`, the same on every machine."""
    rng = np.random.default_rng(seed)
    # Short and unclear, or long and clear: no beam loses much of those.
    frames, scale = (int(rng.integers(3, 6)), 2.0) if seed % 4 < 2 else (int(rng.integers(10, 40)), 12.0)
    logits_TV = rng.normal(size=(frames, len(SYMBOLS))) * scale
    logits_TV[:, 0] += scale
    logits_TV[:, SPACE] = NEVER
    return np.round(logits_TV - np.logaddexp.reduce(logits_TV, 1, keepdims=True), 4).astype(np.float32)


def scorer() -> NGramScorer:
    """The language model of half of the cases."""
    return NGramScorer(train_ngram(TEXTS, ORDER, "characters", SYMBOLS[1:]))


def decoded_by_flashlight(log_probability_TV: Array, language: NGramScorer | None) -> tuple[str, float]:
    """The best text, and its score over all of its paths."""
    flashlight: Any = import_module("flashlight.lib.text.decoder")

    class Characters(flashlight.LM):
        def __init__(self) -> None:
            super().__init__()
            self.states: dict[Any, int] = {}
            self.made: list[Any] = []

        def start(self, start_with_nothing: bool) -> Any:
            state = flashlight.LMState()
            self.states[state] = 0 if language is None else language.start
            return state

        def score(self, state: Any, token: int) -> tuple[Any, float]:
            child = state.child(token)
            value, after = 0.0, 0
            if language is not None:
                value, after = language.score(self.states[state], language.ids[SYMBOLS[token]])
            self.states[child] = after
            self.made.append(child)
            return child, value

        def finish(self, state: Any) -> tuple[Any, float]:
            # The end of a word, as in the prefix beam; of an empty text none.
            if language is None or not state_has_parent(state):
                return state, 0.0
            ends = [language.score(self.states[state], language.ids[token])[0] for token in (" ", "</s>")]
            return state, float(np.logaddexp(ends[0], ends[1]))

    root: list[Any] = []

    def state_has_parent(state: Any) -> bool:
        return state is not root[0]

    lm = Characters()
    begin = lm.start

    def remembered(start_with_nothing: bool) -> Any:
        root[:] = [begin(start_with_nothing)]
        return root[0]

    lm.start = remembered
    options = flashlight.LexiconFreeDecoderOptions(
        WIDTH, len(SYMBOLS), math.inf, WEIGHT, 0.0, True, flashlight.CriterionType.CTC
    )
    search = flashlight.LexiconFreeDecoder(options, lm, -1, 0, [])
    frames, symbols = log_probability_TV.shape
    given = np.ascontiguousarray(log_probability_TV)
    totals: dict[str, float] = {}
    for found in search.decode(given.ctypes.data, frames, symbols):
        text = "".join(SYMBOLS[token] for token, _ in itertools.groupby(found.tokens) if token > 0)
        totals[text] = float(np.logaddexp(totals.get(text, -math.inf), found.score))
    best = max(totals, key=lambda text: totals[text])
    return best, totals[best]


def main() -> None:
    """Write the file."""
    cases: list[dict[str, Any]] = []
    for seed in range(60):
        language = scorer() if seed % 2 else None
        text, score = decoded_by_flashlight(emissions(seed), language)
        cases.append({"seed": seed, "text": text, "score": round(score, 3)})
    FILE.write_text(json.dumps({"made_by": "flashlight-text 0.0.7", "cases": cases}, indent=0) + "\n")


if __name__ == "__main__":
    main()

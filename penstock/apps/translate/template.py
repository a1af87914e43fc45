"""Template of the file that declares a translator, and the vocabulary that goes with it."""

import inspect
import json
from pathlib import Path

from penstock.apps.tab_lines import read_tab_lines
from penstock.core.errors import ApplicationError
from penstock.core.subwords import BYTES, SPECIAL, Subwords
from penstock.core.texts.learn_subwords import learn_subwords

MIN_PAIRS = 20
# Tokens of the vocabulary, and of a text: longer ones are left out of the training, and refused when served.
MAX_VOCABULARY, MAX_TOKENS = 8_000, 128
# Of a translator of few pairs and of many.
SMALL, LARGE = "64, 4, 2", "256, 4, 3"
MANY_PAIRS = 20_000
FILE = '''\
"""Translate texts: an encoder reads a text, and a decoder gives the answer token by token.

penstock train {file} --out runs/{name}
"""

from pathlib import Path

from penstock import Application, Dim, Generate, SubwordReply, SubwordText, TensorSpec

# The tokens of both languages; others are written by
# `penstock.core.texts.learn_subwords.learn_subwords(texts, size).write(FILE)`.
VOCABULARY = Path(__file__).with_name({vocabulary})
TOKENS = {tokens}
MAX_TOKENS = {max_tokens}
WIDTH, HEADS, LAYERS = {sizes}
# Keys and values of each decoder layer are one entry of the state.
ENTRY = 2 * LAYERS * WIDTH
# Tokens without a text.
FIRST, END = 1, 2

source, past = Dim("source", max=MAX_TOKENS), Dim("past", max=MAX_TOKENS)


def network():
    from penstock.models.encoder_decoder import EncoderDecoder
    from penstock.nn.decoding import Greedy

    decoder = EncoderDecoder(
        TOKENS, width=WIDTH, heads=HEADS, encoder_layers=LAYERS, decoder_layers=LAYERS, hidden=4 * WIDTH
    )
    return Greedy(decoder, first=FIRST, end=END)


def pairs():
{pairs}


def recipe():
    import numpy as np

    from penstock import Optimizer, Schedule
    from penstock.apps.translate.packed_pairs import PackedPairs, Pairs
    from penstock.apps.translate.recipe import bits_per_token, smoothed_loss, token_accuracy
    from penstock.train.recipe import Data, Recipe, Selection, StepExecution

    def tokens(text):
        return np.array(app.decode.subwords.encode(text), np.int64)

    def fits(text, translation):
        # The translation has a token for its beginning and one for its end.
        return 0 < len(tokens(text)) <= MAX_TOKENS and len(tokens(translation)) < MAX_TOKENS

    def examples(chosen):
        sides = [[tokens(text) for text in side] for side in zip(*chosen)]
        parts = [part for side in sides for part in (np.concatenate(side), np.array([len(each) for each in side]))]
        # Rows hold several pairs each, so that little of a batch is padding.
        return PackedPairs(Pairs(*parts), seed=0, room=MAX_TOKENS)

    # Every tenth for validation.
    known = sorted(pair for pair in set(pairs()) if fits(*pair))
    order = np.random.default_rng(0).permutation(len(known))
    held = max(1, len(known) // 10)
    training, validation = ([known[at] for at in part] for part in (order[held:], order[:held]))

    return Recipe(
        data=lambda: Data(train=examples(training), validation=examples(validation)),
        loss=smoothed_loss,
        optimizer=Optimizer("adamw", lr=2e-3, weight_decay=0.01, betas=(0.9, 0.98), decay_vectors=False),
        schedule=Schedule("cosine", warmup=0.1, last=0.02),
        metrics={{"bits_per_token": bits_per_token, "accuracy": token_accuracy}},
        selection=Selection(metric="bits_per_token", every_epochs=5.0),
        batch_size={batch_size},
        epochs={epochs},
        clip_norm=1.0,
        # Attention with a mask has no deterministic backward pass on a GPU.
        execution=StepExecution(deterministic=False),
        # Their translations are recorded in the bundle.
        raw_examples=lambda: [{{"tokens": tokens(text)}} for text, _ in validation[:8]],
    )


app = Application(
    name="{name}",
    description="Translates texts.",
    inputs={{"tokens": TensorSpec(dtype="int64", shape=(source,), meaning="tokens of a text", limits=(0, TOKENS - 1))}},
    output=TensorSpec(name="token", dtype="int64", shape=(), meaning="a token of the translation, or 2 for its end"),
    decode=SubwordText(tensor="tokens", vocabulary=VOCABULARY, max_tokens=MAX_TOKENS),
    accepts=("text/plain", "application/json"),
    max_body_bytes=1 << 16,
    reply=SubwordReply(tensor="token", vocabulary=VOCABULARY),
    model=":network",
    recipe=":recipe",
    generate=Generate(
        state={{
            "memory": TensorSpec(dtype="float32", shape=(source, ENTRY), meaning="keys and values of the text"),
            "cache": TensorSpec(dtype="float32", shape=(past, ENTRY), meaning="keys and values of the answer so far"),
            "token": TensorSpec(dtype="int64", shape=(), meaning="the newest token"),
        }},
        max_steps=MAX_TOKENS,
        partial_replies=True,
    ),
)
'''

READ = """\
    # One pair a line: a text, a tab, its translation.
    with open({data}, encoding="utf-8") as lines:
        rows = [line.rstrip("\\n").split("\\t", 1) for line in lines if line.strip()]
    return [(text, translation) for text, translation in rows]"""


def application_file(name: str, *, file: str, data: Path | None = None) -> tuple[str, str, Subwords]:
    """Fill in the template.

    Args:
        name: Name of the application.
        file: Name of the file.
        data: One pair a line: a text, a tab, its translation; None for a few that the file makes itself.

    Returns:
        The file, the name of the vocabulary's file, and the vocabulary.

    Raises:
        ApplicationError: The data cannot be read, or are few.
    """
    if data is None:
        # The body of the function below, which a user will replace.
        given, source = _made_pairs(), inspect.getsource(_made_pairs).partition("\n")[2].rstrip()
    else:
        given, source = _pairs(data), READ.format(data=json.dumps(str(data.resolve()), ensure_ascii=False))
    many = len(given) >= MANY_PAIRS
    texts = [text for pair in given for text in pair]
    # Where there are few texts, rare characters and words count too.
    size = MAX_VOCABULARY if many else min(MAX_VOCABULARY, SPECIAL + BYTES + len(set("".join(texts))) + len(given) // 5)
    subwords = learn_subwords(texts, size, min_characters=50 if many else 1, min_pieces=3 if many else 2)
    vocabulary = f"{name}-vocabulary.json"
    text = FILE.format(
        name=name,
        file=file,
        vocabulary=json.dumps(vocabulary),
        tokens=len(subwords),
        max_tokens=MAX_TOKENS,
        sizes=LARGE if many else SMALL,
        pairs=source,
        batch_size=64 if many else 8,
        epochs=20 if many else max(40, 60_000 // len(given)),
    )
    return text, vocabulary, subwords


def _made_pairs() -> list[tuple[str, str]]:
    # Made here, to be replaced by yours: [("a text", "its translation"), ...].
    ones = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    ones += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

    def words(number: int) -> str:
        if number >= 100:
            rest = f" and {words(number % 100)}" if number % 100 else ""
            return f"{ones[number // 100]} hundred{rest}"
        if number >= 20:
            return tens[number // 10 - 2] + (f" {ones[number % 10]}" if number % 10 else "")
        return ones[number]

    return [(words(number), str(number)) for number in range(1_000)]


def _pairs(data: Path) -> list[tuple[str, str]]:
    pairs = read_tab_lines(data, "pair", ("text", "translation"), "a text, a tab, and its translation")
    if len(pairs) < MIN_PAIRS:
        raise ApplicationError(f"{data} has {len(pairs):,} pairs; give at least {MIN_PAIRS}.")
    return pairs

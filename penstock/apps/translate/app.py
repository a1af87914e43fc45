"""English text to Spanish, token by token."""

from penstock.apps.translate.tokenizer import VOCABULARY
from penstock.core.application import Application
from penstock.core.dim import Dim
from penstock.core.generate import Generate
from penstock.core.spec import TensorSpec
from penstock.core.texts.subword_text import SubwordReply, SubwordText

# Of the network in model.py; keys and values of each decoder layer are one entry of the state.
WIDTH, HEADS, LAYERS = 384, 6, 4
ENTRY = 2 * LAYERS * WIDTH
MAX_TOKENS = 256

source = Dim("source", max=MAX_TOKENS)
past = Dim("past", max=MAX_TOKENS)


app = Application(
    name="translate",
    description="Translates English text to Spanish.",
    inputs={
        "tokens": TensorSpec(
            dtype="int64",
            shape=(source,),
            meaning="tokens of an English text",
            # The vocabulary in data/vocabulary.json.
            limits=(0, 7_999),
        )
    },
    output=TensorSpec(dtype="int64", shape=(), meaning="a token of the Spanish text, or 2 for its end", name="token"),
    decode=SubwordText(tensor="tokens", vocabulary=VOCABULARY, max_tokens=MAX_TOKENS),
    accepts=("text/plain", "application/json"),
    max_body_bytes=1 << 16,
    reply=SubwordReply(tensor="token", vocabulary=VOCABULARY),
    model="penstock.apps.translate.model:translator",
    recipe="penstock.apps.translate.recipe:recipe",
    generate=Generate(
        state={
            "memory": TensorSpec(dtype="float32", shape=(source, ENTRY), meaning="keys and values of the source"),
            "cache": TensorSpec(dtype="float32", shape=(past, ENTRY), meaning="keys and values of the answer so far"),
            "token": TensorSpec(dtype="int64", shape=(), meaning="the newest token"),
        },
        max_steps=MAX_TOKENS,
        partial_replies=True,
    ),
)

"""English text to Spanish, token by token."""

import json
from functools import cache
from typing import Any

import numpy as np

from penstock.apps.translate.tokenizer import END, Tokenizer
from penstock.core.application import Application
from penstock.core.errors import InvalidInput
from penstock.core.generate import Generate
from penstock.core.spec import Array, Dim, TensorSpec

# Of the network in model.py; keys and values of each decoder layer are one entry of the state.
WIDTH, HEADS, LAYERS = 384, 6, 4
ENTRY = 2 * LAYERS * WIDTH
MAX_TOKENS = 256
JSON = "application/json"

source = Dim("source", max=MAX_TOKENS)
past = Dim("past", max=MAX_TOKENS)


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer, read at the first request."""
    return Tokenizer.read()


def decode(body: bytes, content_type: str) -> dict[str, Array]:
    """Turn a text, or JSON with a `text` or with `tokens`, into tokens."""
    try:
        text = body.decode()
        if content_type == JSON:
            given: Any = json.loads(text)
            if isinstance(given, dict) and given.keys() == {"tokens"}:
                return {"tokens": np.asarray(given["tokens"])}
            if not isinstance(given, dict) or given.keys() != {"text"} or not isinstance(given["text"], str):
                raise InvalidInput('The JSON is not {"text": "..."}; send the English text so, or as text/plain.')
            text = given["text"]
    except ValueError as error:
        raise InvalidInput(f"The body is not text in UTF-8, or not JSON ({error}).") from None
    tokens = tokenizer().encode(text)
    if not tokens:
        raise InvalidInput("The text is empty; send at least one word.")
    if len(tokens) > MAX_TOKENS:
        raise InvalidInput(f"The text has {len(tokens):,} tokens; send at most {MAX_TOKENS}, about a paragraph.")
    return {"tokens": np.array(tokens, np.int64)}


def reply(tokens_T: Array) -> dict[str, str]:
    """Join the tokens of all steps to a text."""
    return {"text": tokenizer().decode(int(token) for token in tokens_T if token != END)}


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
    decode=decode,
    accepts=("text/plain", JSON),
    max_body_bytes=1 << 16,
    reply=reply,
    model="penstock.apps.translate.model:translator",
    recipe="penstock.apps.translate.recipe:recipe",
    generate=Generate(
        state={
            "memory": TensorSpec(dtype="float32", shape=(source, ENTRY), meaning="keys and values of the source"),
            "cache": TensorSpec(dtype="float32", shape=(past, ENTRY), meaning="keys and values of the answer so far"),
            "token": TensorSpec(dtype="int64", shape=(), meaning="the newest token"),
        },
        max_steps=MAX_TOKENS,
    ),
)

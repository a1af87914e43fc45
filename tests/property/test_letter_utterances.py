"""Utterances of a recogniser by letters: any symbols, chunks, pauses and flushes."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.apps.speech.app import FRAME_S, SYMBOLS, app
from penstock.apps.speech.transcript import spoken
from penstock.core.spec import Array
from penstock.serve.transcription.utterances import Cause, Change, Grew, Utterance, Utterances, shifted

assert app.live is not None
EVENTS: Any = app.live.events
# Letters, spaces, and silence of up to two seconds.
SYMBOLS_TOLD = st.lists(
    st.sampled_from(["a", "b", "c", " ", "-"]) | st.integers(5, 100).map(lambda frames: "-" * frames), max_size=40
).map("".join)
CHUNKS = st.lists(st.tuples(st.integers(1, 12), st.sampled_from([False] * 9 + [True])), min_size=1, max_size=12)


def outputs(symbols: str) -> Array:
    made_UV = np.full((len(symbols), len(SYMBOLS)), -9.0, np.float32)
    made_UV[np.arange(len(symbols)), [SYMBOLS.index(symbol) for symbol in symbols]] = -0.1
    return made_UV


def changes_of(symbols: str, chunks: list[tuple[int, bool]], utterances: Utterances) -> list[Change]:
    """What is told of these frames, in chunks of so many, of which some end with a flush."""
    changes: list[Change] = []
    memory: Any = None
    at = origin = number = 0
    while at < len(symbols):
        frames, flush = chunks[number % len(chunks)]
        number += 1
        part = symbols[at : at + frames]
        at += len(part)
        ends = flush or at >= len(symbols)
        event, memory = EVENTS(outputs(part), json.loads(json.dumps(memory)), ends)
        speech = None if event is None else shifted(spoken(event), origin * FRAME_S)
        changes += utterances.hear(speech, at * FRAME_S)
        if ends:
            changes.append(utterances.end(at * FRAME_S))
            memory, origin = None, at
    return changes


@pytest.mark.thorough
@given(SYMBOLS_TOLD, CHUNKS, st.none() | st.floats(0.02, 2.0), st.none() | st.floats(0.5, 2.0))
@settings(max_examples=200, deadline=None)
def test_words_are_those_of_the_text_wherever_pauses_and_flushes_are(
    symbols: str, chunks: list[tuple[int, bool]], pause_s: float | None, max_s: float | None
) -> None:
    delta = ""
    for change in changes_of(symbols, chunks, Utterances(pause_s, max_s)):
        if isinstance(change, Grew):
            delta += change.delta
        if not isinstance(change, Utterance):
            continue
        assert delta.startswith(change.text)
        delta = delta.removeprefix(change.text).lstrip()
        assert change.cause is Cause.LENGTH or not delta
        assert [word.text for word in change.words] == change.text.split()
        for word in change.words:
            assert word.start_s <= word.end_s <= change.end_s + 1e-6
        for before, after in pairwise(change.words):
            assert before.end_s <= after.start_s + 1e-6

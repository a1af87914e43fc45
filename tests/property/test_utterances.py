"""Utterances: however the events of a signal come, the same is said, and every second belongs to one utterance."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.speech.spoken import Speech, Word
from penstock.serve.transcription.utterances import MAX_TEXT, Began, Cause, Change, Grew, Utterance, Utterances

# Words with the gap before each in tenths of a second, and whether the application ends the utterance with it.
WORDS = st.lists(st.tuples(st.sampled_from(["a", "bee", "sea"]), st.integers(0, 30), st.booleans()), max_size=12)
STEP_S = 0.1


def heard_late(words: list[tuple[str, int, bool]], pause_s: float | None) -> list[Change]:
    """Changes of words that come as text at once, and as words only with the next one: a recogniser by letters."""
    utterances, changes, at, late, said = Utterances(pause_s), list[Change](), 0, list[Word](), False
    for text, gap, final in words:
        for _ in range(gap):
            at += 1
            changes += utterances.hear(None, at * STEP_S)
        begin_s = at * STEP_S
        at += 1
        changes += utterances.hear(Speech(delta=f" {text}" if said else text, words=late), at * STEP_S)
        late, said = [Word(text=text, start_s=begin_s, end_s=at * STEP_S, probability=0.5)], True
        if final:
            at += 1
            changes += utterances.hear(Speech(delta="", words=late, final=True), at * STEP_S)
            late, said = [], False
    changes += utterances.hear(Speech(delta="", words=late), at * STEP_S)
    changes.append(utterances.end(at * STEP_S))
    return changes


@given(WORDS, st.sampled_from([None, 0.3, 1.0]))
@settings(max_examples=300, deadline=None)
def test_a_pause_ends_an_utterance_whose_last_word_is_not_given_yet(
    words: list[tuple[str, int, bool]], pause_s: float | None
) -> None:
    ended = [change for change in heard_late(words, pause_s) if isinstance(change, Utterance)]
    assert [word.text for one in ended for word in one.words] == [text for text, _, _ in words]
    for one in ended:
        assert one.text.split() == [word.text for word in one.words]
        assert all(word.start_s <= word.end_s <= one.end_s + 1e-9 for word in one.words)


def heard(words: list[tuple[str, int, bool]], pause_s: float | None, max_s: float | None, *, deltas: bool) -> Any:
    """Changes of words that each take two steps, one step at a time, and what the last step ends."""
    utterances, changes, at, said = Utterances(pause_s, max_s), list[Change](), 0, False
    for text, gap, final in words:
        for _ in range(gap):
            at += 1
            changes += utterances.hear(None, at * STEP_S)
        begin_s = at * STEP_S
        at += 1
        partial = f"{' ' if said else ''}{text[0]}"
        changes += utterances.hear(Speech(delta=partial) if deltas else None, at * STEP_S)
        at += 1
        word = Word(text=text, start_s=begin_s, end_s=at * STEP_S)
        whole = Speech(words=[word], delta=text[1:] if deltas else None, final=final)
        changes += utterances.hear(whole, at * STEP_S)
        said = not isinstance(changes[-1], Utterance)
    changes.append(utterances.end(at * STEP_S))
    return changes


@given(WORDS, st.sampled_from([None, 0.3, 1.0]), st.sampled_from([None, 1.5]), st.booleans())
@settings(max_examples=300, deadline=None)
def test_every_word_is_in_one_utterance_and_every_second_too(
    words: list[tuple[str, int, bool]], pause_s: float | None, max_s: float | None, deltas: bool
) -> None:
    changes = heard(words, pause_s, max_s, deltas=deltas)
    ended = [change for change in changes if isinstance(change, Utterance)]
    assert " ".join(one.text for one in ended if one.text).split() == [text for text, _, _ in words]
    assert [word.text for one in ended for word in one.words] == [text for text, _, _ in words]
    edges = [0.0, *(one.end_s for one in ended)]
    assert [one.start_s for one in ended] == edges[:-1]
    grown = ""
    for change in changes:
        if isinstance(change, Began):
            assert grown == ""
        elif isinstance(change, Grew):
            grown += change.delta
        else:
            # What a client was told while it was open is what it ended with.
            assert grown.strip() == change.text
            grown = ""
            if change.cause is Cause.PAUSE:
                assert pause_s is not None
                assert change.end_s - change.words[-1].end_s >= pause_s - 1e-9
            assert (change.cause is Cause.FLUSH) == (change is changes[-1])


def test_a_text_that_was_decoded_again_takes_the_place_of_the_deltas() -> None:
    utterances = Utterances()
    said = [Word(text="wreck", start_s=0.0, end_s=0.4), Word(text="a", start_s=0.4, end_s=0.5)]
    assert utterances.hear(Speech(delta="wreck a", words=said), 1.0)[-1] == Grew("wreck a")
    again = [Word(text="recognise", start_s=0.0, end_s=0.5)]
    (ended,) = utterances.hear(Speech(words=again, final=True, text="Recognise."), 2.0)
    assert isinstance(ended, Utterance)
    assert (ended.text, list(ended.words), ended.cause) == ("Recognise.", again, Cause.APPLICATION)
    # One that was never heard of comes as a whole.
    began, grew, ended = utterances.hear(Speech(words=again, final=True, text="Recognise."), 3.0)
    assert (began, grew) == (Began(0.0), Grew("Recognise."))
    assert isinstance(ended, Utterance)
    assert (list(ended.words), ended.start_s, ended.end_s) == (again, 2.0, 3.0)


def test_a_word_that_is_not_complete_goes_to_the_next_utterance() -> None:
    utterances = Utterances(max_s=1.0)
    words = [Word(text="one", start_s=0.0, end_s=0.9)]
    *_, ended = utterances.hear(Speech(delta="one tw", words=words), 1.2)
    assert isinstance(ended, Utterance)
    assert (ended.text, ended.cause, utterances.text) == ("one", Cause.LENGTH, "tw")
    words = [Word(text="two", start_s=1.0, end_s=1.5)]
    assert utterances.hear(Speech(delta="o", words=words), 1.6) == [Grew("o")]
    assert utterances.end(2.0).text == "two"


def test_the_text_of_an_utterance_is_bounded() -> None:
    utterances = Utterances()
    ended = 0
    for step in range(MAX_TEXT):
        ended += sum(isinstance(change, Utterance) for change in utterances.hear(Speech(delta="word "), step))
        assert len(utterances.text) <= MAX_TEXT + 5
    assert ended == 4


def test_what_adds_nothing_begins_nothing() -> None:
    utterances = Utterances(0.1)
    for speech in (None, Speech(), Speech(delta=""), Speech(final=True), Speech(final=True, text="")):
        assert utterances.hear(speech, 1.0) == []
    assert utterances.end(2.0).text == ""

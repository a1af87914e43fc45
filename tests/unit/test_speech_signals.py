"""Texts to be spoken, and signals in rooms."""

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.apps.speech.many_voices import (
    FESTIVAL,
    FLITE,
    MBROLA,
    MBROLA_ACCENTED,
    PICO,
    RHVOICE,
    RHVOICE_ACCENTED,
    SHARES,
    SIZES,
    Speaker,
    chosen,
    trimmed,
)
from penstock.apps.speech.rooms import TAIL, Rooms
from penstock.apps.speech.texts import Texts, normalized, read_texts, split_of
from penstock.core.errors import TrainError

WORDS = ("one two", "it was full of rackets, balls and other objects", "how big is that part?", "in 1999")


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    lines = [
        f'0000{at} 03 n 02 racket_ball 0 IBM 0 001 @ 00001930 n 0000 | (sports) a light thing; "{text}"'
        for at, text in enumerate(WORDS)
    ]
    lines += [f'0001{at} 03 n 01 word{"abcdefghij"[at % 10]} 0 000 | "sentence number {chr(97 + at % 26)} of '
              f'{chr(97 + at // 26)} many"' for at in range(300)]  # fmt: skip
    folder = tmp_path / "wordnet"
    folder.mkdir()
    (folder / "data.noun").write_text("  1 This is a licence | of \n" + "\n".join(lines) + "\n")
    return folder


def test_each_example_has_one_split(wordnet: Path) -> None:
    texts = {split: read_texts(split, wordnet) for split in ("train", "validation", "test")}
    assert all(each.examples for each in texts.values())
    assert sum(len(each.examples) for each in texts.values()) == 303
    for split, each in texts.items():
        assert {split_of(text) for text in each.examples} == {split}
    # The spelling decides, not the punctuation.
    assert split_of("How big is that part") == split_of("how big is that part?")


def test_only_training_has_definitions_words_and_lines(wordnet: Path, tmp_path: Path) -> None:
    held_out = read_texts("test", wordnet).examples[0]
    (tmp_path / "lines.txt").write_text(f"Press the key.\n{held_out}\nLeave me out, please!\nna\u00efve is left out\n")
    (tmp_path / "prompts.txt").write_text("leave me out please\n")
    train = read_texts("train", wordnet, [tmp_path / "lines.txt"], [tmp_path / "prompts.txt"])
    assert train.lines == ["Press the key."]
    assert train.definitions == ["a light thing"]
    # An abbreviation is no word.
    assert train.words[0] == "racket ball"
    assert "IBM" not in train.words
    test = read_texts("test", wordnet, [tmp_path / "lines.txt"])
    assert not [*test.lines, *test.definitions, *test.words]


def test_texts_are_drawn_of_what_there_is() -> None:
    rng = np.random.default_rng(0)
    assert {Texts(examples=["only"]).drawn(rng) for _ in range(9)} == {"only"}
    drawn = {Texts(examples=["only"], words=["a word"]).drawn(rng) for _ in range(99)}
    assert "only" in drawn
    assert any(text.startswith("a word, a word") for text in drawn)
    assert normalized("Don't, please!") == "don't please"
    assert normalized("in 1999") == ""


def test_without_wordnet_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="install wordnet-base"):
        read_texts("train", tmp_path)


def test_a_file_that_is_not_there_is_named(wordnet: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"nothing\.txt cannot be read"):
        read_texts("train", wordnet, without=[tmp_path / "nothing.txt"])


def test_silence_is_cut() -> None:
    sound_T = np.zeros(16_000, np.float32)
    sound_T[8_000:9_000] = 0.25
    assert trimmed(sound_T).max() == 1
    assert len(trimmed(sound_T)) == pytest.approx(1_960, abs=2)
    assert len(trimmed(np.zeros(100, np.float32))) == 0


def signals(rows: int = 6, frames: int = 32_000) -> torch.Tensor:
    at = torch.arange(frames) / 16_000
    tones = torch.stack([torch.sin(2 * torch.pi * 300 * (row + 1) * at) for row in range(rows)])
    tones[:, round(0.88 * frames) :] = 0
    return (tones * 8_000).to(torch.int16)


def test_rooms_keep_the_form_and_the_targets() -> None:
    symbols = torch.ones(6, 3, dtype=torch.int64)
    rooms = Rooms(room=28_160)
    made, kept = rooms(signals(), symbols, torch.Generator().manual_seed(0))
    assert kept is symbols
    assert made.shape == (6, 32_000)
    assert made.isfinite().all()
    peaks = made.abs().amax(1)
    assert ((peaks > 100) & (peaks <= 32_767)).all()
    again, _ = rooms(signals(), symbols, torch.Generator().manual_seed(0))
    torch.testing.assert_close(made, again, rtol=0, atol=0)
    other, _ = rooms(signals(), symbols, torch.Generator().manual_seed(1))
    assert not torch.equal(made, other)


def test_rooms_change_the_speed_and_keep_all_of_an_utterance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise and tails, a tone that fills its room is a tone of another pitch, as long as the speed says."""
    module = "penstock.apps.speech.rooms"
    for name, value in (("REVERBERANT", 0.0), ("BABBLE", 0.0), ("NARROW", 0.0), ("CUT_LOW", 0.0), ("LOGARITHMIC", 0.0)):
        monkeypatch.setattr(f"{module}.{name}", value)
    monkeypatch.setattr(f"{module}.RESPONSE_DB", 0.0)
    monkeypatch.setattr(f"{module}.TO_NOISE_DB", (120.0, 120.0))
    given = signals(1)
    made, _ = Rooms(room=28_160, slowest=0.9, fastest=0.9)(given, None, torch.Generator().manual_seed(0))
    spectrum = torch.fft.rfft(made[0]).abs()
    assert float(spectrum.argmax()) / 2 == pytest.approx(270, abs=2)
    loud = (made[0].abs() > 0.5 * made.max()).nonzero().flatten()
    assert float(loud[-1] - loud[0]) == pytest.approx(28_160 / 0.9, rel=0.01)


def test_rooms_bear_silence() -> None:
    made, _ = Rooms(room=TAIL)(torch.zeros(2, 16_000, dtype=torch.int16), None, torch.Generator().manual_seed(0))
    assert made.isfinite().all()


def test_synthesizers_are_drawn_by_their_shares() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
    assert set(SHARES) == set(SIZES)
    # At most a third of the sound of MBROLA and of RHVoice has an accent.
    for name in ("mbrola", "rhvoice"):
        assert SHARES[f"{name}-accented"] <= (SHARES[name] + SHARES[f"{name}-accented"]) / 3 + 1e-9
    rng = np.random.default_rng(0)
    names = ("mbrola", "mbrola-accented", "mbrola-accented", "mbrola-accented")
    among = [Speaker(synthesizer=name, name=str(at), speak=lambda _, __: iter(())) for at, name in enumerate(names)]
    drawn = [chosen(among, rng).synthesizer for _ in range(3_000)]
    # Those that are not installed give their shares to the others, whatever the number of voices.
    assert drawn.count("mbrola") / len(drawn) == pytest.approx(2 / 3, abs=0.03)


def test_a_speaker_is_in_one_split() -> None:
    """CMU ARCTIC's speakers have voices of several synthesizers, under the same initials or as Alan."""
    people: dict[str, set[str]] = {}
    for voices in (FLITE, FESTIVAL, PICO, MBROLA, MBROLA_ACCENTED, RHVOICE, RHVOICE_ACCENTED):
        for split, names in voices.items():
            for name in names:
                person = name.removeprefix("cmu_us_").removesuffix("16").partition("_")[0].replace("alan", "awb")
                people.setdefault(person, set()).add(split)
    assert {"awb", "slt", "bdl", "clb", "kal", "rab"} <= set(people)
    assert not {person: splits for person, splits in people.items() if len(splits) > 1}

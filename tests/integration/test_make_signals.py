"""Hours of speech, as synthesizers make them, here a program that says a tone."""

import ctypes
import io
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from benchmarks.acceptance.speech import growing_signals
from benchmarks.acceptance.speech.growing_signals import GrowingSignals
from benchmarks.acceptance.speech.train_sentences import step_s
from penstock.apps.speech import make_signals, many_voices
from penstock.apps.speech.app import RATE_HZ
from penstock.apps.speech.many_voices import RHVOICE_LIBRARY, speakers
from penstock.apps.speech.recipe import words_of
from penstock.apps.speech.sentences_recipe import FRAMES, ROOM, recipe
from penstock.apps.speech.texts import normalized, read_texts
from penstock.core.errors import TrainError
from penstock.train.data.shards import Shards

# Two fit into a signal.
TONE_S = 1.8


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    folder = tmp_path / "wordnet"
    folder.mkdir()
    names = [f"{one} {other}" for one in ("red", "blue", "green", "grey") for other in map(chr, range(97, 123))]
    lines = [f'0 03 n 01 thing 0 000 | a thing; "the {a} door and the {b} one"' for a in names for b in names[:4]]
    (folder / "data.noun").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def synthesizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An espeak-ng that says a tone, the only synthesizer that there is."""
    wave = tmp_path / "tone.wav"
    soundfile.write(wave, np.sin(np.arange(round(TONE_S * 22_050)) / 5), 22_050)
    program = tmp_path / "bin" / "espeak-ng"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\nexec /bin/cat {wave}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setattr(many_voices, "RHVOICE_LIBRARY", "libnone.so")
    return program


@pytest.mark.thorough
@pytest.mark.usefixtures("synthesizer")
def test_signals_grow_while_they_are_read(wordnet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "growing"
    texts = read_texts("train", wordnet)
    making = make_signals.Making(
        split="train", folder=folder, texts=texts, speakers=speakers("train"), seed=0, ends_s=time.monotonic() + 2
    )
    progress = growing_signals.make(making, processes=1, more=False, say=lambda _: None)
    assert progress.shards
    assert set(progress.hours) == {"espeak"}
    with pytest.raises(TrainError, match="exists; choose another folder"):
        growing_signals.make(making, processes=1, more=False, say=lambda _: None)
    monkeypatch.setattr(growing_signals, "LOOK_S", 0.0)
    done = sorted(folder.glob("*.targets.npy"))
    # A shard whose characters are not there yet is none.
    for file in done[1:]:
        file.rename(file.with_suffix(".later"))
    growing = GrowingSignals(folder, signals=1_000)
    first_nT = growing.empty(128)
    growing.read(np.arange(128), np.zeros(128, np.uint64), first_nT)
    assert np.array_equal(first_nT[:64], first_nT[64:])
    number = "99999"
    np.save(folder / f"{number}.npy", first_nT[:64][::-1])
    np.save(folder / f"{number}.targets.npy", np.load(done[0])[::-1])
    now_nT = growing.empty(128)
    symbols_nL = growing.read(np.arange(128), np.zeros(128, np.uint64), now_nT)
    assert np.array_equal(now_nT[:64], now_nT[64:][::-1])
    assert np.array_equal(symbols_nL[:64], symbols_nL[64:][::-1])
    assert all(normalized(" ".join(words_of(symbols_L))) for symbols_L in symbols_nL.tolist())


@pytest.mark.usefixtures("synthesizer")
def test_more_signals_come_behind_those_that_are_there(wordnet: Path, tmp_path: Path) -> None:
    folder = tmp_path / "growing"
    folder.mkdir()
    for name in ("00006.npy", "00006.targets.npy", "00007.npy"):
        (folder / name).touch()
    among = speakers("train")
    ends_s = time.monotonic() + 1
    making = make_signals.Making(
        split="train", folder=folder, texts=read_texts("train", wordnet), speakers=among, seed=0, ends_s=ends_s
    )
    progress = growing_signals.make(making, processes=1, more=True, say=lambda _: None)
    made = sorted(file.name for file in folder.iterdir() if file.stat().st_size)
    assert len(made) == 2 * progress.shards > 0
    assert made[:2] == ["00008.npy", "00008.targets.npy"]


def test_an_empty_folder_has_no_signals(tmp_path: Path) -> None:
    growing = GrowingSignals(tmp_path, signals=10)
    with pytest.raises(TrainError, match="has no signals yet"):
        growing.read(np.arange(1), np.zeros(1, np.uint64), growing.empty(1))


def test_the_rate_of_a_trial(tmp_path: Path) -> None:
    lines = ({"step": 100, "seconds": 30.0}, {"step": 200, "seconds": 38.0})
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert step_s(tmp_path) == pytest.approx(0.08)


def test_pico_speaks_marked_text(synthesizer: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.txt"
    # pico2wave -l VOICE -w FILE TEXT
    program = synthesizer.with_name("pico2wave")
    program.write_text(f'#!/bin/sh\necho "$2 $5" >> {told}\nexec /bin/cp {tmp_path / "tone.wav"} "$4"\n')
    program.chmod(0o755)
    voices = {speaker.name: speaker for speaker in speakers("train") if speaker.synthesizer == "pico"}
    assert set(voices) == {"en-US", "en-GB"}
    assert not [speaker for speaker in speakers("test") if speaker.synthesizer == "pico"]
    told.unlink()
    one, two = voices["en-GB"].sounds(["a red door", "the old one"], np.random.default_rng(0))
    # At different sizes of the speaker, between 0.8 and 1.15.
    assert len(one) != len(two)
    assert all(TONE_S / 1.2 < len(each) / RATE_HZ < TONE_S / 0.75 for each in (one, two))
    first, second = told.read_text().splitlines()
    assert re.fullmatch(r"en-GB <speed level='\d+'><pitch level='\d+'>a red door</pitch></speed>", first), first
    assert "the old one" in second


@pytest.mark.thorough
def test_espeak_drives_the_voices_of_mbrola_that_are_installed(synthesizer: Path, tmp_path: Path) -> None:
    told = tmp_path / "told.txt"
    # espeak-ng -v VOICE -s SPEED -p PITCH --stdout TEXT, with two voices of MBROLA.
    tone = f"exec /bin/cat {tmp_path / 'tone.wav'}"
    synthesizer.write_text(f'#!/bin/sh\necho "$*" >> {told}\ncase $2 in mb-us1|mb-fr1-en|en-*) {tone};; esac\n')
    assert {speaker.synthesizer for speaker in speakers("train")} == {"espeak"}
    program = synthesizer.with_name("mbrola")
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    voices = {speaker.synthesizer: speaker for speaker in speakers("train") if speaker.synthesizer != "espeak"}
    assert {name: speaker.name for name, speaker in voices.items()} == {"mbrola": "us1", "mbrola-accented": "fr1"}
    assert {speaker.synthesizer for split in ("validation", "test") for speaker in speakers(split)} == {"espeak"}
    told.unlink()
    one, two = voices["mbrola-accented"].sounds(["a red door", "the old one"], np.random.default_rng(0))
    # At different sizes of the speaker, between 0.84 and 1.22.
    assert len(one) != len(two)
    assert all(TONE_S / 1.25 < len(each) / RATE_HZ < TONE_S / 0.8 for each in (one, two))
    first, second = told.read_text().splitlines()
    assert re.fullmatch(r"-v mb-fr1-en -s \d+ -p \d+ --stdout a red door", first), first
    assert "the old one" in second


@pytest.mark.thorough
@pytest.mark.usefixtures("synthesizer")
def test_rhvoice_speaks_at_many_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {speaker.synthesizer for speaker in speakers("train")} == {"espeak"}
    try:
        ctypes.CDLL(RHVOICE_LIBRARY)
    except OSError:
        pytest.skip(f"{RHVOICE_LIBRARY} is not installed")
    monkeypatch.setattr(many_voices, "RHVOICE_LIBRARY", RHVOICE_LIBRARY)
    voices = {speaker.name: speaker for speaker in speakers("train") if speaker.synthesizer.startswith("rhvoice")}
    if not voices:
        pytest.skip("RHVoice's voices are not installed")
    native = {name for name, speaker in voices.items() if speaker.synthesizer == "rhvoice"}
    assert (native, set(voices) - native) == ({"alan", "bdl", "clb", "slt"}, {"evgeniy-eng", "lyubov"})
    text = "the red door & the <old> one"
    sounds = list(voices["bdl"].sounds([text, "a", "", text], np.random.default_rng(0)))
    assert [len(sound_T) > 0 for sound_T in sounds] == [True, True, False, True]
    assert len({len(sound_T) for sound_T in sounds}) == 4
    assert 1 < len(sounds[0]) / RATE_HZ < 4
    wave = next(iter(voices["clb"].speak([text], np.random.default_rng(0))))
    assert soundfile.info(io.BytesIO(wave)).samplerate == RATE_HZ
    # RHVoice itself would speak with another voice.
    with pytest.raises(TrainError, match="cannot speak"):
        list(many_voices._rhvoice("nobody", [text], np.random.default_rng(0)))


@pytest.mark.thorough
@pytest.mark.usefixtures("synthesizer")
def test_signals_are_shards_that_the_recipe_reads(
    wordnet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    begin = ["runs/speech-data", "--wordnet", str(wordnet), "--hours", "0.01", "--held-out", "1", "--processes", "1"]
    make_signals.main(begin)
    said = capsys.readouterr().out
    assert "train: 64 signals, espeak 0." in said
    data = recipe().data()
    assert data.test is not None
    for split, part in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        assert isinstance(part, Shards)
        assert not part.verify()
        signals_nT = part.empty(len(part))
        symbols_nL = np.asarray(part.read(np.arange(len(part)), np.zeros(len(part), np.uint64), signals_nT))
        assert signals_nT.shape == (64, FRAMES)
        assert not signals_nT[:, ROOM:].any()
        counts = [" ".join(words_of(row)).count("door") for row in symbols_nL.tolist()]
        assert {1, 2} <= set(counts) <= {0, 1, 2}
        # As long as what is spoken: a word list, a definition or an example is a tone here.
        loud = (np.abs(signals_nT.astype(np.int32)) > 1000).mean(1) * FRAMES / 16_000
        assert loud.min() > 0.7 * TONE_S
        if split != "train":
            texts = {text.split()[1] for text in read_texts(split, wordnet).examples}
            assert {word for row in symbols_nL.tolist() for word in words_of(row)} >= texts
    augmented, _ = recipe().augment(torch.from_numpy(signals_nT[:2]), None, torch.Generator())  # pyright: ignore[reportOptionalCall]
    assert augmented.shape == (2, FRAMES)
    with pytest.raises(SystemExit, match="exists; choose another folder"):
        make_signals.main(begin)


def test_without_synthesizers_it_is_said(wordnet: Path, tmp_path: Path, synthesizer: Path) -> None:
    # One that fails is none.
    synthesizer.write_text("#!/bin/sh\nexit 3\n")
    assert speakers("train") == []
    with pytest.raises(SystemExit, match="no synthesizer has voices for test; install espeak-ng"):
        make_signals.main([str(tmp_path / "made"), "--wordnet", str(wordnet), "--processes", "1"])

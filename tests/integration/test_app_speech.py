"""The speech application: its events, its data, how it learns, and that chunks are heard as wholes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from penstock.apps.speech import corpora, make_data, model
from penstock.apps.speech.app import FRAME_S, LOOKAHEAD, SYMBOLS, app, beamed
from penstock.apps.speech.corpora import Utterance, data
from penstock.apps.speech.language import language_of
from penstock.apps.speech.model import speech_net, tiny
from penstock.apps.speech.recipe import spelled, spoken_words, word_error, words_of
from penstock.apps.speech.spec_augment import FrequencyWarp, SpecAugment
from penstock.apps.speech.transcript import AFTER_SPEECH_S, LONGEST_S, SILENCE_S, revised, spoken
from penstock.core.errors import TrainError
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.core.speech.endpoint_beam import Redecoded
from penstock.core.speech.ngram import NGramScorer
from penstock.core.speech.spoken import Speech, Word
from penstock.nn import ctc_loss
from penstock.runtime.load import load, streaming_executor
from penstock.runtime.whole_signals import run_in_chunks
from penstock.train.recipe import ArraySet
from penstock.train.run import train

assert app.live is not None
EVENTS: Any = app.live.events
SECOND = round(1 / FRAME_S)


def outputs(text: str, probability: float = 0.9) -> Array:
    """Frames in which these symbols are the likeliest."""
    made = np.full((len(text), len(SYMBOLS)), (1 - probability) / (len(SYMBOLS) - 1), np.float32)
    made[np.arange(len(text)), [SYMBOLS.index(each) for each in text]] = probability
    return np.log(made)


def told(text: str, frames: int) -> list[dict[str, Any]]:
    """Events of these frames, in chunks of so many."""
    memory: Any = None
    events: list[dict[str, Any]] = []
    for start in range(0, len(text), frames):
        event, memory = EVENTS(
            outputs(text[start : start + frames]), json.loads(json.dumps(memory)), start + frames >= len(text)
        )
        events += [event] if event is not None else []
    return events


@pytest.mark.parametrize("frames", [1, 2, 4, 8, 100])
def test_text_and_words_are_told_once_whatever_the_chunks(frames: int) -> None:
    events = told("--ff-ii-v-ee--  --s-eee-v-e-n--", frames)
    assert "".join(event["text"] for event in events) == "five seven"
    words = [(word["word"], word["begin_s"], word["time_s"]) for event in events for word in event["words"]]
    assert words == [("five", 0.04, 0.24), ("seven", 0.36, 0.58)]
    assert [event.get("final", False) for event in events] == [False] * (len(events) - 1) + [True]


@pytest.mark.parametrize("frames", [1, 2, 4, 61, 62, 100])
def test_an_utterance_that_begins_in_the_last_chunk_is_separated_from_the_one_before(frames: int) -> None:
    events = told("a" + "-" * round(AFTER_SPEECH_S * SECOND) + "b", frames)
    texts = "".join(event["text"] + "\n" * event.get("final", False) for event in events)
    assert texts.split() == ["a", "b"]
    assert [word["word"] for event in events for word in event["words"]] == ["a", "b"]


def test_a_recording_of_ten_minutes_fits_into_a_request() -> None:
    assert app.max_body_bytes > 600 * 16_000 * 2


def test_a_letter_twice_needs_a_blank_between() -> None:
    assert [word["word"] for event in told("-s-e-ee-", 3) for word in event["words"]] == ["see"]
    assert [word["word"] for event in told("-s-eee-", 3) for word in event["words"]] == ["se"]


def test_a_word_has_the_geometric_mean_of_its_characters() -> None:
    event, _ = EVENTS(np.concatenate([outputs("o", 0.9), outputs("n", 0.4)]), None, True)
    assert event["words"][0]["probability"] == pytest.approx(0.6, abs=1e-3)


def test_what_was_spoken_is_told_to_clients_of_other_makers() -> None:
    assert app.live is not None
    assert app.live.speech is not None
    said = [app.live.speech(event) for event in told("-o-n- -n-o-", 4)]
    assert "".join(each.delta or "" for each in said if each is not None) == "on no"
    words = [word for each in said if each is not None for word in each.words]
    assert [(word.text, word.start_s, word.end_s) for word in words] == [("on", 0.02, 0.08), ("no", 0.14, 0.2)]


def test_a_better_text_is_told_beside_what_was_told_before() -> None:
    (ended,) = told("-h-i-", 100)
    assert (ended["final"], ended["end_s"]) == (True, 0.1)
    words = (Word(text="ho", start_s=0.0, end_s=0.02, probability=0.5),)
    better = revised(ended, Redecoded(text="ho", words=words))
    assert better == ended | {
        "utterance": {"text": "ho", "words": [{"word": "ho", "probability": 0.5, "begin_s": 0.0, "time_s": 0.02}]}
    }
    assert spoken(better) == Speech(words=list(words), delta="hi", final=True, end_s=0.1, text="ho")


def test_a_beam_is_declared_with_a_language_model_of_the_texts() -> None:
    assert app.live is not None
    assert app.live.beam is None
    beam = beamed.live and beamed.live.beam
    assert beam is not None
    assert beam.language == "penstock.apps.speech.language:words_language"
    model = language_of(["Stop, Yes!", "go on"])
    assert model.unit == "characters"
    assert set(SYMBOLS[1:]) <= set(model.tokens)
    scorer = NGramScorer(model)
    state = scorer.start
    for symbol in "sto":
        _, state = scorer.score(state, scorer.ids[symbol])
    assert scorer.score(state, scorer.ids["p"])[0] > scorer.score(state, scorer.ids["x"])[0] + 2
    with pytest.raises(TrainError, match="write numbers as they are spoken"):
        language_of(["4 words"])


def test_nothing_is_told_of_silence_and_of_no_frames() -> None:
    assert EVENTS(outputs("---"), None, False)[0] is None
    assert EVENTS(outputs(""), None, True)[0] is None
    assert told("-" * round(3 * SILENCE_S * SECOND), 4) == []


def test_an_utterance_ends_in_silence_and_the_next_one_begins_without_a_space() -> None:
    rest = "-" * round(AFTER_SPEECH_S * SECOND)
    events = told(f"-n-o-{rest}-o-n-{rest}-o-f-f", 4)
    utterances = [""]
    for event in events:
        utterances[-1] += event["text"]
        utterances += [""] * event.get("final", False)
    assert utterances == ["no", "on", "off", ""]
    # Within the pause of an utterance the words go on.
    shorter = "-" * round(AFTER_SPEECH_S * SECOND - 6)
    assert "".join(event["text"] for event in told(f"-n-o- {shorter}-o-n", 4)) == "no on"


def test_speech_without_a_pause_is_cut() -> None:
    events = told("-a-b " * round(1.5 * LONGEST_S * SECOND / 5), 4)
    assert [event.get("final", False) for event in events].count(True) == 2


def test_text_is_spelled_or_refused() -> None:
    assert [words_of(row) for row in spelled(["It's  five,\nplease!", ""]).tolist()] == [["it's", "five", "please"], []]
    with pytest.raises(TrainError, match=r"'7'.*write numbers as they are spoken"):
        spelled(["gate 7"])
    with pytest.raises(TrainError, match="'é'"):
        spelled(["café"])


@pytest.mark.thorough
def test_the_default_data_are_spelled_words_of_different_voices() -> None:
    made = spoken_words()
    assert made.validation is not None
    for part in (made.train, made.validation):
        assert isinstance(part, ArraySet)
        texts = [" ".join(words_of(row)) for row in np.asarray(part.targets).tolist()]
        assert any("seven" in text for text in texts)
        assert len(texts) == len(part.inputs)


def test_word_error_counts_words() -> None:
    said, heard = "-o-n-e- -t-w-o-", "-o-n-e- -t-o-o-"
    assert word_error(torch.from_numpy(outputs(said)[None]), torch.from_numpy(spelled(["one two"]))) == 0
    assert word_error(torch.from_numpy(outputs(heard)[None]), torch.from_numpy(spelled(["one two"]))) == 0.5


@pytest.mark.parametrize(("parts", "forward"), [(1, 0), (2, 0), (1, 40)])
@pytest.mark.parametrize("frames", [1280, 777, 160])
def test_a_stream_is_heard_as_the_whole_signal_is(frames: int, parts: int, forward: int) -> None:
    torch.manual_seed(0)
    network = speech_net(24, 2, channels=2, parts=parts, residual=forward > 0, forward=forward).eval()
    sound = np.random.default_rng(0).integers(-3000, 3000, (4, 12_345), np.int16)
    executor = streaming_executor(app, network, slots=4, max_rows=4)
    with torch.inference_mode():
        whole = network(torch.from_numpy(sound)).numpy()
    np.testing.assert_allclose(run_in_chunks(executor, sound, frames), whole, atol=1e-4)


def test_the_sizes_are_those_of_the_declaration() -> None:
    assert sum(parameter.numel() for parameter in tiny().parameters()) < 250_000
    assert 11e6 < sum(parameter.numel() for parameter in model.middle().parameters()) < 13e6
    assert model.large.args == (2560, 5)
    assert app.output.shape[0] == 1280 // 320 + LOOKAHEAD


def test_masks_hide_whole_bands_and_frames_in_training_alone() -> None:
    torch.manual_seed(0)
    masks, spectrum = SpecAugment(4, 6, masks=1), torch.ones(64, 50, 20)
    made = masks(spectrum)
    frames, bands = (made == 0).all(2).sum(1), (made == 0).all(1).sum(1)
    assert (int(frames.max()), int(bands.max())) == (6, 4)
    assert (int(frames.min()), int(bands.min())) == (0, 0)
    hidden = frames[:, None, None] * 20 + bands[:, None, None] * 50 - frames[:, None, None] * bands[:, None, None]
    torch.testing.assert_close((made == 0).sum((1, 2)), hidden[:, 0, 0])
    assert torch.equal(masks.eval()(spectrum), spectrum)


def test_bands_are_stretched_and_compressed_in_training_alone() -> None:
    torch.manual_seed(0)
    warp, bands, peak = FrequencyWarp(0.2), torch.arange(40.0), 15.0
    # A peak of a band at 15.
    spectrum = torch.exp(-((bands - peak) ** 2) / 8).expand(64, 30, 40)
    made = warp(spectrum)
    assert made.shape == spectrum.shape
    at = (made * bands).sum(2) / made.sum(2)
    # Equal in all frames of a signal; another one in each, within the share.
    assert float((at - at[:, :1]).abs().max()) < 1e-3
    assert 0.8 * peak <= float(at.min()) < 0.9 * peak
    assert 1.1 * peak < float(at.max()) <= 1.3 * peak
    # A spectrum without a shape has none afterwards.
    torch.testing.assert_close(warp(torch.ones(8, 5, 40)), torch.ones(8, 5, 40))
    assert torch.equal(warp.eval()(spectrum), spectrum)


@pytest.fixture
def two(tmp_path: Path) -> list[Utterance]:
    rng = np.random.default_rng(0)
    made: list[Utterance] = []
    for name, text, rate_hz in (("1-2-0001", "YES NO", 16_000), ("1-2-0002", "STOP", 8_000)):
        file = tmp_path / "1" / "2" / f"{name}.flac"
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, rng.normal(0, 0.1, rate_hz), rate_hz)
        made.append(Utterance(file=file, text=text))
    return made


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def layouts(root: Path) -> dict[str, tuple[Callable[[], list[Utterance]], Path]]:
    """A reader of each layout, and its table."""
    sounds = root / "1" / "2"
    (root / "clips").symlink_to(sounds)
    tables = {
        "librispeech": write(sounds / "1-2.trans.txt", "1-2-0001 YES NO\n1-2-0002 STOP\n"),
        "common voice": write(
            root / "a.tsv", "client_id\tpath\tsentence\nx\t1-2-0001.flac\tYES NO\nx\t1-2-0002.flac\tSTOP"
        ),
        "json lines": write(
            root / "a.jsonl",
            '{"audio_filepath": "1/2/1-2-0001.flac", "text": "YES NO"}\n\n'
            '{"audio": "1/2/1-2-0002.flac", "text": "STOP"}\n',
        ),
        "audio folder": write(
            sounds / "metadata.csv", "file_name,transcription\n1-2-0001.flac,YES NO\n1-2-0002.flac,STOP\n"
        ),
    }
    readers: dict[str, Callable[[], list[Utterance]]] = {
        "librispeech": lambda: corpora.librispeech(root),
        "common voice": lambda: corpora.common_voice(tables["common voice"]),
        "json lines": lambda: corpora.json_lines(tables["json lines"]),
        "audio folder": lambda: corpora.audio_folder(sounds),
    }
    return {name: (readers[name], tables[name]) for name in tables}


LAYOUTS = ["librispeech", "common voice", "json lines", "audio folder"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_corpus_is_read_as_it_is_laid_out(layout: str, two: list[Utterance], tmp_path: Path) -> None:
    read, _ = layouts(tmp_path)[layout]
    assert [(each.file.resolve(), each.text) for each in read()] == [(each.file, each.text) for each in two]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_missing_in_a_corpus_is_named(layout: str, two: list[Utterance], tmp_path: Path) -> None:
    read, table = layouts(tmp_path)[layout]
    two[1].file.unlink()
    with pytest.raises(TrainError, match=r"names 1 sounds that are not there, as .*1-2-0002\.flac"):
        read()
    table.write_bytes(b"\xff\xfe\n")
    with pytest.raises(TrainError, match=f"{table.name} is no text in UTF-8"):
        read()
    table.unlink()
    with pytest.raises(TrainError, match=r"has no utterance|cannot be read"):
        read()


@pytest.mark.parametrize("text", ["[]", "{}", '{"audio": 1}', "no JSON"])
def test_a_line_that_is_no_utterance_is_shown(text: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", text)
    with pytest.raises(TrainError, match=r"line 1 of .* must be a JSON object with audio_filepath and text"):
        corpora.json_lines(file)


def test_tables_without_the_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="has the columns a, b; Common Voice has path and sentence"):
        corpora.common_voice(write(tmp_path / "a.tsv", "a\tb\n1\t2\n"))
    write(tmp_path / "metadata.csv", "file_name,b\n1,2\n")
    with pytest.raises(TrainError, match="has the columns file_name, b; it needs file_name and transcription"):
        corpora.audio_folder(tmp_path)


def test_rows_that_end_early_are_refused(two: list[Utterance], tmp_path: Path) -> None:
    folder = two[0].file.parent
    with pytest.raises(TrainError, match=r"row 2 of .*a\.tsv has no sentence"):
        corpora.common_voice(write(tmp_path / "a.tsv", "path\tsentence\n1-2-0001.flac\tYES\n1-2-0002.flac\n"))
    write(folder / "metadata.csv", "file_name,text\n1-2-0001.flac\n")
    with pytest.raises(TrainError, match=r"row 1 of .*metadata\.csv has no text"):
        corpora.audio_folder(folder)


def test_texts_have_any_characters_and_tables_a_byte_order_mark(two: list[Utterance], tmp_path: Path) -> None:
    sound, folder = two[0].file, two[0].file.parent
    text = "yes\u2028no\x85stop"
    assert (
        corpora.json_lines(write(tmp_path / "a.jsonl", f'{{"audio": "{sound}", "text": "{text}"}}\n'))[0].text == text
    )
    write(folder / "metadata.csv", f'\ufefffile_name,transcription\r\n{sound.name},"yes\nno"\r\n')
    assert [each.text for each in corpora.audio_folder(folder)] == ["yes\nno"]


@pytest.mark.parametrize("rate_hz", [16_000, 8_000])
def test_files_of_floats_are_as_loud_as_others(rate_hz: int, tmp_path: Path) -> None:
    sound_T = np.sin(np.arange(rate_hz) / 10).astype(np.float32) / 2
    read: list[Array] = []
    for subtype in ("PCM_16", "FLOAT"):
        file = tmp_path / f"{subtype}.wav"
        soundfile.write(file, sound_T, rate_hz, subtype=subtype)
        utterances = [Utterance(file=file, text="yes")]
        made = data(train=utterances, validation=utterances).train
        assert isinstance(made, ArraySet)
        read.append(np.asarray(made.inputs["sound"][0], np.int32))
    assert np.abs(read[1]).max() > 10_000
    assert np.abs(read[0] - read[1]).max() <= 2


def test_sounds_are_read_at_the_rate_of_the_network(two: list[Utterance], caplog: pytest.LogCaptureFixture) -> None:
    made = data(train=two, validation=two[1:])
    assert isinstance(made.train, ArraySet)
    assert [len(sound_T) for sound_T in made.train.inputs["sound"]] == made.train.targets["samples"].tolist()
    assert made.train.targets["samples"].tolist() == [16_000, 16_000]
    assert [words_of(row) for row in made.train.targets["symbols"].tolist()] == [["yes", "no"], ["stop"]]
    with pytest.raises(TrainError, match="no training utterance is left"):
        data(train=two, validation=two, longest_s=0.5)
    assert "2 of 2 training utterances are longer than 0.5 s" in caplog.text


def test_a_sound_that_is_none_is_named(two: list[Utterance]) -> None:
    two[0].file.write_bytes(b"no sound")
    with pytest.raises(TrainError, match=r"1-2-0001\.flac cannot be read as sound"):
        data(train=two, validation=two)
    soundfile.write(two[0].file, np.zeros((100, 2)), 16_000)
    with pytest.raises(TrainError, match="has 2 channels"):
        data(train=two, validation=two)


GLOSS = """00002684 03 n 02 object 0 001 @ 00001930 n 0000 | a thing; "it was full of rackets, balls and other objects"
00003553 03 n 02 whole 0 001 @ 00002684 n 0000 | an assemblage; "how big is that part?"; "in 1999"; "too short"
00004258 03 n 02 thing 0 001 @ 00003553 n 0000 | a living thing; "How big is that part"
"""


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    return write(tmp_path / "wordnet" / "data.noun", GLOSS).parent


@pytest.fixture
def synthesizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only one that is installed: it says a tone, and fails or says nothing for some texts."""
    wave = tmp_path / "tone.wav"
    soundfile.write(wave, np.sin(np.arange(4410) / 5), 22_050)
    program = write(
        tmp_path / "bin" / "espeak-ng",
        f'#!/bin/sh\ncase "$*" in *"$FAILS"*) exit 3;; *"$MUTE"*) exit 0;; esac\nexec /bin/cat {wave}\n',
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    monkeypatch.setenv("FAILS", "nobody says this")
    monkeypatch.setenv("MUTE", "nobody says this either")
    return program


def test_sentences_of_wordnet_are_its_examples_of_words_alone(wordnet: Path) -> None:
    assert make_data.sentences(wordnet) == ["it was full of rackets balls and other objects", "how big is that part"]


@pytest.mark.usefixtures("synthesizer")
def test_sentences_are_spoken_by_voices_of_their_split(wordnet: Path, tmp_path: Path) -> None:
    made = [tmp_path / "made", tmp_path / "again"]
    for folder in made:
        make_data.main([str(folder), "--wordnet", str(wordnet), "--seed", "3"])
    rows: dict[str, list[dict[str, Any]]] = {}
    for split in make_data.SPLITS:
        manifest = f"{split}.jsonl"
        assert (made[0] / manifest).read_text() == (made[1] / manifest).read_text()
        rows[split] = [json.loads(line) for line in (made[0] / manifest).read_text().splitlines()]
        (utterance,) = corpora.json_lines(made[0] / manifest)
        sound, rate_hz = soundfile.read(utterance.file, dtype="int16")
        assert (rate_hz, len(sound) / rate_hz) == (16_000, pytest.approx(0.2, abs=0.01))
        assert 0.2 < np.abs(sound).max() / 32_767 < 0.75
    texts = [row["text"] for split in rows.values() for row in split]
    assert sorted(texts) == sorted(make_data.sentences(wordnet))
    for split, of in rows.items():
        assert {row["voice"].removeprefix("espeak-") for row in of} <= set(make_data.VOICES[split])


def test_what_cannot_be_spoken_is_said(
    wordnet: Path, tmp_path: Path, synthesizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = [str(tmp_path / "made"), "--wordnet", str(wordnet)]
    with pytest.raises(SystemExit, match=r"has no files data\.\* of WordNet; install wordnet-base"):
        make_data.main([str(tmp_path / "made"), "--wordnet", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        make_data.main([*begin, "--sentences", "1"])
    monkeypatch.setenv("FAILS", "how big")
    with pytest.raises(SystemExit, match=r"espeak-ng cannot speak: .*status 3"):
        make_data.main(begin)
    monkeypatch.setenv("FAILS", "nobody says this")
    monkeypatch.setenv("MUTE", "how big")
    with pytest.raises(SystemExit, match="gave no sound for 'how big is that part'"):
        make_data.main(begin)
    synthesizer.unlink()
    with pytest.raises(SystemExit, match="no synthesizer is installed; install espeak-ng"):
        make_data.main(begin)


def test_a_few_steps_lower_the_loss() -> None:
    torch.manual_seed(0)
    sound = np.random.default_rng(0).normal(0, 2000, (4, 16_000)).astype(np.int16)
    signals, symbols = torch.from_numpy(sound), torch.from_numpy(spelled(["one", "two", "three", "four"]))
    network = speech_net(32, 1, channels=2)
    optimizer = torch.optim.AdamW(network.parameters(), lr=6e-3)
    losses: list[float] = []
    for _ in range(15):
        loss = ctc_loss(network(signals), symbols)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-3:]) < 0.5 * losses[0]


def test_a_training_leaves_a_bundle_that_streams(two: list[Utterance], tmp_path: Path) -> None:
    found = find_application("speech")
    examples = data(train=two, validation=two)
    short = replace(
        found.recipe(),
        data=lambda: examples,
        epochs=None,
        steps=2,
        batch_size=2,
        augment=None,
    )
    result = train(found, tmp_path / "run", short, overrides={}, quiet=True)
    assert result.metrics["word_error"] >= 0
    assert load(tmp_path / "run" / "bundle").predict(np.zeros(1280, np.int16)).shape[1] == len(SYMBOLS)

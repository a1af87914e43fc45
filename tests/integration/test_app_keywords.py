"""The keywords application: its data, what it tells of a stream, how it learns, and that chunks are heard as wholes."""

import json
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.apps.keywords.app import BLANK, SYMBOLS, WORDS, app, events
from penstock.apps.keywords.clips import DATA, REST_S, SIGNAL, Clip, compose, read_clips
from penstock.apps.keywords.make_data import INDEX_FIELDS, TAKES, VOICES, takes
from penstock.apps.keywords.model import keywords_net
from penstock.apps.keywords.recipe import ROOM, augment, collapsed, edit_distance, recipe, word_error
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.nn import ctc_loss
from penstock.runtime.load import load, streaming_executor
from penstock.runtime.whole_signals import run_in_chunks
from penstock.train.recipe import ArraySet, Data
from penstock.train.run import train

SEVEN, NINE = SYMBOLS.index("seven"), SYMBOLS.index("nine")


def outputs(*symbols: int) -> Array:
    """Frames in which these symbols are the likeliest, with a probability of 0.9."""
    probabilities = np.full((len(symbols), len(SYMBOLS)), 0.1 / (len(SYMBOLS) - 1), np.float32)
    probabilities[np.arange(len(symbols)), symbols] = 0.9
    return np.log(probabilities)


def told(symbols: list[int], frames: int) -> list[tuple[str, float]]:
    """Words and times of the events for these symbols, in chunks of so many."""
    memory: Any = None
    words: list[tuple[str, float]] = []
    for start in range(0, len(symbols), frames):
        part = symbols[start : start + frames]
        event, memory = events(outputs(*part), json.loads(json.dumps(memory)), start + frames >= len(symbols))
        words += [(word["word"], word["time_s"]) for word in (event or {"words": []})["words"]]
    return words


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 20])
def test_words_are_told_once_whatever_the_chunks(frames: int) -> None:
    symbols = [0, SEVEN, SEVEN, SEVEN, 0, SEVEN, NINE, 0, 0, NINE, NINE, 0]
    wanted = [("seven", 0.08), ("seven", 0.24), ("nine", 0.28), ("nine", 0.4)]
    assert told(symbols, frames) == wanted


def test_nothing_is_told_of_blanks_and_of_no_frames() -> None:
    assert events(outputs(), None, False) == (None, [BLANK, 0])
    assert events(outputs(0, 0), [SEVEN, 5], True) == (None, [BLANK, 7])
    assert events(outputs(), [SEVEN, 5], True) == (None, [SEVEN, 5])


def test_a_word_comes_with_its_probability() -> None:
    event, memory = events(outputs(0, SEVEN), None, False)
    assert event == {"words": [{"word": "seven", "probability": 0.9, "time_s": 0.08}]}
    assert json.loads(json.dumps(memory)) == memory == [SEVEN, 2]


def test_each_voice_is_in_one_split_and_says_every_word() -> None:
    voices = {split: read_clips(split) for split in VOICES}
    assert {split: sorted(of) for split, of in voices.items()} == {split: sorted(of) for split, of in VOICES.items()}
    names = [voice for of in voices.values() for voice in of]
    assert len(names) == len(set(names))
    for split, of in voices.items():
        for voice, clips in of.items():
            counts = np.bincount([clip.symbol for clip in clips], minlength=len(SYMBOLS))
            assert counts.tolist() == [0, *[TAKES[split]] * len(WORDS)], voice


def test_the_index_is_that_of_the_sound() -> None:
    import soundfile

    rows = [line.split(",") for line in (DATA / "index.csv").read_text().splitlines()]
    assert tuple(rows[0]) == INDEX_FIELDS
    ends: dict[str, int] = {}
    for voice, _, word, _, _, _, begin, end in rows[1:]:
        assert int(begin) == ends.get(voice, 0), (voice, word)
        assert 0.1 < (int(end) - int(begin)) / 16_000 < 1.5, (voice, word)
        ends[voice] = int(end)
    for voice, end in ends.items():
        info = soundfile.info(DATA / f"{voice}.flac")
        assert (info.frames, info.samplerate, info.channels, info.subtype) == (end, 16_000, 1, "PCM_16"), voice
    assert sum(file.stat().st_size for file in DATA.iterdir()) < 10e6


def test_takes_are_those_of_the_index() -> None:
    lines = (DATA / "index.csv").read_text().splitlines()
    first = next(iter(VOICES["train"]))
    spoken = [line.split(",") for line in lines if line.startswith(f"{first},")]
    planned = takes(first, TAKES["train"])
    assert [(row[2], row[3], int(row[4]), int(row[5])) for row in spoken] == [tuple(take) for take in planned]


@pytest.fixture
def one_thread() -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def few() -> dict[str, list[Clip]]:
    clips = read_clips("validation")
    return {voice: clips[voice] for voice in list(clips)[:4]}


def test_signals_hold_their_words_and_rest_behind_them(few: dict[str, list[Clip]]) -> None:
    signals = compose(few, 8, seed=5, room=ROOM, noisy=False)
    assert (signals.samples.shape, signals.samples.dtype) == ((32, SIGNAL), np.int16)
    for sound, symbols, ends in zip(signals.samples, signals.symbols, signals.ends, strict=True):
        count = np.count_nonzero(symbols)
        assert (symbols[count:] == 0).all()
        assert ends.max() <= ROOM - REST_S * 16_000
        assert not sound[ends.max() :].any()
    again = compose(few, 8, seed=5, room=ROOM, noisy=False)
    np.testing.assert_array_equal(signals.samples, again.samples)


def test_augmentation_is_a_function_of_its_generator_and_stays_in_range(few: dict[str, list[Clip]]) -> None:
    signals = compose(few, 2, seed=5, room=ROOM, noisy=False)
    sound, symbols = torch.from_numpy(signals.samples), torch.from_numpy(signals.symbols)
    one, other, third = (augment(sound, symbols, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(one, other)
    assert not torch.equal(one, third)
    assert one.shape == sound.shape
    assert torch.isfinite(one).all()
    assert one.abs().max() <= 32_767


def test_batches_are_augmented_where_they_are() -> None:
    # "meta" stands for a GPU: it refuses what is on another device as well.
    sound = torch.zeros(3, SIGNAL, dtype=torch.int16, device="meta")
    changed, same = augment(sound, sound, torch.Generator().manual_seed(1))
    assert changed.is_meta
    assert changed.shape == sound.shape
    assert same is sound


def test_word_error_counts_what_is_missed_wrong_and_invented() -> None:
    assert collapsed([0, 3, 3, 0, 3, 5, 5]) == [3, 3, 5]
    assert edit_distance([1, 2, 3], [1, 2, 3]) == 0
    assert edit_distance([1, 3], [1, 2, 3]) == 1
    assert edit_distance([1, 4, 3, 3], [1, 2, 3]) == 2
    assert edit_distance([], [1, 2]) == 2
    heard = torch.from_numpy(np.stack([outputs(0, SEVEN, SEVEN, 0), outputs(NINE, 0, NINE, 0)]))
    assert word_error(heard, torch.tensor([[SEVEN, 0], [NINE, SEVEN]])) == pytest.approx(1 / 3)


@pytest.mark.usefixtures("one_thread")
def test_a_few_steps_lower_the_loss(few: dict[str, list[Clip]]) -> None:
    torch.manual_seed(0)
    signals = compose(few, 1, seed=5, room=ROOM, noisy=False)
    sound, symbols = torch.from_numpy(signals.samples), torch.from_numpy(signals.symbols)
    network, made = keywords_net(), recipe()
    optimizer = made.optimizer(network.parameters())
    losses: list[float] = []
    for step in range(12):
        changed, _ = augment(sound, symbols, torch.Generator().manual_seed(step))
        loss = ctc_loss(network(changed), symbols)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-3:]) < 0.5 * losses[0]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("frames", [1280, 777, 160])
def test_a_stream_is_heard_as_the_whole_signal_is(few: dict[str, list[Clip]], frames: int) -> None:
    torch.manual_seed(0)
    network = keywords_net().eval()
    signals = compose(few, 1, seed=5, noisy=True).samples[:, :12_345]
    executor = streaming_executor(app, network, slots=4, max_rows=4)
    with torch.inference_mode():
        whole = network(torch.from_numpy(signals)).numpy()
    np.testing.assert_allclose(run_in_chunks(executor, signals, frames), whole, atol=1e-4)


def test_the_network_is_as_small_as_it_says() -> None:
    assert sum(parameter.numel() for parameter in keywords_net().parameters()) < 150_000


def test_a_training_leaves_a_bundle_that_streams(few: dict[str, list[Clip]], tmp_path: Path) -> None:
    signals = compose(few, 1, seed=5, room=ROOM, noisy=False)
    examples = ArraySet(inputs=signals.samples, targets=signals.symbols)
    found = find_application("keywords")
    short = replace(
        found.recipe(), data=lambda: Data(train=examples, validation=examples), epochs=None, steps=2, batch_size=4
    )
    result = train(found, tmp_path / "run", short, overrides={}, quiet=True)
    assert result.metrics["word_error"] >= 0
    assert load(tmp_path / "run" / "bundle").predict(signals.samples[0, :1280]).shape == (1, len(SYMBOLS))

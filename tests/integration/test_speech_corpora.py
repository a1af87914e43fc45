"""Speech of one's own: utterances of any length, padding that teaches nothing, and trimmed tails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.apps.speech.app import BLANK, SYMBOLS, app
from penstock.apps.speech.corpora import Utterance, data
from penstock.apps.speech.model import speech_net
from penstock.apps.speech.recipe import ctc_of_lengths, speech_recipe, spelled, spoken_words, word_error, words_of
from penstock.apps.speech.signal_frames import needed_frames, output_frames, spectrogram_frames
from penstock.apps.speech.trim_tail import TrimTail
from penstock.core.errors import TrainError
from penstock.core.source_files.find_application import FoundApplication
from penstock.runtime.load import as_found
from penstock.train.data.loader import first_batch
from penstock.train.interrupt import Interrupt
from penstock.train.overrides import with_overrides
from penstock.train.recipe import ArraySet, CheckpointPolicy, Recipe
from penstock.train.run import RunResult, train

MS = 16


def utterance(folder: Path, name: str, ms: int, text: str) -> Utterance:
    file = folder / f"{name}.wav"
    rng = np.random.default_rng(len(name) + ms)
    soundfile.write(file, rng.normal(0, 0.1, ms * MS), 16_000)
    return Utterance(file=file, text=text)


@pytest.fixture
def several(tmp_path: Path) -> list[Utterance]:
    words = ["yes", "no", "stop", "go on", "one two", "three"]
    return [utterance(tmp_path, f"{number}", 300 + 60 * number, words[number % len(words)]) for number in range(24)]


def batch(utterances: list[Utterance]) -> tuple[Any, Any]:
    made = data(train=utterances, validation=utterances).train
    return first_batch(made, len(utterances))


def test_frames_are_counted_as_the_network_counts_them() -> None:
    samples = torch.arange(0, 4000, 7)
    network = speech_net(8, 1, channels=1)
    assert torch.equal(output_frames(samples), network.output_lengths(samples))
    for count in (399, 400, 720, 3999):
        assert network(torch.zeros(1, count)).shape[1] == output_frames(torch.tensor([count])).item()


@given(st.text("abc ", max_size=6), st.integers(1, 12))
@settings(deadline=None)
def test_a_text_fits_into_the_frames_that_it_needs_and_no_fewer(text: str, frames: int) -> None:
    symbols = torch.from_numpy(spelled([text]))
    scores = torch.randn(frames, 1, len(SYMBOLS), generator=torch.Generator().manual_seed(0)).log_softmax(2)
    lengths = torch.tensor([frames]), (symbols != BLANK).sum(1)
    loss = torch.nn.functional.ctc_loss(scores, symbols, *lengths, BLANK)
    assert bool(loss.isfinite()) == (frames >= int(needed_frames(symbols)))


def test_padding_teaches_nothing(several: list[Utterance]) -> None:
    torch.manual_seed(0)
    network = speech_net(16, 2, channels=2).eval()
    inputs, targets = batch(several[:2] + several[-1:])
    assert inputs["sound"].shape == (3, 1680 * MS)
    with torch.no_grad():
        outputs = network(inputs["sound"], inputs["length_B"])
    for row, count in enumerate(inputs["length_B"].tolist()):
        with torch.no_grad():
            alone = network(inputs["sound"][row : row + 1, :count])
        torch.testing.assert_close(outputs[row : row + 1, : alone.shape[1]], alone, atol=1e-5, rtol=1e-5)
        own = {name: of[row : row + 1] for name, of in targets.items()}
        torch.testing.assert_close(ctc_of_lengths(outputs[row : row + 1], own), ctc_of_lengths(alone, own))
    # Whatever is said behind the end is no word.
    outputs[:, :, SYMBOLS.index("x")] = 9.0
    outputs[:, :30] = 0.0
    shorter = {**targets, "samples": torch.full((3,), 10_000)}
    assert word_error(outputs, shorter) == 1
    assert word_error(outputs, {**shorter, "symbols": torch.zeros(3, 1, dtype=torch.int64)}) == 0


lengths = st.lists(st.integers(0, 4000), min_size=1, max_size=6)


@given(lengths, st.lists(st.text("ab ", max_size=20), min_size=6, max_size=6), st.integers(0, 500), st.integers(0, 9))
@settings(deadline=None)
def test_a_tail_is_cut_so_that_the_text_still_fits(found: list[int], texts: list[str], ms: int, seed: int) -> None:
    samples = torch.tensor(found) * MS
    symbols = torch.from_numpy(spelled(texts[: len(found)]))
    inputs = {"sound": torch.ones(len(found), int(samples.max())), "length_B": samples}

    def trimmed() -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        return TrimTail(max_ms=ms)(inputs, {"symbols": symbols, "samples": samples}, generator)

    changed, targets = trimmed()
    cut = samples - targets["samples"]
    assert torch.equal(changed["length_B"], targets["samples"])
    assert torch.equal(changed["sound"], inputs["sound"])
    assert torch.equal(targets["symbols"], symbols)
    assert int(cut.min()) >= 0
    assert int(cut.max()) <= ms * MS
    # Whole frames of the spectrogram, less than half of them, and enough for the text if there were enough before.
    frames = spectrogram_frames(samples)
    assert torch.equal(frames - spectrogram_frames(targets["samples"]), cut // 160)
    assert bool(((cut == 0) | (2 * (cut // 160) < frames)).all())
    needed = needed_frames(symbols)
    assert bool(((cut == 0) | (output_frames(targets["samples"]) >= needed)).all())
    assert torch.equal(trimmed()[1]["samples"], targets["samples"])


def test_tails_of_all_lengths_are_cut_and_of_signals_of_one_length_none() -> None:
    samples, symbols = torch.full((2000,), 32_000), torch.from_numpy(spelled(["one two"] * 2000))
    cut = TrimTail(max_ms=50)
    _, targets = cut(
        {"sound": torch.zeros(2000, 1), "length_B": samples},
        {"symbols": symbols, "samples": samples},
        torch.Generator().manual_seed(0),
    )
    counts = np.bincount((32_000 - targets["samples"].numpy()) // 160)
    assert len(counts) == 6
    assert counts.min() > 250
    given = torch.zeros(2, 9), symbols[:2]
    assert cut(*given, torch.Generator()) == given
    with pytest.raises(TrainError, match=r"max_ms -1; it must be 0, for none, or more"):
        TrimTail(max_ms=-1)


def test_another_change_comes_before_the_tail_is_cut(several: list[Utterance]) -> None:
    def louder(sound: torch.Tensor, symbols: torch.Tensor, generator: torch.Generator) -> Any:
        assert symbols.ndim == sound.ndim == 2
        return sound * 2, symbols

    inputs, targets = batch(several)
    recipe = speech_recipe(spoken_words, epochs=1, augment=louder)
    assert recipe.augment is not None
    changed, made = recipe.augment(inputs, targets, torch.Generator().manual_seed(1))
    assert torch.equal(changed["sound"], 2 * inputs["sound"])
    assert bool((made["samples"] < targets["samples"]).any())
    assert torch.equal(recipe.augment(inputs["sound"], targets["symbols"], torch.Generator())[0], 2 * inputs["sound"])


def test_the_orders_and_the_tail_are_settings() -> None:
    recipe = speech_recipe(spoken_words, epochs=1)
    assert (recipe.order.buckets, recipe.order.shortest_first) == (20, True)
    assert recipe.augment == TrimTail(max_ms=200.0)
    off = with_overrides(recipe, {"order.buckets": 0, "order.shortest_first": False, "augment.max_ms": 0.0})
    assert not off.order.is_by_length
    assert off.augment == TrimTail(max_ms=0.0)
    with pytest.raises(TrainError, match=r"augment\.max_ms is 'long'; it must be a number"):
        with_overrides(recipe, {"augment.max_ms": "long"})


def test_what_cannot_be_learned_is_counted_and_left_out(
    several: list[Utterance], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense = utterance(tmp_path, "dense", 200, "too many characters")
    # Four frames of 20 ms for three letters, of which two are equal.
    fits = utterance(tmp_path, "fits", 95, "see")
    short = utterance(tmp_path, "short", 94, "see")
    empty = utterance(tmp_path, "empty", 0, "")
    long = utterance(tmp_path, "long", 2500, "long")
    made = data(train=[dense, *several, fits, short, empty, long], validation=several, longest_s=2.0).train
    assert isinstance(made, ArraySet)
    assert len(made) == len(several) + 1
    assert [words_of(row) for row in made.targets["symbols"].tolist()][-1] == ["see"]
    assert "1 of 29 training utterances are longer than 2 s, and left out" in caplog.text
    assert "3 of 29 training utterances are too short for their texts" in caplog.text
    assert "dense.wav" in caplog.text
    for nothing in ([], [dense]):
        with pytest.raises(TrainError, match="no training utterance is left"):
            data(train=nothing, validation=several)


def recipe_of(utterances: list[Utterance], **changes: Any) -> Recipe:
    examples = data(train=utterances, validation=utterances[:2])
    made = speech_recipe(lambda: examples, epochs=3, batch_size=4, threads=1, buckets=3)
    return replace(made, **changes)


def run(folder: Path, recipe: Recipe, *, quiet: bool = True) -> RunResult:
    own = replace(app, name="own", model=lambda: speech_net(8, 1, channels=1), recipe=lambda: recipe)
    found: FoundApplication = as_found(own)
    return train(found, folder, recipe, overrides={}, quiet=quiet)


@pytest.mark.thorough
def test_a_run_stopped_in_the_middle_of_an_epoch_ends_as_one_that_was_not(
    several: list[Utterance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(several, checkpoints=CheckpointPolicy(every_steps=2))
    whole = run(tmp_path / "whole", recipe, quiet=False)
    said = capsys.readouterr().out
    assert "3 buckets of examples of similar length: " in said
    assert "The first epoch takes the examples from the shortest to the longest." in said
    asked = iter([False] * 3 + [True] * 999)
    with monkeypatch.context() as patch:
        requested = property(lambda self: next(asked), lambda self, value: None)
        patch.setattr(Interrupt, "requested", requested, raising=False)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", recipe)
    resumed = run(tmp_path / "run", recipe)
    assert resumed.parameter_hash == whole.parameter_hash
    others = [
        run(tmp_path / name, with_overrides(recipe, {name: value})).parameter_hash
        for name, value in (("order.buckets", 0), ("order.shortest_first", False), ("augment.max_ms", 0.0))
    ]
    assert len({whole.parameter_hash, *others}) == 4


@pytest.mark.thorough
def test_one_utterance_and_utterances_of_one_length_are_learned(tmp_path: Path) -> None:
    one = utterance(tmp_path, "one", 400, "one")
    alike = [utterance(tmp_path, f"{number}", 400, "two") for number in range(6)]
    for name, utterances in (("single", [one]), ("alike", alike)):
        result = run(tmp_path / name, recipe_of(utterances))
        assert result.metrics["word_error"] >= 0

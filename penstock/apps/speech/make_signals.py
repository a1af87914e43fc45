"""Make hours of speech to train on: `python -m penstock.apps.speech.make_signals FOLDER --hours 80`.

The texts are those of WordNet (Debian: wordnet-base), the voices those of espeak-ng, flite, festival, SVOX Pico, MBROLA
and RHVoice, as many as are installed. A signal is 6 s long and holds a few utterances of a voice, one behind the other:
all signals are equally long, and yet hardly any of their time is padding. FOLDER/train, FOLDER/validation and
FOLDER/test are shards, whose voices and sentences differ. All of the speech is synthetic.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.apps.speech.app import RATE_HZ
from penstock.apps.speech.many_voices import Speaker, chosen, speakers
from penstock.apps.speech.recipe import spelled
from penstock.apps.speech.sentences_recipe import FRAMES, ROOM
from penstock.apps.speech.texts import WORDNET, Texts, normalized, read_texts
from penstock.core.errors import PenstockError, TrainError
from penstock.core.machine.cores import available_cores
from penstock.core.spec import Array
from penstock.train.data.shard_file import INDEX, ShardFile, describe_file
from penstock.train.data.shard_index import TARGETS, ShardIndex

# T samples of a signal, L characters of a text at most

PRELOADED = ["penstock.apps.speech.many_voices", "penstock.apps.speech.sentences_recipe", "penstock.apps.speech.texts"]
SPLITS = ("train", "validation", "test")
# Of the validation and of the test, whatever there is to train.
HELD_OUT_SIGNALS = 384
SIGNALS_PER_SHARD = 64
# Texts that a voice speaks before another is drawn.
TEXTS_AT_ONCE = 20
# Share of the signals that hold one utterance, with silence behind it.
ALONE = 0.25
PAUSE_S = 0.05, 0.8
PEAK = 20_000
# Texts in a row that no voice speaks, before the synthesizers are taken to be broken.
MOST_SILENT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """Settings of the shards of a split, for every process that makes some.

    Args:
        split: The split.
        folder: Its folder.
        texts: Its texts.
        speakers: Its voices.
        seed: Random seed.
        ends_s: By `time.monotonic`, when no further shard is begun; None for no end.
    """

    split: str
    folder: Path
    texts: Texts
    speakers: Sequence[Speaker]
    seed: int
    ends_s: float | None


class MadeShard(NamedTuple):
    """A shard that was written, with the texts of its signals, and the seconds of speech in it."""

    file: ShardFile
    texts: list[str]
    spoken_s: float
    voices: dict[str, float]


def utterances(texts: Texts, among: Sequence[Speaker], rng: np.random.Generator) -> Iterator[tuple[str, Array, str]]:
    """Speak texts without end, some of one voice and then of another.

    Yields:
        The synthesizer's name, the sound and the text in words.

    Raises:
        TrainError: No voice speaks.
    """
    silent = 0
    while True:
        speaker = chosen(among, rng)
        drawn = [texts.drawn(rng) for _ in range(TEXTS_AT_ONCE)]
        try:
            sounds = list(speaker.sounds(drawn, rng))
        except TrainError as error:
            silent += len(drawn)
            if silent > MOST_SILENT:
                raise TrainError(f"the synthesizers do not speak: {error}") from None
            continue
        for text, sound_T in zip(drawn, sounds, strict=True):
            silent = 0 if len(sound_T) else silent + 1
            if len(sound_T):
                yield speaker.synthesizer, sound_T, normalized(text)


def signal_of(sounds: Sequence[Array], pauses: Sequence[int]) -> Array:
    """Lay utterances one behind the other, each behind its pause in samples, int16 `[T]`."""
    signal_T = np.zeros(FRAMES, np.int16)
    at = 0
    for sound_T, pause in zip(sounds, pauses, strict=True):
        at += pause
        signal_T[at : at + len(sound_T)] = np.rint(PEAK * sound_T)
        at += len(sound_T)
    assert at <= FRAMES, at
    return signal_T


def make_shard(making: Making, number: int) -> MadeShard | None:
    """Write a shard; None if the time is over. The first is written in any case."""
    if number and making.ends_s is not None and time.monotonic() > making.ends_s:
        return None
    rng = np.random.default_rng([making.seed, SPLITS.index(making.split), number])
    source = utterances(making.texts, making.speakers, rng)
    signals: list[Array] = []
    texts: list[str] = []
    voices: dict[str, float] = {}
    left = next(source)
    while len(signals) < SIGNALS_PER_SHARD:
        sounds: list[Array] = []
        words: list[str] = []
        pauses: list[int] = []
        room, most = ROOM, 1 if rng.random() < ALONE else ROOM
        while len(sounds) < most:
            synthesizer, sound_T, text = left
            pause = round(rng.uniform(*PAUSE_S) * RATE_HZ)
            if pause + len(sound_T) > room:
                break
            room -= pause + len(sound_T)
            sounds.append(sound_T)
            words.append(text)
            pauses.append(pause)
            voices[synthesizer] = voices.get(synthesizer, 0.0) + len(sound_T) / RATE_HZ
            left = next(source)
        if sounds:
            signals.append(signal_of(sounds, pauses))
            texts.append(" ".join(words))
        else:
            # Longer than a signal.
            left = next(source)
    file = making.folder / f"{number:05d}.npy"
    np.save(file, np.stack(signals), allow_pickle=False)
    return MadeShard(describe_file(file, len(signals)), texts, sum(voices.values()), voices)


def make_split(making: Making, shards: int, *, processes: int, say: Callable[[str], object]) -> None:
    """Write the shards of a split and their index.

    Args:
        making: The split.
        shards: How many.
        processes: Processes that speak.
        say: Called with a sentence on the progress.

    Raises:
        TrainError: The folder exists, no synthesizer is installed, or none speaks.
    """
    if making.folder.exists():
        raise TrainError(f"{making.folder} exists; choose another folder, or remove it.")
    if not making.speakers:
        raise TrainError(
            f"no synthesizer has voices for {making.split}; install espeak-ng, and flite and festival for more voices."
        )
    making.folder.mkdir(parents=True)
    began_s = told_s = time.monotonic()
    context = get_context("forkserver")
    # They import torch, once.
    context.set_forkserver_preload(PRELOADED)
    made: list[MadeShard] = []
    with ProcessPoolExecutor(processes, context) as pool:
        for done in as_completed([pool.submit(make_shard, making, number) for number in range(shards)]):
            shard = done.result()
            if shard is None:
                continue
            made.append(shard)
            if time.monotonic() - told_s > 15:
                told_s = time.monotonic()
                say(f"{making.split}: {_hours(made):.1f} h in {told_s - began_s:.0f} s")
    made.sort(key=lambda shard: shard.file.file)
    with (making.folder / TARGETS).open("wb") as file:
        np.save(file, spelled([text for shard in made for text in shard.texts]), allow_pickle=False)
    count = sum(shard.file.examples for shard in made)
    index = ShardIndex(
        dtype="int16",
        shape=(FRAMES,),
        classes=(),
        targets=describe_file(making.folder / TARGETS, count),
        shards=tuple(shard.file for shard in made),
    )
    (making.folder / INDEX).write_text(json.dumps(index.to_json(), indent=1) + "\n")
    hours: dict[str, float] = {}
    for shard in made:
        for name, seconds in shard.voices.items():
            hours[name] = hours.get(name, 0.0) + seconds / 3600
    of = ", ".join(f"{name} {each:.2f} h" for name, each in sorted(hours.items()))
    say(f"{making.split}: {count:,} signals, {of}, in {time.monotonic() - began_s:.0f} s")


def _hours(made: Sequence[MadeShard]) -> float:
    return sum(shard.spoken_s for shard in made) / 3600


def main(argv: Sequence[str] | None = None) -> None:
    """Make the data, and say how much."""
    parser = argparse.ArgumentParser(prog="python -m penstock.apps.speech.make_signals", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hours", type=float, default=80.0, help="of signals to train on; 80 by default")
    parser.add_argument("--seconds", type=float, help="begin nothing after so many seconds, and keep what there is")
    parser.add_argument("--text", type=Path, action="append", default=[], help="more texts, a sentence a line")
    parser.add_argument("--without", type=Path, action="append", default=[], help="texts that must not be learned")
    parser.add_argument("--wordnet", type=Path, default=WORDNET, help="folder of WordNet's files")
    parser.add_argument("--held-out", type=int, default=HELD_OUT_SIGNALS, help="signals of validation and of test")
    parser.add_argument("--processes", type=int, default=available_cores())
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(argv)
    ends_s = None if parsed.seconds is None else time.monotonic() + parsed.seconds
    try:
        # The short ones first, so that the time ends in the long one.
        for split in reversed(SPLITS):
            texts = read_texts(split, parsed.wordnet, parsed.text, parsed.without)
            counts = {name: len(getattr(texts, name)) for name in Texts.__dataclass_fields__}
            print(f"{split}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items() if count), flush=True)
            signals = parsed.hours * 3600 * RATE_HZ / FRAMES if split == "train" else parsed.held_out
            making = Making(
                split=split,
                folder=parsed.folder / split,
                texts=texts,
                speakers=speakers(split),
                seed=parsed.seed,
                ends_s=ends_s,
            )
            shards = max(1, round(signals / SIGNALS_PER_SHARD))
            make_split(making, shards, processes=parsed.processes, say=lambda said: print(said, flush=True))
    except (PenstockError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()

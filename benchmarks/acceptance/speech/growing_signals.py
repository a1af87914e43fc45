"""Signals of sentences that are made while a network already learns from them.

`python -m benchmarks.acceptance.speech.growing_signals FOLDER --seconds 900` makes them. FOLDER/00001.npy is a shard of
`make_signals`, and FOLDER/00001.targets.npy its characters, which comes last.
"""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import final

import numpy as np

from penstock.apps.speech.app import RATE_HZ
from penstock.apps.speech.make_signals import PRELOADED, SIGNALS_PER_SHARD, MadeShard, Making, make_shard
from penstock.apps.speech.many_voices import speakers
from penstock.apps.speech.recipe import spelled
from penstock.apps.speech.sentences_recipe import FRAMES
from penstock.apps.speech.texts import WORDNET, read_texts
from penstock.core.errors import PenstockError, TrainError
from penstock.core.machine.cores import available_cores
from penstock.core.spec import Array
from penstock.train.data.examples import Examples
from penstock.train.data.sampler import Indices, Seeds

# B examples of a batch, L characters of a signal at most

# cuDNN's CTC takes 255 symbols at most.
MOST_CHARACTERS = 200
DONE = ".targets.npy"
LOOK_S = 3.0
TELL_S = 15.0
# For each process, so that none waits for another.
QUEUED = 2


@final
class GrowingSignals(Examples):
    """The signals in a folder that grows. Two runs do not read the same ones.

    Args:
        folder: Where `make` writes.
        signals: The number of signals in what counts as an epoch.
    """

    varies = True

    def __init__(self, folder: Path, signals: int) -> None:
        self.folder, self._signals = folder, signals
        self.input_dtype, self.input_shape = np.dtype(np.int16), (FRAMES,)
        self._lock = threading.Lock()
        self._looked_s = -LOOK_S
        self._shards: dict[str, tuple[Array, Array]] = {}
        self._names: list[str] = []

    def __len__(self) -> int:
        return self._signals

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """See `Examples`. An index is taken modulo the number of signals that there are now.

        Raises:
            TrainError: There is none.
        """
        self._look()
        names = self._names
        if not names:
            raise TrainError(f"{self.folder} has no signals yet.")
        targets_BL = np.zeros((len(indices_B), MOST_CHARACTERS), np.int64)
        for row, index in enumerate(indices_B.tolist()):
            number, at = divmod(index % (SIGNALS_PER_SHARD * len(names)), SIGNALS_PER_SHARD)
            signals_nT, targets_nL = self._shards[names[number]]
            inputs_B[row], targets_BL[row] = signals_nT[at], targets_nL[at]
        return targets_BL

    def fingerprint(self) -> dict[str, str]:
        """See `Examples`."""
        return {"signals": "made while they are learned from"}

    def _look(self) -> None:
        with self._lock:
            if time.monotonic() - self._looked_s < LOOK_S:
                return
            for file in sorted(self.folder.glob(f"*{DONE}")):
                name = file.name.removesuffix(DONE)
                if name not in self._shards:
                    self._shards[name] = np.load(self.folder / f"{name}.npy", mmap_mode="r"), np.load(file)
                    self._names.append(name)
            self._looked_s = time.monotonic()


@dataclass(slots=True)
class Progress:
    """The shards and hours of speech made until now.

    Args:
        shards: The number of shards.
        hours: Hours of speech, by synthesizer.
    """

    shards: int = 0
    hours: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, shard: MadeShard) -> None:
        """Count a shard."""
        self.shards += 1
        for name, seconds in shard.voices.items():
            self.hours[name] = self.hours.get(name, 0.0) + seconds / 3600

    def __str__(self) -> str:
        signals_h = self.shards * SIGNALS_PER_SHARD * FRAMES / RATE_HZ / 3600
        of = ", ".join(f"{name} {hours:.1f} h" for name, hours in sorted(self.hours.items()))
        return f"{signals_h:.1f} h of signals ({of})"


def make(making: Making, *, processes: int, more: bool, say: Callable[[str], object]) -> Progress:
    """Make shards in processes until `making.ends_s`; one at least.

    Args:
        making: The folder, texts, voices, seed and end.
        processes: Processes that speak.
        more: Whether the folder has shards already, which stay.
        say: Called with a sentence on the progress.

    Raises:
        TrainError: The folder exists, or the synthesizers do not speak.
    """
    if making.folder.exists() and not more:
        raise TrainError(f"{making.folder} exists; choose another folder, or remove it.")
    making.folder.mkdir(parents=True, exist_ok=more)
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    progress = Progress()
    waiting: set[Future[MadeShard | None]] = set()
    # Behind those that were begun, finished or not.
    numbers = count(1 + max((int(file.name.partition(".")[0]) for file in making.folder.iterdir()), default=-1))
    began_s = told_s = time.monotonic()
    # It is made in any case.
    first: Making | None = replace(making, ends_s=None)
    with ProcessPoolExecutor(processes, context) as pool:
        goes_on = True
        while goes_on or waiting:
            while goes_on and len(waiting) < QUEUED * processes:
                waiting.add(pool.submit(make_shard, first or making, next(numbers)))
                first = None
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                shard = future.result()
                if shard is not None and _keep(making.folder, shard):
                    progress.add(shard)
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                say(f"{told_s - began_s:.0f} s: {progress}")
            goes_on = making.ends_s is None or time.monotonic() < making.ends_s
    return progress


def _keep(folder: Path, shard: MadeShard) -> bool:
    """Write the characters of a shard, whole or not at all; False if a text is too long."""
    targets_nL = spelled(shard.texts)
    room = MOST_CHARACTERS - targets_nL.shape[1]
    if room < 0:
        return False
    name = Path(shard.file.file).stem
    unfinished = folder / f"{name}.unfinished"
    with unfinished.open("wb") as file:
        np.save(file, np.pad(targets_nL, ((0, 0), (0, room))), allow_pickle=False)
    unfinished.rename(folder / f"{name}{DONE}")
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Make signals for some seconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance.speech.growing_signals", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--text", type=Path, action="append", default=[], help="more texts, a sentence a line")
    parser.add_argument("--processes", type=int, default=available_cores())
    parser.add_argument("--more", action="store_true", help="the folder may have signals already, which stay")
    parser.add_argument("--nice", type=int, default=15, help="how far the training goes first")
    parsed = parser.parse_args(argv)
    os.nice(parsed.nice)
    making = Making(
        split="train",
        folder=parsed.folder,
        texts=read_texts("train", WORDNET, parsed.text),
        speakers=speakers("train"),
        seed=0,
        ends_s=time.monotonic() + parsed.seconds,
    )
    try:
        made = make(making, processes=parsed.processes, more=parsed.more, say=lambda said: print(said, flush=True))
    except (PenstockError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(made)


if __name__ == "__main__":
    main()

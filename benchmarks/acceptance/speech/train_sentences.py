"""Train speech-512 within a given time, on signals that are made meanwhile, for the word errors of open_vocabulary.

    python -m benchmarks.acceptance.speech.train_sentences --seconds 1500 --gpus 2 --text lines.txt

The folders are runs/speech-data and runs/speech-512. A short training measures the step, so that the schedule ends in
time. With `--steps` there is none: the training is stopped when the time is over, and `--resume` goes on with it.
Synthesizers as in penstock/apps/speech/README.md.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.acceptance.speech.growing_signals import DONE, GrowingSignals
from penstock.apps.speech import sentences_recipe
from penstock.apps.speech.app import middle
from penstock.apps.speech.make_signals import SIGNALS_PER_SHARD
from penstock.apps.speech.sentences_recipe import DATA
from penstock.core.machine.cores import available_cores
from penstock.train.data.shards import Shards
from penstock.train.recipe import Data, Recipe

NAME = "benchmarks.acceptance.speech.train_sentences:app"
GROWING, HELD_OUT = DATA / "growing", DATA / "held-out"
TRIAL, RUN = Path("runs/speech-512-trial"), Path("runs/speech-512")
SIGNALS = 160_000
TRIAL_STEPS, VALIDATIONS = 200, 5
# Shards that the trial and the training wait for.
FIRST_SHARDS, ENOUGH_SHARDS = 8, 80
# For the start of the training, the last validation and the bundle; and when no more signals are made.
REST_S, LAST_SIGNALS_S = 75.0, 120.0
# For the checkpoint of a training that is stopped.
STOP_S = 30.0
# Status of a training that was interrupted.
STOPPED = 130
# Share of the steps that the rate of the trial would allow.
SAFETY = 0.95


def recipe() -> Recipe:
    """The recipe of speech-512, on signals that are being made."""
    return replace(sentences_recipe.recipe(), data=_data)


app = replace(middle, recipe=recipe)


def _data() -> Data:
    return Data(
        train=GrowingSignals(GROWING, SIGNALS),
        validation=Shards(HELD_OUT / "validation"),
        test=Shards(HELD_OUT / "test"),
    )


def step_s(run: Path) -> float:
    """Return the seconds of a step between the first and the last validation of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])


def train(options: Sequence[str], out: Path, steps: int, batch: int, *, every: int, ends_s: float = math.inf) -> None:
    """Run `penstock train`, which goes on with the run in the folder; stop it at the end of the time.

    Args:
        options: Further options.
        out: The folder of the run.
        steps: Steps.
        batch: Signals of a step.
        every: Steps between validations.
        ends_s: By `time.monotonic`, when it is asked to stop.
    """
    given = ("--steps", str(steps), "--batch-size", str(batch), "--out", str(out))
    validations = f"selection.every_epochs={every * batch / SIGNALS}"
    command = [sys.executable, "-m", "penstock", "train", NAME, *given, "--set", validations, *options]
    with subprocess.Popen(command) as training:
        try:
            training.wait(None if ends_s == math.inf else max(0.0, ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            training.send_signal(signal.SIGINT)
            try:
                training.wait(STOP_S)
            except subprocess.TimeoutExpired:
                training.kill()
    if training.returncode not in (0, STOPPED):
        sys.exit(f"The training ended with status {training.returncode}.")


def _signals_made() -> int:
    return sum(1 for _ in GROWING.glob(f"*{DONE}"))


def main(argv: Sequence[str] | None = None) -> None:
    """Make signals and train until the time is over."""
    ends_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance.speech.train_sentences", description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="of everything together")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--batch-size", type=int, help="signals a step; 128 for each GPU by default")
    parser.add_argument("--steps", type=int, help="of a training that several calls do; stop it at the end of the time")
    parser.add_argument("--resume", action="store_true", help="go on with the training of a call with --steps")
    parser.add_argument("--text", action="append", default=[], help="more texts to speak, a sentence a line")
    parsed = parser.parse_args(argv)
    ends_s += parsed.seconds
    if parsed.resume and parsed.steps is None:
        parser.error("--resume needs the --steps of the call before.")
    for folder in () if parsed.resume else (GROWING, HELD_OUT, TRIAL, RUN):
        if folder.exists():
            sys.exit(f"{parser.prog}: {folder} exists; remove it, or run this in another folder.")
    texts = [part for file in parsed.text for part in ("--text", file)]
    cores = available_cores()
    makers = (
        "--processes",
        str(max(1, cores - 1 - parsed.gpus)),
        "--seconds",
        str(ends_s - LAST_SIGNALS_S - time.monotonic()),
    )
    module = "benchmarks.acceptance.speech.growing_signals"
    held_out = ("--hours", "0.1", "--held-out", "256", "--processes", str(cores))
    more = ("--more",) if parsed.resume else ()
    making = subprocess.Popen([sys.executable, "-m", module, str(GROWING), *makers, *texts, *more])
    batch, options = parsed.batch_size or 128 * parsed.gpus, ("--gpus", str(parsed.gpus))
    try:
        if not parsed.resume:
            made = [sys.executable, "-m", "penstock.apps.speech.make_signals", str(HELD_OUT), *held_out, *texts]
            subprocess.run(made, check=True)
        if parsed.steps is None:
            _train_until(ends_s, batch, options, making)
        else:
            _wait(ENOUGH_SHARDS, making)
            every = max(1, parsed.steps // VALIDATIONS)
            train(options, RUN, parsed.steps, batch, every=every, ends_s=ends_s - STOP_S)
    finally:
        making.terminate()
        making.wait()


def _train_until(ends_s: float, batch: int, options: Sequence[str], making: subprocess.Popen[bytes]) -> None:
    """Measure a step, and train as many as there is time for."""
    _wait(FIRST_SHARDS, making)
    train(options, TRIAL, TRIAL_STEPS, batch, every=TRIAL_STEPS // 2)
    _wait(ENOUGH_SHARDS, making)
    steps = int((ends_s - REST_S - time.monotonic()) / step_s(TRIAL) * SAFETY)
    said = f"{1e3 * step_s(TRIAL):.1f} ms a step: {steps:,} steps of {batch} signals"
    print(f"{said}, with {_signals_made() * SIGNALS_PER_SHARD:,} signals so far", flush=True)
    train(options, RUN, steps, batch, every=max(1, steps // VALIDATIONS))


def _wait(shards: int, making: subprocess.Popen[bytes]) -> None:
    while _signals_made() < shards:
        if making.poll() is not None:
            sys.exit("The signals were not made.")
        time.sleep(0.5)


if __name__ == "__main__":
    main()

"""Training recipe for sentences of many voices, on a GPU: signals that `make_signals` wrote, in rooms and noise."""

from pathlib import Path

from penstock.apps.speech.app import RATE_HZ
from penstock.apps.speech.recipe import word_error
from penstock.apps.speech.rooms import Rooms
from penstock.nn import ctc_loss
from penstock.train.data.shards import Shards
from penstock.train.recipe import Data, EMASettings, Recipe, Selection, StepExecution
from penstock.train.step.declared_optimizer import Optimizer
from penstock.train.step.declared_schedule import Schedule

DATA = Path("runs/speech-data")
FRAMES = 6 * RATE_HZ
# Samples in which the utterances of a signal lie; the rest is room to speak more slowly.
ROOM = round(0.88 * FRAMES)
# Share of the signals without a room, a microphone or noise: with fewer, it learns longer how words are spelled.
PLAIN = 0.5
# With 4e-3, its loss after 3,000 steps was higher.
PEAK_RATE = 2e-3
STEPS = 10_000


def recipe() -> Recipe:
    """10,000 steps of 256 signals of 6 s: more than 4,000 hours, each signal in another room each time."""
    return Recipe(
        data=sentences,
        loss=ctc_loss,
        # Muon for the recurrent layers alone; other linear layers are in a `module`.
        optimizer=Optimizer("muon", lr=PEAK_RATE, weight_decay=0.01, others=("conv", "module")),
        schedule=Schedule("cosine", warmup=0.05, last=0.01),
        metrics={"word_error": word_error},
        selection=Selection(metric="word_error", mode="min", every_epochs=5.0),
        batch_size=256,
        steps=STEPS,
        # The recurrent layers take most of the time, in a CUDA graph half as much as in tf32.
        precision="bf16",
        clip_norm=1.0,
        augment=Rooms(room=ROOM, plain=PLAIN),
        ema=EMASettings(decay=0.999, warm_up=True),
        # CTC's faster gradient on a GPU adds in any order.
        execution=StepExecution(deterministic=False),
    )


def sentences() -> Data:
    """The signals that `make_signals` wrote, test included."""
    return Data(train=Shards(DATA / "train"), validation=Shards(DATA / "validation"), test=Shards(DATA / "test"))

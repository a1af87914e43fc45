"""A chain behind a live part: a GRU marks the ends of bursts of beeps, and a network counts on from their number.

The number of beeps chooses what the second part does: 1 to 6 count, 7 makes it raise, 8 takes 150 ms a step and has no
end of its own before 50 steps, 9 is no input of it.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock import Bundle
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from tests.support.generating import examples

RATE_HZ, CHUNK = 8000, 400
RAISES, SLOW, UNFIT = 7, 8, 9

BEEPS = """
from penstock import Application, Live, TensorSpec


def network():
    import torch
    from penstock.nn import GRU, LogMel, Sequential

    bands = 8
    gru = GRU(bands, 2)
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.zero_()
        cell = gru.cell
        # Rows: reset, update and new, of each unit. The first is above 0 in a beep.
        cell.weight_ih_l0[4] = 4 / bands
        cell.bias_ih_l0[2:5] = torch.tensor([-2.0, 1.7, 24.0])
        # The second follows it at once, and falls below 0 some 120 ms after it.
        cell.weight_hh_l0[5, 0], cell.bias_hh_l0[5] = 2.1, 1.9
    return Sequential(LogMel(8000, window_ms=20, hop_ms=10, bands=bands), gru)


def events(output_U, memory, last):
    beeping, busy, beeps = memory or (False, False, 0)
    bursts = []
    for beep, burst in (output_U > 0).tolist():
        beeps += beep and not beeping
        if busy and not burst and beeps:
            bursts.append(beeps)
            beeps = 0
        beeping, busy = beep, burst
    if last and beeps:
        bursts.append(beeps)
    return {"bursts": bursts} if bursts else None, [beeping, busy, beeps]


app = Application(
    name="beeps",
    input=TensorSpec(dtype="int16", shape=(400,), meaning="sound", units="int16 PCM at 8 kHz", name="sound"),
    output=TensorSpec(dtype="float32", shape=(5, 2), meaning="beep, burst", labels=("beep", "burst"), name="marks"),
    live=Live(rate_hz=8000, events=events),
    chunks=8,
    model=":network",
)
"""

COUNTER = "from tests.support.generating import SERVED as app\n"

# Twice the number, with a gap for a mean `each`.
DOUBLE = """
from penstock import Application, TensorSpec


def network():
    from torch import nn

    class Double(nn.Module):
        def forward(self, number):
            return number * 2

    return Double()


app = Application(
    name="double",
    input=TensorSpec(dtype="float32", shape=(1,), meaning="a number", name="number"),
    output=TensorSpec(dtype="float32", shape=(1,), meaning="twice", name="twice"),
    reply=lambda twice: {"twice": float(twice[0])},
    model=":network",
)
"""

CHAIN = """
import numpy as np

from penstock import Chain, ChainStep, Segments


def ends(event, memory, last):
    number = memory or 0
    found = []
    for beeps in event["bursts"] if event else ():
        number += 1
        if beeps == 9:
            found.append({"digits": np.zeros(100, np.int64)})
        else:
            digits = {7: 29}.get(beeps, beeps)
            found.append({"digits": [digits, number % 5, 3], "seed": 501 if beeps == 8 else number})
    return found, number


chain = Chain(
    name="NAME",
    description="Counts on from the number of beeps.",
    steps=(ChainStep(part="beeps"), ChainStep(part="counter")),
    segments=Segments(find=ends, budget_ms=BUDGET, max_under_way=MAX),
)
"""

# The number goes through a function, a network, and the generator, whose answer a join adds to the others.
LONG = """
import numpy as np

from penstock import Chain, ChainStep, Segments, TensorSpec


def ends(event, memory, last):
    return [np.array([beeps], np.float32) for beeps in (event["bursts"] if event else ())], memory


def copies(results, number):
    return [number] * int(number[0])


def add(results, number):
    return int(sum(one[0] for one in results["double"]))


def spelt(results, number):
    return {"digits": [results["add"] % 20, 1]}


def join(results, number):
    return {"sum": np.array(results["add"]), "steps": np.array(len(results["counter"]["token"]))}


chain = Chain(
    name="long",
    steps=(
        ChainStep(part="beeps"),
        ChainStep(part="double", each=copies),
        ChainStep(run=add),
        ChainStep(part="counter", feed=spelt),
    ),
    segments=Segments(find=ends, budget_ms=5000),
    join=join,
    outputs={
        "sum": TensorSpec(dtype="int64", shape=(), meaning="sum"),
        "steps": TensorSpec(dtype="int64", shape=(), meaning="steps"),
    },
)
"""


class Segmented(NamedTuple):
    """The files of the chains.

    Args:
        chain: The chain of two parts.
        one: The same, with one segment at once.
        hasty: The same, with a budget that no network keeps.
        long: The chain of four steps.
        bundles: The bundles of the parts: `beeps`, `counter`, `double`.
    """

    chain: Path
    one: Path
    hasty: Path
    long: Path
    bundles: tuple[Path, Path, Path]

    @property
    def arguments(self) -> list[str]:
        """What `penstock serve` is given."""
        return [str(path) for path in (*self.bundles, self.chain, self.one, self.hasty, self.long)]


def burst(beeps: int) -> Array:
    """Beeps of noise of 50 ms with 50 ms between them, and a quarter of a second of silence; int16 at 8 kHz."""
    beep = np.random.default_rng(0).normal(0, 4000, RATE_HZ // 20).astype(np.int16)
    one = np.concatenate([beep, np.zeros(RATE_HZ // 20, np.int16)])
    return np.concatenate([np.tile(one, beeps), np.zeros(RATE_HZ // 4, np.int16)])


def sound(*bursts: int) -> Array:
    """Bursts of so many beeps after 100 ms of silence."""
    return np.concatenate([np.zeros(RATE_HZ // 10, np.int16), *map(burst, bursts)])


def write_segmented(folder: Path) -> Segmented:
    """Write the applications, their bundles and the chains into a folder."""
    given: dict[str, tuple[str, Any]] = {
        "beeps": (BEEPS, np.stack([sound(2, 1), sound(1, 2)])),
        "counter": (COUNTER, examples()),
        "double": (DOUBLE, np.ones((2, 1), np.float32)),
    }
    bundles: list[Path] = []
    for name, (text, inputs) in given.items():
        (folder / f"{name}_app.py").write_text(text)
        found = find_application(str(folder / f"{name}_app.py"))
        Bundle.write(found, _model_of(found), inputs, to=folder / name)
        bundles.append(folder / name)
    named = {"count-on": ("5000", "4"), "one": ("5000", "1"), "hasty": ("0.001", "4")}
    for name, (budget_ms, most) in named.items():
        text = CHAIN.replace("NAME", name).replace("BUDGET", budget_ms).replace("MAX", most)
        (folder / f"{name}.py").write_text(text)
    (folder / "long.py").write_text(LONG)
    beeps, counter, double = bundles
    count_on, one, hasty = (folder / f"{name}.py" for name in named)
    return Segmented(count_on, one, hasty, folder / "long.py", (beeps, counter, double))


def _model_of(found: Any) -> Any:
    from penstock.runtime.load import make_network

    return make_network(found)

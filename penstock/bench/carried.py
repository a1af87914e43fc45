"""What a pack costs to make, and whether it says what its bundle does wherever it is run."""

import math
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from penstock.bench.startup import running_server
from penstock.core.errors import BenchError
from penstock.core.pack import read_pack
from penstock.runtime.load import load
from penstock.serve.client import Client
from penstock.verify.browser import Browser
from penstock.verify.compare import compare
from penstock.verify.examples import golden_examples
from penstock.verify.places import ASKED_S, Device, Server, Training

EXPORTS = 3
EXPORT_S = 600


def export_seconds(bundle: Path) -> list[float]:
    """Seconds from a bundle to its pack by the command, of some runs.

    Raises:
        BenchError: There is no pack of it.
    """
    times_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "pack"
        command = [sys.executable, "-m", "penstock", "export", str(bundle), "--to", str(to)]
        for _ in range(EXPORTS):
            begun_s = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_S, check=False)
            times_s.append(time.perf_counter() - begun_s)
            if done.returncode:
                raise BenchError(f"{bundle} cannot be exported ({done.stderr.strip()}); nothing is measured.")
        read_pack(to)
    return times_s


def sameness(bundle: Path, pack: Path) -> list[float]:
    """The largest difference of a server, the Python engine and the web app from training's code.

    Raises:
        BenchError: An answer has another likeliest entry or another form.
    """
    predictor, ready = load(bundle), read_pack(pack)
    with ExitStack() as opened:
        url = opened.enter_context(running_server(bundle))
        client = opened.enter_context(Client(url, timeout_s=ASKED_S))
        places = [Server(client, ready), Device(ready), opened.enter_context(Browser(ready))]
        examples = golden_examples(ready, predictor.application)
        found = compare(Training(predictor), places, examples, labelled=bool(ready.outputs[0].labels))
    for one in found:
        if one.otherwise or one.difference == math.inf:
            raise BenchError(f"{one.place} answers {one.otherwise} of {one.examples} examples otherwise.")
    return [max(one.difference for one in found)]

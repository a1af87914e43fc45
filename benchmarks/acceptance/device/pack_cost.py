"""Time to make a pack, and agreement of every backend with its bundle."""

import math
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.acceptance.server.start_times import OPTIONS
from penstock.bench.server_process import running_server
from penstock.client.client import Client
from penstock.core.errors import BenchError
from penstock.core.packs.pack import read_pack
from penstock.runtime.load import load
from penstock.verify.backends import TIMEOUT_S, PackBackend, ServerBackend, TrainingBackend
from penstock.verify.browser import BrowserBackend
from penstock.verify.compare import compare
from penstock.verify.verify_inputs import golden_examples

EXPORTS = 3
EXPORT_S = 600


def export_seconds(bundle: Path) -> list[float]:
    """Seconds of `penstock export`, of some runs.

    Raises:
        BenchError: The export failed.
    """
    times_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "pack"
        command = [sys.executable, "-m", "penstock", "export", str(bundle), "--out", str(to)]
        for _ in range(EXPORTS):
            begun_s = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_S, check=False)
            times_s.append(time.perf_counter() - begun_s)
            if done.returncode:
                raise BenchError(f"{bundle} cannot be exported ({done.stderr.strip()}); nothing is measured.")
        read_pack(to)
    return times_s


def sameness(bundle: Path, pack: Path) -> list[float]:
    """Largest difference of a server, the Python engine and the web app from the training code.

    Raises:
        BenchError: An answer has another likeliest entry or another form.
    """
    predictor, ready = load(bundle), read_pack(pack)
    with ExitStack() as opened:
        url = opened.enter_context(running_server(bundle, OPTIONS)).url
        client = opened.enter_context(Client(url, timeout_s=TIMEOUT_S))
        backends = [
            ServerBackend(client, predictor.application),
            PackBackend(ready),
            opened.enter_context(BrowserBackend(ready)),
        ]
        examples = golden_examples(ready.golden().inputs, predictor.application)
        labelled = [spec.name for spec in ready.outputs[: ready.answers] if spec.labels]
        found = compare(TrainingBackend(predictor), backends, examples, labelled=labelled)
    for one in found:
        if one.disagreements or one.difference == math.inf:
            raise BenchError(f"{one.backend} disagrees on {one.disagreements} of {one.examples} examples.")
    return [max(one.difference for one in found)]

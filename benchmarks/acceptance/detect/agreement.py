"""Boxes of one picture in all places: torch, the server, the Python engine, and the web app if there is a browser."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from penstock.apps.detect.drawn import drawn_set
from penstock.bench.server_process import running_server
from penstock.client.client import Client
from penstock.core.errors import BenchError
from penstock.core.packs.pack import read_pack
from penstock.runtime.load import load
from penstock.verify.backends import TIMEOUT_S, Backend, PackBackend, ServerBackend, TrainingBackend
from penstock.verify.browser import BrowserBackend, browser_obstacle
from penstock.verify.compare import compare
from penstock.verify.verify_inputs import PNG, Example, as_png, golden_examples

SCENES = 24


def boxes_agree(bundle: Path, pack: Path) -> list[float]:
    """Return the largest difference of a box's side, in pixels of the frame, for each place beside torch.

    Raises:
        BenchError: A place finds another number of boxes, or other classes.
    """
    ready, predictor = read_pack(pack), load(bundle)
    examples = golden_examples(ready.golden().inputs, predictor.application)
    for number, pixels in enumerate(drawn_set("test", SCENES).pixels):
        opaque = np.full((1, *pixels.shape[1:]), 255, np.uint8)
        raw = np.ascontiguousarray(np.concatenate([pixels, opaque]).transpose(1, 2, 0))
        examples.append(Example(name=f"scene {number}", raw=raw, body=as_png(raw), content_type=PNG))
    with ExitStack() as opened:
        server = opened.enter_context(running_server(bundle, ("--latency-ms", "5000")))
        client = opened.enter_context(Client(server.url, timeout_s=TIMEOUT_S))
        places: list[Backend] = [ServerBackend(client, predictor.application), PackBackend(ready)]
        if not browser_obstacle(ready):
            places.append(opened.enter_context(BrowserBackend(ready)))
        rule = ready.golden().agreement
        found = compare(TrainingBackend(predictor), places, examples, labelled=(), rule=rule)
    others = [one for one in found if one.disagreements or (one.tensor == "classes" and one.difference)]
    if others:
        raise BenchError(f"{others[0].backend} has other {others[0].tensor} than torch in {others[0].worst}.")
    return [one.difference for one in found if one.tensor == "boxes"]

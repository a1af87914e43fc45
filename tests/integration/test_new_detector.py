"""The file that `penstock new detector` writes: trained a step, served, exported, watched."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from penstock.cli import build
from penstock.core.packs.pack import read_pack
from penstock.core.source_files.find_application import find_application
from penstock.core.spec import Array
from penstock.device.pack_engine import PackEngine
from penstock.device.sources import open_frames
from penstock.device.watch import WatchRun
from tests.support.serving import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def penstock(*words: str | Path) -> None:
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def scored(pixels: Array, bundle: Path) -> dict[str, list[object]]:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    with RunningServer(bundle) as server:
        status, _, reply = server.ask("POST", "/v1/apps/shapes", sink.getvalue(), {"Content-Type": "image/png"})
    assert status == 200, reply
    return reply


def test_the_file_runs_as_it_is_written(tmp_path: Path) -> None:
    file, bundle = tmp_path / "shapes.py", tmp_path / "run" / "bundle"
    assert CliRunner().invoke(build(), ["new", "detector", str(file)], catch_exceptions=False).exit_code == 0
    # One step teaches nothing, so that every box counts here.
    file.write_text(file.read_text().replace("THRESHOLD, LEAST = 0.05, 0.3", "THRESHOLD, LEAST = 0.01, 0.01"))
    penstock("train", file, "--out", tmp_path / "run", "--steps", "1")
    pixels = find_application(str(file)).module.drawn(7)[0].repeat(2, 0).repeat(2, 1)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    reply = scored(pixels, bundle)
    assert len(reply["boxes"]) == len(reply["classes"]) == len(reply["scores"]) > 0

    penstock("export", bundle, "--out", tmp_path / "pack")
    engine = PackEngine(read_pack(tmp_path / "pack"))
    with WatchRun(engine, open_frames(str(tmp_path / "picture.png"))) as run:
        (seen,) = run
    assert isinstance(seen.answer, tuple)
    assert len(seen.answer) == len(reply["boxes"])
    # The server's are in the same order, the largest score first, but for equal scores.
    served, watched = (np.array(each, np.float64) for each in (reply["boxes"], [each.box for each in seen.answer]))
    apart = np.abs(served[:, None] - watched[None]).max(2)
    assert apart.min(0).max() < 0.5
    assert apart.min(1).max() < 0.5

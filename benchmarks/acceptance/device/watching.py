"""Figures of `penstock watch`: age of its answers, and overhead of the engine over ONNX Runtime.

`python -m benchmarks.acceptance.device.watching PACK VIDEO` watches once on one core and prints what it found.
"""

import json
import os
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from statistics import median
from timeit import repeat, timeit
from typing import Any

import av
import numpy as np

from penstock.core.errors import BenchError
from penstock.core.packs.pack import read_pack
from penstock.core.spec import Array
from penstock.device.pack_engine import PackEngine
from penstock.device.sources import open_frames
from penstock.device.watch import WatchRun

HEIGHT, WIDTH, RATE, FRAMES = 480, 640, 30, 300
WATCHED = 5
WARM_UP, RUNS, ROUNDS = 20, 40, 7
# The allowed age of an answer is one frame interval plus this multiple of the model's time.
MODEL_FACTOR = 1.2


def video_age_p95(pack: Path) -> list[float]:
    """95th percentile of the age of answers, less 1.2 times the model's time, in frame intervals; of some runs.

    Raises:
        BenchError: Frames were lost without being counted, or an answer came out of order.
    """
    with tempfile.TemporaryDirectory() as folder:
        film = write_video(Path(folder) / "film.mp4")
        return [_watched(pack, film) for _ in range(WATCHED)]


def engine_overhead(pack: Path) -> list[float]:
    """The engine's time for a picture over that of the bare session, alternating, of some rounds.

    Raises:
        BenchError: The two answer differently.
    """
    engine = PackEngine(read_pack(pack))
    picture = moving(0)
    assert engine.pack.raw is not None
    given = {engine.pack.raw.name: picture}
    names = [output.name for output in engine.pack.outputs]
    bare = engine.session.run(names, given)
    if not all(np.array_equal(one, other[0]) for one, other in zip(engine.run(picture), bare, strict=True)):
        raise BenchError("the engine and its session disagree; nothing is measured.")
    for _ in range(WARM_UP):
        engine.run(picture)
    ratios: list[float] = []
    for _ in range(ROUNDS):
        times_s = [
            (timeit(lambda: engine.session.run(names, given), number=1), timeit(lambda: engine.run(picture), number=1))
            for _ in range(RUNS)
        ]
        theirs_s, ours_s = zip(*times_s, strict=True)
        ratios.append(median(ours_s) / median(theirs_s))
    return ratios


def moving(number: int) -> Array:
    """A frame of the film, RGBA `[480, 640, 4]`: drifting waves of colour with noise."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    waves = [np.sin((x + 3 * number) / (41 + 13 * c) + y / (29 + 7 * c) + c) for c in range(3)]
    grain = np.random.default_rng(number).normal(0, 4, (HEIGHT, WIDTH, 1))
    colours = np.clip(127.5 + 100 * np.stack(waves, 2) + grain, 0, 255).astype(np.uint8)
    return np.concatenate((colours, np.full((HEIGHT, WIDTH, 1), 255, np.uint8)), 2)


def write_video(file: Path) -> Path:
    """Write the film: ten seconds of H.264 at 30 frames per second."""
    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream("libx264", rate=RATE, options={"crf": "23", "preset": "veryfast"})
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        for number in range(FRAMES):
            frame = av.VideoFrame.from_ndarray(moving(number), format="rgba")
            frame.pts, frame.time_base = number, Fraction(1, RATE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file


def _watched(pack: Path, film: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.acceptance.device.watching", str(pack), str(film)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        raise BenchError(f"penstock watch ended with status {done.returncode}: {done.stderr.strip()[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    if found["answered"] + found["dropped"] != FRAMES or not found["in_order"]:
        raise BenchError(f"of {FRAMES} frames it reports {found}; nothing is measured.")
    return (found["age_p95_s"] - MODEL_FACTOR * found["model_s"]) * RATE


def main() -> None:
    """WatchRun once, and print what was found as JSON."""
    # One core for the decoder, the network and everything else.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    engine = PackEngine(read_pack(sys.argv[1]))
    picture = moving(0)
    alone_s = repeat(lambda: engine.run(picture), number=1, repeat=WARM_UP + RUNS)[WARM_UP:]
    with WatchRun(engine, open_frames(sys.argv[2])) as run:
        seen = [(answer.frame.number, answer.age_s) for answer in run]
    report = run.report()
    numbers = [number for number, _ in seen]
    ages_s = [age_s for _, age_s in seen if age_s is not None]
    found = {
        "answered": report.answered,
        "dropped": report.dropped,
        "in_order": numbers == sorted(set(numbers)),
        "age_p95_s": float(np.percentile(ages_s, 95)),
        "model_s": median(alone_s),
        "lag_s": report.lag_s,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

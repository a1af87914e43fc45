"""Live streams in real time over two engines, which are killed in turn."""

import asyncio
import os
import random
import signal
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path
from typing import final

import numpy as np

from benchmarks.acceptance.speech.streams_under_kills import MODEL, DrillResult, StreamsUnderKills
from benchmarks.models.write import write_bundle
from penstock.bench.process_usage import worker_pids
from penstock.bench.server_process import ServerProcess, running_server
from penstock.core.errors import BenchError

STREAMS, KILLS, PERCENTILE = 200, 100, 98.0
# A kill comes so long at most after both engines serve.
PAUSE_S, BACK_S = 2.0, 300.0


def engine_kill_lost() -> list[float]:
    """Return the samples lost or repeated over all kills."""
    return [float(_whole().lost_samples)]


def engine_kill_gap_s() -> list[float]:
    """Return a percentile of the gaps in seconds.

    Raises:
        BenchError: There is no GPU, or samples were lost, so that gaps say nothing.
    """
    # Torch is imported in any case, by `load`.
    import torch

    if not torch.cuda.is_available():
        raise BenchError("this figure is of engines on a GPU, and there is none.")
    drill = _whole()
    if drill.lost_samples:
        raise BenchError(f"{drill.lost_samples:,} samples were lost or repeated; a gap says nothing.")
    return [float(np.percentile(drill.gaps_s, PERCENTILE))]


@cache
def _whole() -> DrillResult:
    return run(STREAMS, KILLS)


def run(streams: int, kills: int, device: str = "auto") -> DrillResult:
    """Kill engines under live streams.

    Args:
        streams: Streams at a time.
        kills: Number of kills.
        device: Device of both engines; `auto` is the first GPU, or the CPU where there is none.

    Raises:
        BenchError: An engine did not come back.
    """
    if device == "auto":
        import torch

        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(MODEL, Path(folder) / MODEL).folder
        options = ["--device", f"{device},{device}", "--precision", "fp32", "--frontends", "1"]
        with running_server(bundle, options) as server:
            return asyncio.run(_EngineKills(bundle, server).run(streams, kills))


@final
class _EngineKills(StreamsUnderKills):
    def __init__(self, bundle: Path, server: ServerProcess) -> None:
        super().__init__(bundle, server.url)
        self._server = server

    async def kill(self, number: int) -> None:
        await self.recover()
        await asyncio.sleep(random.Random(number).uniform(0.2, PAUSE_S))
        roles = worker_pids(self._server.process.pid)
        engines = sorted(role for role in roles if role.startswith("engine"))
        os.kill(roles[engines[number % len(engines)]], signal.SIGKILL)
        self.killed()
        # Otherwise the next kill might find both there still, and leave none.
        await self._until_serving(1)

    async def recover(self) -> None:
        await self._until_serving(2)

    async def _until_serving(self, engines: int) -> None:
        end_s = time.monotonic() + BACK_S
        while await asyncio.to_thread(self._serving) != engines:
            if time.monotonic() > end_s:
                raise BenchError(f"{engines} engines were not there after {BACK_S:g} s; the server's log says why.")
            await asyncio.sleep(0.02)

    def _serving(self) -> int:
        with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=10) as response:
            text = response.read().decode()
        return int(float(text.split(f'penstock_engines{{app="{MODEL}"}} ')[1].split()[0]))

"""Live streams in real time over two engines, which are killed in turn: samples lost or repeated, and the gaps."""

import asyncio
import os
import random
import signal
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.models.murmur import CHUNK, RATE_HZ, SYMBOLS
from benchmarks.models.write import write_bundle
from penstock import AsyncClient
from penstock.bench.process_usage import worker_pids
from penstock.bench.server_process import ServerProcess, running_server
from penstock.client.stream import AsyncClientStream
from penstock.core.errors import BenchError, PenstockError
from penstock.core.spec import Array
from penstock.runtime.load import load

MODEL = "murmur"
STREAMS, KILLS, PERCENTILE = 200, 100, 98.0
# Each client sends signals of this length one after the other, in messages of four chunks.
SECONDS, MESSAGE = 10.0, 4 * CHUNK
SIGNALS = 16
# A kill comes so long at most after both engines serve.
PAUSE_S, BACK_S = 2.0, 300.0
# Of an output, beside the network over the whole signal in one piece.
TOLERANCE = 1e-3


@dataclass(slots=True)
class Drill:
    """Results of a run.

    Args:
        lost_samples: Samples whose results were missing, repeated, out of order or wrong.
        signals: Signals that were sent.
        gaps_s: For each kill and each stream, whether or not it was on that engine, the longest time from one result to
            the next until the next kill.
    """

    lost_samples: int = 0
    signals: int = 0
    gaps_s: list[float] = field(default_factory=list[float])


def engine_kill_lost() -> list[float]:
    """Return the samples lost or repeated over all kills."""
    return [float(_whole().lost_samples)]


def engine_kill_gap_s() -> list[float]:
    """Return a percentile of the gaps in seconds.

    Raises:
        BenchError: Samples were lost, so that gaps say nothing.
    """
    drill = _whole()
    if drill.lost_samples:
        raise BenchError(f"{drill.lost_samples:,} samples were lost or repeated; a gap says nothing.")
    return [float(np.percentile(drill.gaps_s, PERCENTILE))]


@cache
def _whole() -> Drill:
    return run(STREAMS, KILLS)


def run(streams: int, kills: int, device: str = "auto") -> Drill:
    """Kill engines under live streams.

    Args:
        streams: Streams at a time.
        kills: Number of kills.
        device: Device of both engines; `auto` is the first GPU, or the CPU where there is none.

    Raises:
        BenchError: An engine did not come back.
    """
    if device == "auto":
        # Torch is imported in any case, by `load`.
        import torch

        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(MODEL, Path(folder) / MODEL).folder
        rng = np.random.default_rng(1)
        signals = rng.normal(0, 3_000, (SIGNALS, int(SECONDS * RATE_HZ))).astype(np.int16)
        expected = load(bundle).predict(signals)
        options = ["--device", f"{device},{device}", "--precision", "fp32", "--frontends", "1"]
        with running_server(bundle, options) as server:
            return asyncio.run(_Run(server, signals, np.asarray(expected)).run(streams, kills))


class _Run:
    def __init__(self, server: ServerProcess, signals: Array, expected: Array) -> None:
        self._server, self._signals, self._expected = server, signals, expected
        self._drill = Drill()
        self._over = False
        self._killed_s: list[float] = []

    async def run(self, streams: int, kills: int) -> Drill:
        async with AsyncClient(self._server.url, retries=0) as client:
            clients = [asyncio.create_task(self._speak(client, index, streams)) for index in range(streams)]
            await asyncio.sleep(2.0)
            for number in range(kills):
                await self._kill(number)
            await self._all_engines()
            self._over = True
            await asyncio.gather(*clients)
        return self._drill

    async def _kill(self, number: int) -> None:
        await self._all_engines()
        await asyncio.sleep(random.Random(number).uniform(0.2, PAUSE_S))
        roles = worker_pids(self._server.process.pid)
        engines = sorted(role for role in roles if role.startswith("engine"))
        os.kill(roles[engines[number % len(engines)]], signal.SIGKILL)
        self._killed_s.append(time.monotonic())
        # Otherwise the next kill might find both there still, and leave none.
        await self._until_serving(1)

    async def _all_engines(self) -> None:
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

    async def _speak(self, client: AsyncClient, index: int, streams: int) -> None:
        # All at moments of their own.
        await asyncio.sleep(index / streams * MESSAGE / RATE_HZ)
        number = index
        while not self._over:
            which = number % SIGNALS
            number += streams
            self._drill.signals += 1
            signal_T, expected_U = self._signals[which], self._expected[which]
            heard: list[Array] = []
            try:
                async with await client.stream(MODEL, events="binary") as stream:
                    sending = asyncio.create_task(_send(stream, signal_T))
                    await self._hear(stream, heard)
                    await sending
            except PenstockError:
                # What had no result is lost.
                self._drill.lost_samples += signal_T.size - sum(part.shape[0] for part in heard) * CHUNK
                continue
            outputs_U = np.concatenate(heard)
            wrong = outputs_U.shape != expected_U.shape
            if wrong or np.abs(outputs_U - expected_U).max() > TOLERANCE:
                self._drill.lost_samples += signal_T.size

    async def _hear(self, stream: AsyncClientStream, heard: list[Array]) -> None:
        last_s, next_seq, begun_s = time.monotonic(), 0, time.monotonic()
        longest_s: dict[float, float] = {}
        async for result in stream:
            now_s = time.monotonic()
            killed_s = self._killed_s[-1] if self._killed_s else 0.0
            if killed_s > begun_s:
                longest_s[killed_s] = max(longest_s.get(killed_s, 0.0), now_s - last_s)
            if result.seq != next_seq:
                self._drill.lost_samples += abs(result.seq - next_seq) * MESSAGE
            next_seq, last_s = result.seq + 1, now_s
            if result.output is not None:
                heard.append(result.output.reshape(-1, SYMBOLS))
        self._drill.gaps_s += longest_s.values()


async def _send(stream: AsyncClientStream, signal_T: Array) -> None:
    start_s = time.monotonic()
    for at in range(0, signal_T.size, MESSAGE):
        await asyncio.sleep(max(0.0, start_s + at / RATE_HZ - time.monotonic()))
        await stream.send(signal_T[at : at + MESSAGE])
    # The results are read elsewhere.
    await stream.end()

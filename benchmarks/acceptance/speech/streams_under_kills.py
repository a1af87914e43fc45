"""Live streams in real time while processes behind them are killed: samples lost or repeated, and the gaps."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.models.murmur import CHUNK, RATE_HZ, SYMBOLS
from penstock import AsyncClient, Reconnect
from penstock.client.stream import AsyncClientStream
from penstock.core.errors import PenstockError
from penstock.core.spec import Array
from penstock.runtime.load import load

log = logging.getLogger(__name__)

MODEL = "murmur"
# Each client sends signals of this length one after the other, in messages of four chunks.
SECONDS, MESSAGE = 10.0, 4 * CHUNK
SIGNALS = 16
# Streams are there before the first kill.
BEGIN_S = 2.0
# Of the opening of a stream that reconnects.
RETRIES = 3
# Of an output, beside the network over the whole signal in one piece.
TOLERANCE = 1e-3


@dataclass(slots=True)
class DrillResult:
    """Results of a run.

    Args:
        lost_samples: Samples whose results were missing, repeated, out of order or wrong.
        signals: Signals that were sent.
        gaps_s: For each kill and each stream, whether or not the kill concerned it, the longest time from one result to
            the next until the next kill.
    """

    lost_samples: int = 0
    signals: int = 0
    gaps_s: list[float] = field(default_factory=list[float])


class StreamsUnderKills(ABC):
    """Streams of MODEL that are sent until all kills are done, and compared with the network itself.

    Args:
        bundle: The bundle that is served.
        url: Where.
        reconnect: Whether and how a stream goes on after its connection.
    """

    def __init__(self, bundle: Path, url: str, reconnect: Reconnect | None = None) -> None:
        rng = np.random.default_rng(1)
        self._url, self._reconnect = url, reconnect
        self._signals = rng.normal(0, 3_000, (SIGNALS, int(SECONDS * RATE_HZ))).astype(np.int16)
        self._expected = np.asarray(load(bundle).predict(self._signals))
        self._result = DrillResult()
        self._over = False
        self._killed_s: list[float] = []

    @abstractmethod
    async def kill(self, number: int) -> None:
        """Kill something, call `killed` then, and return when the next kill may come."""

    @abstractmethod
    async def recover(self) -> None:
        """Wait until all that was killed is there again."""

    def killed(self) -> None:
        """Note that something was killed just now."""
        self._killed_s.append(time.monotonic())

    async def run(self, streams: int, kills: int) -> DrillResult:
        """Run it.

        Args:
            streams: Streams at a time.
            kills: Number of kills.
        """
        # A stream whose server is killed while it begins is begun again, as by default.
        retries = 0 if self._reconnect is None else RETRIES
        async with AsyncClient(self._url, retries=retries) as client:
            clients = [asyncio.create_task(self._speak(client, index, streams)) for index in range(streams)]
            await asyncio.sleep(BEGIN_S)
            for number in range(kills):
                await self.kill(number)
            await self.recover()
            self._over = True
            await asyncio.gather(*clients)
        return self._result

    async def _speak(self, client: AsyncClient, index: int, streams: int) -> None:
        # All at moments of their own.
        await asyncio.sleep(index / streams * MESSAGE / RATE_HZ)
        number = index
        while not self._over:
            which = number % SIGNALS
            number += streams
            self._result.signals += 1
            signal_T, expected_U = self._signals[which], self._expected[which]
            heard: list[Array] = []
            try:
                async with await client.stream(MODEL, events="binary", reconnect=self._reconnect) as stream:
                    sending = asyncio.create_task(_send(stream, signal_T))
                    await self._hear(stream, heard)
                    await sending
            except PenstockError as error:
                log.warning("a stream ended early: %s", error)
                # What had no result is lost.
                self._result.lost_samples += signal_T.size - sum(part.shape[0] for part in heard) * CHUNK
                continue
            outputs_U = np.concatenate(heard)
            wrong = outputs_U.shape != expected_U.shape
            if wrong or np.abs(outputs_U - expected_U).max() > TOLERANCE:
                log.warning("the results of a stream are wrong: %s instead of %s", outputs_U.shape, expected_U.shape)
                self._result.lost_samples += signal_T.size

    async def _hear(self, stream: AsyncClientStream, heard: list[Array]) -> None:
        last_s, next_seq, begun_s = time.monotonic(), 0, time.monotonic()
        longest_s: dict[float, float] = {}
        async for result in stream:
            now_s = time.monotonic()
            killed_s = self._killed_s[-1] if self._killed_s else 0.0
            if killed_s > begun_s:
                longest_s[killed_s] = max(longest_s.get(killed_s, 0.0), now_s - last_s)
            if result.seq != next_seq:
                self._result.lost_samples += abs(result.seq - next_seq) * MESSAGE
            next_seq, last_s = result.seq + 1, now_s
            if result.output is not None:
                heard.append(result.output.reshape(-1, SYMBOLS))
        self._result.gaps_s += longest_s.values()


async def _send(stream: AsyncClientStream, signal_T: Array) -> None:
    start_s = time.monotonic()
    for at in range(0, signal_T.size, MESSAGE):
        await asyncio.sleep(max(0.0, start_s + at / RATE_HZ - time.monotonic()))
        await stream.send(signal_T[at : at + MESSAGE])
    # The results are read elsewhere.
    await stream.end()

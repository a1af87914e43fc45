"""Processor time of a front-end for live streams that get tickets, over that for streams that get none."""

import asyncio
import os
import tempfile
from pathlib import Path

from benchmarks.acceptance.speech.adapter_cost import live_cost, on_cores, talk
from benchmarks.acceptance.streams.core_capacity import split_cores
from benchmarks.models.ponder import STATE_BYTES
from benchmarks.models.write import write_bundle
from penstock.bench.process_usage import worker_pids
from penstock.bench.server_process import running_server
from penstock.core.errors import BenchError

MODEL = "ponder"
REPEAT, TICKET_S = 5, 5.0
STATE_KB = STATE_BYTES / 1e3


def ticket_ratios() -> list[float]:
    """Return the ratio for each repetition.

    The engine has a process of its own, which is not counted, and chunks are kept for another one. Streams with tickets
    and without are run in turn, on the same server. The clients have another core.

    Raises:
        BenchError: There is one core alone, a client heard other words than another, or no tickets came.
    """
    server_core, others = split_cores()
    with on_cores(others), tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(MODEL, Path(folder) / MODEL).folder
        key = Path(folder) / "key"
        key.write_text(os.urandom(32).hex())
        options = ["--frontends", "1", "--latency-ms", "200", "--ticket-key", str(key), "--ticket-s", f"{TICKET_S:g}"]
        with running_server(bundle, options, cpus=frozenset((server_core,))) as server:
            pids = worker_pids(server.process.pid)
            (front_end,) = [pid for role, pid in pids.items() if role.startswith("front-end")]
            url = server.url.replace("http", "ws", 1)
            return [_ratio(url, front_end) for _ in range(REPEAT)]


def _ratio(url: str, front_end: int) -> float:
    with_s, without_s = (asyncio.run(live_cost(url, front_end, speak)) for speak in (_speak_ticketed, _speak_plain))
    return with_s / without_s


async def _speak_ticketed(url: str, chunks: list[bytes], start_s: float) -> list[str]:
    return await _speak(url, chunks, start_s, '{"type":"start","tickets":true}')


async def _speak_plain(url: str, chunks: list[bytes], start_s: float) -> list[str]:
    return await _speak(url, chunks, start_s, '{"type":"start"}')


async def _speak(url: str, chunks: list[bytes], start_s: float, start: str) -> list[str]:
    numbered: list[bytes | str] = [index.to_bytes(4, "little") + chunk for index, chunk in enumerate(chunks)]
    said = await talk(f"{url}/v1/apps/{MODEL}/stream", numbered, start_s, first=[start], last=['{"type":"end"}'])
    tickets = sum(each["type"] == "ticket" for each in said)
    if bool(tickets) != ("tickets" in start):
        raise BenchError(f"a stream that began with {start} got {tickets} tickets.")
    return [word["word"] for each in said if each.get("event") for word in each["event"]["words"]]

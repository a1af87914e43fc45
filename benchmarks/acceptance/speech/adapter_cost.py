"""Processor time of a front-end for a second of sound through other services' protocols, over that through our own."""

import asyncio
import base64
import binascii
import json
import os
import statistics
import tempfile
import time
import urllib.request
import wave
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.acceptance.streams.core_capacity import split_cores
from benchmarks.models.mutter import CHUNK, FRAME_S, FRAMES_A_WORD, RATE_HZ
from benchmarks.models.write import write_bundle
from penstock.bench.process_usage import worker_pids
from penstock.bench.server_process import cpu_seconds, running_server
from penstock.core.errors import BenchError
from penstock.core.spec import Array

MODEL = "mutter"
STREAMS, REPEAT, SECONDS, WARM_UP_S = 64, 5, 10.0, 2.0
# Of recordings, one after the other.
RECORDINGS, RECORDING_S = 60, 10.0
CHUNK_S = CHUNK / RATE_HZ
LISTEN = f"/v1/listen?model={MODEL}&encoding=linear16&sample_rate={RATE_HZ}&interim_results=true"
REALTIME = f"/v1/realtime?intent=transcription&model={MODEL}"
BOUNDARY = "bench"
SESSION = {
    "type": "session.update",
    "session": {
        "type": "transcription",
        "audio": {"input": {"format": {"type": "audio/pcm", "rate": RATE_HZ}, "turn_detection": None}},
    },
}

# Sends a whole signal in real time, and returns the words that came.
Speak = Callable[[str, list[bytes], float], Coroutine[Any, Any, list[str]]]


def adapter_ratios() -> list[float]:
    """Return the largest of the ratios of the three protocols, for each repetition.

    The engine has a process of its own, which is not counted. Sound is of the network's rate, so that nothing is
    resampled; the time to decode base64, measured beside it, is taken off. The clients have another core.

    Raises:
        BenchError: There is one core alone, or a client heard other words than another.
    """
    server_core, others = split_cores()
    with on_cores(others), tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(MODEL, Path(folder) / MODEL).folder
        options = ["--frontends", "1", "--latency-ms", "200", "--replay-s", "0"]
        with running_server(bundle, options, cpus=frozenset((server_core,))) as server:
            pids = worker_pids(server.process.pid)
            (front_end,) = [pid for role, pid in pids.items() if role.startswith("front-end")]
            return [max(_ratios(server.url, front_end)) for _ in range(REPEAT)]


@contextmanager
def on_cores(cores: frozenset[int]) -> Generator[None]:
    """Run the block on some cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _ratios(url: str, front_end: int) -> list[float]:
    own, listen, realtime = (
        asyncio.run(live_cost(url.replace("http", "ws", 1), front_end, speak))
        for speak in (_speak_own, _speak_listen, _speak_realtime)
    )
    realtime -= _base64_cost()
    body = _wav()
    form = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    plain_s, heard = _recording_cost(f"{url}/v1/apps/{MODEL}", body, {"Content-Type": "audio/wav"}, front_end)
    said_s, text = _recording_cost(f"{url}/v1/audio/transcriptions", _form(body), form, front_end)
    words = [word["word"] for event in heard["events"] for word in event["words"]]
    if " ".join(words) != text["text"] or len(words) != int(RECORDING_S / FRAME_S) // FRAMES_A_WORD:
        raise BenchError(f"the two forms of a recording gave other words: {words} and {text['text']!r}.")
    return [listen / own, realtime / own, said_s / plain_s]


async def live_cost(url: str, front_end: int, speak: Speak) -> float:
    """Measure the processor time of a front-end for a second of sound of one stream, in seconds.

    Args:
        url: The server's, of WebSockets.
        front_end: Its process.
        speak: Runs one stream.

    Raises:
        BenchError: A stream heard fewer or more words than were said.
    """
    rng = np.random.default_rng(1)
    seconds = WARM_UP_S + SECONDS + WARM_UP_S
    chunks = [
        [chunk_T.tobytes() for chunk_T in _sound(rng, round(seconds / CHUNK_S) * CHUNK).reshape(-1, CHUNK)]
        for _ in range(STREAMS)
    ]
    begin_s = time.monotonic() + 1.0
    starts_s = [begin_s + CHUNK_S * index / STREAMS for index in range(STREAMS)]
    streams = [asyncio.create_task(speak(url, *each)) for each in zip(chunks, starts_s, strict=True)]
    await asyncio.sleep(begin_s + WARM_UP_S - time.monotonic())
    before_s, from_s = cpu_seconds(front_end), time.monotonic()
    await asyncio.sleep(SECONDS)
    cost_s, passed_s = cpu_seconds(front_end) - before_s, time.monotonic() - from_s
    expected = round(seconds / FRAME_S) // FRAMES_A_WORD
    for words in await asyncio.gather(*streams):
        if len(words) != expected:
            raise BenchError(f"a stream heard {len(words)} words and not {expected}; its protocol lost some.")
    return cost_s / passed_s / STREAMS


async def _paced(
    stream: ClientConnection, messages: list[bytes | str], start_s: float, last: list[bytes | str]
) -> None:
    for index, message in enumerate(messages):
        await asyncio.sleep(start_s + index * CHUNK_S - time.monotonic())
        await stream.send(message)
    for message in last:
        await stream.send(message)


async def talk(
    url: str,
    messages: list[bytes | str],
    start_s: float,
    *,
    first: list[bytes | str],
    last: list[bytes | str],
) -> list[dict[str, Any]]:
    """Say all in real time; returns the messages of the server until it closes, or has answered a commit.

    Args:
        url: Of the stream.
        messages: The chunks, as messages.
        start_s: When the first one is due.
        first: Messages before them.
        last: Messages behind them.
    """
    said: list[dict[str, Any]] = []
    async with connect(url, compression=None) as stream:
        for message in first:
            await stream.send(message)
        sending = asyncio.create_task(_paced(stream, messages, start_s, last))
        async for message in stream:
            said.append(json.loads(message))
            if said[-1]["type"].endswith(".completed"):
                break
        await sending
    return said


async def _speak_own(url: str, chunks: list[bytes], start_s: float) -> list[str]:
    numbered: list[bytes | str] = [index.to_bytes(4, "little") + chunk for index, chunk in enumerate(chunks)]
    first: list[bytes | str] = ['{"type":"start"}']
    said = await talk(f"{url}/v1/apps/{MODEL}/stream", numbered, start_s, first=first, last=['{"type":"end"}'])
    return [word["word"] for each in said if each.get("event") for word in each["event"]["words"]]


async def _speak_listen(url: str, chunks: list[bytes], start_s: float) -> list[str]:
    said = await talk(f"{url}{LISTEN}", [*chunks], start_s, first=[], last=['{"type":"CloseStream"}'])
    finals = [each["channel"]["alternatives"][0] for each in said if each.get("is_final")]
    return [word["word"] for each in finals for word in each["words"]]


async def _speak_realtime(url: str, chunks: list[bytes], start_s: float) -> list[str]:
    messages: list[bytes | str] = [_append(chunk) for chunk in chunks]
    commit = json.dumps({"type": "input_audio_buffer.commit"})
    said = await talk(f"{url}{REALTIME}", messages, start_s, first=[json.dumps(SESSION)], last=[commit])
    return said[-1]["transcript"].split()


def _append(chunk: bytes) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(chunk).decode()})


def _base64_cost() -> float:
    """Time to decode the base64 of a second of sound, in seconds."""
    text = base64.b64encode(bytes(2 * CHUNK)).decode()
    times_s: list[float] = []
    for _ in range(2_000):
        begin_s = time.perf_counter()
        binascii.a2b_base64(text, strict_mode=True)
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s) / CHUNK_S


def _recording_cost(url: str, body: bytes, headers: dict[str, str], front_end: int) -> tuple[float, dict[str, Any]]:
    """Processor time of the front-end for a second of recordings, in seconds; and the last answer."""
    answer: dict[str, Any] = {}
    before_s = cpu_seconds(front_end)
    for _ in range(RECORDINGS):
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
            answer = json.load(response)
    return (cpu_seconds(front_end) - before_s) / RECORDINGS / RECORDING_S, answer


def _sound(rng: np.random.Generator, frames: int) -> Array:
    return rng.normal(0, 3_000, frames).astype(np.int16)


def _wav() -> bytes:
    file = BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE_HZ)
        out.writeframes(_sound(np.random.default_rng(2), int(RECORDING_S * RATE_HZ)).tobytes())
    return file.getvalue()


def _form(body: bytes) -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="said.wav"\r\n\r\n'.encode()
    return head + body + f"\r\n--{BOUNDARY}--\r\n".encode()

"""Drills of SIGTERM under full load: every accepted request must reach its client."""

import asyncio
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.acceptance.train.training_run import trained
from penstock.bench.load.golden_target import golden_target
from penstock.bench.load.sender import Target
from penstock.bench.server_process import running_server
from penstock.core.errors import BenchError

DRILLS = 20
CONNECTIONS = 64
LOAD_S = 1.0
DRAIN_LIMIT_S = 30.0


@dataclass(slots=True)
class _DrillCounts:
    """Answers that the clients of one drill received."""

    answered: int = 0
    truncated: int = 0


def lost() -> list[float]:
    """Return the accepted requests that were lost in each of 20 drills, with one process and with front-ends in turn.

    Raises:
        BenchError: A drill had no load, or the server did not end.
    """
    with trained("digits", "--epochs", "1") as run:
        return [float(_drill(run.bundle, frontends=index % 2 * 2)) for index in range(DRILLS)]


def _drill(bundle: Path, *, frontends: int) -> int:
    with running_server(bundle, ["--verbose", "--latency-ms", "1000", "--frontends", str(frontends)]) as server:
        target = golden_target(server.url, bundle)
        counts = asyncio.run(_run_clients(target, server.process))
        if server.process.wait(DRAIN_LIMIT_S) != 0:
            raise BenchError(f"the server ended with status {server.process.returncode}.")
        drained = sum(map(int, re.findall(r"drained; (\d+) requests", server.log_text())))
    if counts.answered < CONNECTIONS:
        raise BenchError(f"the drill had no load: {counts.answered} answers.")
    # Answers that no client received, and truncated ones.
    return drained - counts.answered + counts.truncated


async def _run_clients(target: Target, process: subprocess.Popen[str]) -> _DrillCounts:
    counts = _DrillCounts()
    clients = [asyncio.create_task(_client(target, counts)) for _ in range(CONNECTIONS)]
    await asyncio.sleep(LOAD_S)
    process.send_signal(signal.SIGTERM)
    end_s = time.monotonic() + DRAIN_LIMIT_S
    while process.poll() is None and time.monotonic() < end_s:
        await asyncio.sleep(0.02)
    await asyncio.gather(*clients)
    return counts


async def _client(target: Target, counts: _DrillCounts) -> None:
    while True:
        try:
            reader, writer = await asyncio.open_connection(target.host, target.port)
        except ConnectionError:
            return
        try:
            while await _request(target.requests[counts.answered % len(target.requests)], reader, writer, counts):
                pass
        except ConnectionError:
            pass  # closed before the request was read; otherwise the server's count differs
        finally:
            writer.close()


async def _request(
    request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: _DrillCounts
) -> bool:
    """Send one request; return whether the connection stays open."""
    writer.write(request)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\nContent-Length: (\d+)", head)
        assert length is not None, head
        await reader.readexactly(int(length[1]))
    except asyncio.IncompleteReadError as error:
        counts.truncated += bool(error.partial)
        return False
    counts.answered += head.startswith(b"HTTP/1.1 200 ")
    return b"Connection: close" not in head

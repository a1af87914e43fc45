"""Drills of SIGTERM under full load: whatever a server accepted must reach its client."""

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.client import Target
from penstock.bench.startup import trained_digits
from penstock.bench.target import golden_target
from penstock.core.errors import BenchError

DRILLS = 20
CONNECTIONS = 64
LOADED_S = 1.0
ENDS_S = 30.0


@dataclass(slots=True)
class _Seen:
    """What the clients of one drill got."""

    answered: int = 0
    refused: int = 0
    cut: int = 0


def lost() -> list[float]:
    """Accepted requests that were lost, of each of 20 drills, with one process and with front-ends in turn.

    Raises:
        BenchError: A drill had no load, or the server did not end.
    """
    with trained_digits() as bundle:
        return [float(_drill(bundle, frontends=index % 2 * 2)) for index in range(DRILLS)]


def _drill(bundle: Path, *, frontends: int) -> int:
    options = ["--port", "0", "--verbose", "--latency-ms", "1000", "--frontends", str(frontends)]
    command = [sys.executable, "-m", "penstock", "serve", str(bundle), *options]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        said = process.stdout.readline()
        if "http://" not in said:
            raise BenchError(f"the server did not start: {said!r}.")
        target = golden_target(said.split()[-1], bundle)
        try:
            seen = asyncio.run(_clients(target, process))
            if process.wait(ENDS_S) != 0:
                raise BenchError(f"the server ended with status {process.returncode}.")
        finally:
            process.kill()
        log.seek(0)
        counted = sum(map(int, re.findall(r"drained; (\d+) requests", log.read())))
    if seen.answered < CONNECTIONS:
        raise BenchError(f"the drill had no load: {seen.answered} answers.")
    # What the server answered and no client got, and answers that were cut off.
    return counted - seen.answered + seen.cut


async def _clients(target: Target, process: subprocess.Popen[str]) -> _Seen:
    seen = _Seen()
    clients = [asyncio.create_task(_client(target, seen)) for _ in range(CONNECTIONS)]
    await asyncio.sleep(LOADED_S)
    process.send_signal(signal.SIGTERM)
    end_s = time.monotonic() + ENDS_S
    while process.poll() is None and time.monotonic() < end_s:
        await asyncio.sleep(0.02)
    await asyncio.gather(*clients)
    return seen


async def _client(target: Target, seen: _Seen) -> None:
    while True:
        try:
            reader, writer = await asyncio.open_connection(target.host, target.port)
        except ConnectionError:
            return
        try:
            while await _asked(target.requests[seen.answered % len(target.requests)], reader, writer, seen):
                pass
        except ConnectionError:
            pass  # closed before the request was read; the server's count tells if that is not so
        finally:
            writer.close()


async def _asked(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: _Seen) -> bool:
    """One request; gives whether the connection stays."""
    writer.write(request)
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\nContent-Length: (\d+)", head)
        assert length is not None, head
        await reader.readexactly(int(length[1]))
    except asyncio.IncompleteReadError as error:
        seen.cut += bool(error.partial)
        return False
    if head.startswith(b"HTTP/1.1 200 "):
        seen.answered += 1
    else:
        seen.refused += 1
    return b"Connection: close" not in head

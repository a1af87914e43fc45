"""Live streams over three servers behind HAProxy, which are killed in turn, of clients that reconnect."""

import asyncio
import os
import random
import tempfile
from pathlib import Path
from typing import final

from benchmarks.acceptance.fleet.routing_proxies import HAPROXY, running_proxy
from benchmarks.acceptance.fleet.routing_servers import RoutedServers, free_ports, routed_servers
from benchmarks.acceptance.speech.streams_under_kills import MODEL, SECONDS, DrillResult, StreamsUnderKills
from benchmarks.models.murmur import RATE_HZ
from benchmarks.models.write import write_bundle
from penstock import Reconnect

SERVERS = 3
STREAMS, KILLS = 200, 100
# A kill comes so long at most after all servers serve.
PAUSE_S = 2.0
# Time in which HAProxy finds that a server is there again.
SEEN_S = 1.0
# With tickets, a client keeps half of a signal at most, so that most streams can only go on with one.
TICKET_S, TICKETED_BYTES = 1.0, int(SECONDS * RATE_HZ)


def server_kill_lost() -> list[float]:
    """Return the samples lost or repeated over all kills."""
    return [float(run(STREAMS, KILLS).lost_samples)]


def run(streams: int, kills: int, reconnect: Reconnect | None = None, *, tickets: bool = False) -> DrillResult:
    """Kill servers under live streams.

    Args:
        streams: Streams at a time.
        kills: Number of kills.
        reconnect: How the streams go on; by default as the client's defaults say, with tickets after fewer bytes.
        tickets: Whether the servers give tickets.

    Raises:
        BenchError: HAProxy is not installed, or a server did not start again.
    """
    with tempfile.TemporaryDirectory() as folder:
        bundle = write_bundle(MODEL, Path(folder) / MODEL).folder
        options = ("--device", "cpu", "--precision", "fp32", "--frontends", "1")
        if tickets:
            key = Path(folder) / "key"
            key.write_text(os.urandom(32).hex())
            options = (*options, "--ticket-key", str(key), "--ticket-s", f"{TICKET_S:g}")
            reconnect = reconnect or Reconnect(kept_bytes=TICKETED_BYTES)
        with (
            routed_servers(bundle, options, (0.0,) * SERVERS) as servers,
            running_proxy(HAPROXY, free_ports(1)[0], servers.backends) as url,
        ):
            return asyncio.run(_ServerKills(bundle, url, servers, reconnect or Reconnect()).run(streams, kills))


@final
class _ServerKills(StreamsUnderKills):
    def __init__(self, bundle: Path, url: str, servers: RoutedServers, reconnect: Reconnect) -> None:
        super().__init__(bundle, url, reconnect)
        self._servers = servers

    async def kill(self, number: int) -> None:
        await asyncio.sleep(random.Random(number).uniform(0.2, PAUSE_S))
        index = number % SERVERS
        self.killed()
        await asyncio.to_thread(self._servers.kill, index)
        await asyncio.to_thread(self._servers.start, index)
        await asyncio.sleep(SEEN_S)

    async def recover(self) -> None:
        # The last kill has waited for it.
        pass

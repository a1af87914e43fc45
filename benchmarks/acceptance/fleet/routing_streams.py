"""Live streams through a proxy while the servers behind it leave and end."""

import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from benchmarks.acceptance.fleet.routing_proxies import PROXIES, running_proxy
from benchmarks.acceptance.fleet.routing_servers import RoutedServers, free_ports, routed_servers
from penstock.core.errors import BenchError
from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle

STREAMS = 200
SERVERS = 2
LEAVE_S = 8.0
OPEN_S = 120.0
CHUNK_SAMPLES = 320
DONE, RESTART = 1000, 1012
START, END = '{"type":"start"}', '{"type":"end"}'

APPLICATION = f"""
from penstock import Application, Live, TensorSpec


def network():
    import torch
    from penstock.nn import GRU, CausalConv1d, LogMel, Sequential

    torch.manual_seed(5)
    return Sequential(LogMel(8000, bands=8), CausalConv1d(8, 8, 3, 2), GRU(8, 16), torch.nn.Linear(16, 2))


app = Application(
    name="hark",
    input=TensorSpec(dtype="int16", shape=({CHUNK_SAMPLES},), meaning="sound", units="PCM at 8 kHz", name="sound"),
    output=TensorSpec(dtype="float32", shape=(2, 2), meaning="scores", name="scores"),
    live=Live(rate_hz=8000),
    chunks=4,
    model=network,
)
"""


def unfinished(streams: int = STREAMS) -> list[float]:
    """Return the streams that ended in another way than they should, for each proxy.

    Args:
        streams: Streams that are open when the restarts begin. Every second one ends by itself while its server leaves.

    Raises:
        BenchError: A proxy is not installed, or streams did not open.
    """
    return [float(unfinished_behind(proxy, streams)) for proxy in PROXIES]


def unfinished_behind(proxy: str, streams: int) -> int:
    """Return the streams behind one proxy that ended in another way than they should."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = _bundle(Path(folder))
        options = ("--latency-ms", "5000", "--leave-s", str(LEAVE_S), "--max-connections", "1000")
        with (
            routed_servers(bundle, options, (0.0,) * SERVERS) as servers,
            running_proxy(proxy, free_ports(1)[0], servers.backends) as url,
        ):
            return streams - _drill(servers, f"{url.replace('http', 'ws', 1)}/v1/apps/hark/stream", streams)


def _drill(servers: RoutedServers, address: str, streams: int) -> int:
    """Let every server leave; return the streams that ended as they should."""
    opened = threading.Barrier(streams + 1)
    leaving = threading.Event()

    def stream(index: int) -> bool:
        with connect(address, open_timeout=OPEN_S, ping_interval=None) as connection:
            _speak(connection)
            opened.wait(OPEN_S)
            leaving.wait()
            if index % 2:
                return _ended_by_itself(connection)
            return _ended_by_restart(connection)

    with ThreadPoolExecutor(streams) as pool:
        ends = [pool.submit(stream, index) for index in range(streams)]
        try:
            opened.wait(OPEN_S)
        except threading.BrokenBarrierError:
            raise BenchError(f"{streams} streams did not open within {OPEN_S:g} s.") from None
        # All servers leave at once: no stream could move to another one.
        for index in range(SERVERS):
            servers.process(index).process.terminate()
        leaving.set()
        return sum(end.result() for end in ends)


def _speak(connection: ClientConnection) -> None:
    connection.send(START)
    assert '"ready"' in str(connection.recv(timeout=OPEN_S))
    connection.send(b"\0\0\0\0" + bytes(2 * CHUNK_SAMPLES))


def _ended_by_itself(connection: ClientConnection) -> bool:
    connection.send(END)
    said = _said(connection)
    return bool(said) and said[-1].startswith('{"type":"end"') and connection.close_code == DONE


def _ended_by_restart(connection: ClientConnection) -> bool:
    said = _said(connection)
    return bool(said) and '"last":true' in said[-1] and connection.close_code == RESTART


def _said(connection: ClientConnection) -> list[str]:
    said: list[str] = []
    with suppress(ConnectionClosed):
        said.extend(str(message) for message in connection)
    return said


def _bundle(folder: Path) -> Path:
    (folder / "app.py").write_text(APPLICATION)
    found = find_application(str(folder / "app.py"))
    sounds = np.random.default_rng(2).normal(0, 300, (2, 1000)).astype(np.int16)
    Bundle.write(found, found.model(), sounds, to=folder / "bundle")
    return folder / "bundle"

"""How long others wait beside clients that take more than their share."""

import http.client
import statistics
import time

from tests.support.serving import RunningServer

ASK = "/v1/apps/doubler"
JSON = {"Content-Type": "application/json"}


def median_latency_s(server: RunningServer, seconds: float) -> float:
    """Median latency of one client that sends one request after the other on one connection."""
    latencies_s: list[float] = []
    client = http.client.HTTPConnection(server.host, server.port, timeout=20)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        start_s = time.monotonic()
        client.request("POST", ASK, b"[1, 2, 3, 4]", JSON)
        assert client.getresponse().read() == b'{"doubled":[2.0,4.0,6.0,8.0]}'
        latencies_s.append(time.monotonic() - start_s)
    client.close()
    return statistics.median(latencies_s)

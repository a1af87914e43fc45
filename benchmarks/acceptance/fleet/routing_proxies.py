"""HAProxy and Envoy with the configurations of `deploy/`, before servers on this machine."""

import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.acceptance.report.results import ROOT
from penstock.core.errors import BenchError

HAPROXY, ENVOY = "haproxy", "envoy"
PROXIES = (HAPROXY, ENVOY)
DEPLOY = ROOT / "deploy"
# Where `make fleet` installs what Debian does not have.
FLEET = ROOT / ".fleet"
# What the policy by predicted finish adds to HAProxy's configuration.
FINISH_LINES = r"(?m)^    (lua-load|http-re\w+ lua\.|use-server|http-request set-header endpoint-load).*\n"
READY_S = 20.0
STOP_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A server behind a proxy.

    Args:
        port: Its port of HTTP.
        agent_port: Its port of agent checks.
        grpc_port: Its port of gRPC; 0 where it has none.
    """

    port: int
    agent_port: int
    grpc_port: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Differences from the configuration in `deploy/`, for comparisons.

    Args:
        load_report: Whether servers are weighed by their load reports; otherwise each gets every n-th request.
        predicted_finish: Whether HAProxy takes the sooner one of two servers, where there are load reports.
        second_attempts: Whether a refused request is sent to another server.
        fewest_connections: Whether the server with the fewest connections gets the next request.
    """

    load_report: bool = True
    predicted_finish: bool = True
    second_attempts: bool = True
    fewest_connections: bool = False


AS_DEPLOYED = Changes()


def find_program(name: str) -> str | None:
    """Find a proxy's program; None where it is not installed."""
    return shutil.which(name, path=f"{FLEET / 'bin'}:{os.environ.get('PATH', os.defpath)}:/usr/sbin")


def haproxy_config(port: int, backends: Sequence[Backend], changes: Changes = AS_DEPLOYED) -> str:
    """Return deploy/haproxy.cfg with other addresses."""
    text = (DEPLOY / "haproxy.cfg").read_text().replace("bind :8080", f"bind 127.0.0.1:{port}")
    servers = [
        f"    server s{number} 127.0.0.1:{each.port} agent-port {each.agent_port}"
        for number, each in enumerate(backends, 1)
    ]
    text = re.sub(r"(    server s.*\n)+", "\n".join(servers) + "\n", text)
    # With one core less for the proxy, a machine of two has one for the servers.
    text = text.replace("global\n", "global\n    nbthread 1\n")
    text = text.replace("lua-load deploy", f"lua-load {DEPLOY}")
    if not changes.load_report:
        text = re.sub(r" agent-(check|inter \S+|port \S+)", "", text)
    if changes.fewest_connections or not (changes.load_report and changes.predicted_finish):
        text = re.sub(FINISH_LINES, "", text)
    if not changes.second_attempts:
        text = text.replace("retry-on conn-failure empty-response 503", "retry-on conn-failure empty-response")
    if changes.fewest_connections:
        text = text.replace("balance roundrobin", "balance leastconn")
    return text


def envoy_config(port: int, backends: Sequence[Backend], changes: Changes = AS_DEPLOYED) -> str:
    """Return deploy/envoy.yaml with other addresses."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "envoy.yaml").read_text())["static_resources"]
    (listener,) = config["listeners"]
    listener["address"] = _address(port)
    for cluster in config["clusters"]:
        endpoints = [_endpoint(each, grpc=cluster["name"] == "grpc") for each in backends]
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]
    weighed = [cluster for cluster in config["clusters"] if "load_balancing_policy" in cluster]
    if changes.fewest_connections or not changes.load_report:
        for cluster in weighed:
            del cluster["load_balancing_policy"]
            cluster["lb_policy"] = "LEAST_REQUEST" if changes.fewest_connections else "ROUND_ROBIN"
    if not changes.second_attempts:
        (chain,) = listener["filter_chains"]
        (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
        policy = host["routes"][-1]["route"]["retry_policy"]
        policy["retry_on"] = policy["retry_on"].replace(",retriable-status-codes", "")
    return yaml.safe_dump({"static_resources": config})


def _endpoint(backend: Backend, *, grpc: bool) -> dict[str, Any]:
    if not grpc:
        return {"endpoint": {"address": _address(backend.port)}}
    # Port 1, on which nothing listens, if the server has no gRPC port.
    checked = {"port_value": backend.port}
    return {"endpoint": {"address": _address(backend.grpc_port or 1), "health_check_config": checked}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def command_of(proxy: str, config: Path, *, check: bool = False) -> list[str]:
    """Return the command that runs a proxy, or only checks its configuration.

    Raises:
        BenchError: It is not installed.
    """
    program = find_program(proxy)
    if program is None:
        raise BenchError(f"there is no {proxy} here; 'make fleet' installs it.")
    if proxy == HAPROXY:
        return [program, "-db", *(("-c",) if check else ()), "-f", str(config)]
    mode = ("--mode", "validate") if check else ("--disable-hot-restart", "--concurrency", "1")
    return [program, "-c", str(config), "--log-level", "error", *mode]


@contextmanager
def running_proxy(proxy: str, port: int, backends: Sequence[Backend], changes: Changes = AS_DEPLOYED) -> Generator[str]:
    """Run a proxy before servers until the block ends; the block begins when it reaches one, with the proxy's URL.

    Raises:
        BenchError: It is not installed, or did not start.
    """
    write = haproxy_config if proxy == HAPROXY else envoy_config
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:
        config = Path(folder) / ("haproxy.cfg" if proxy == HAPROXY else "envoy.yaml")
        config.write_text(write(port, backends, changes))
        process = subprocess.Popen(command_of(proxy, config), stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _reaches(url, process):
                log.seek(0)
                raise BenchError(f"{proxy} did not start: {' '.join(log.read().split())[-300:]}")
            yield url
        finally:
            # HAProxy ends at once at SIGTERM, Envoy too.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()


def _reaches(url: str, process: "subprocess.Popen[bytes] | subprocess.Popen[str]") -> bool:
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s and process.poll() is None:
        with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/v2/health/ready", timeout=2):
            return True
        time.sleep(0.05)
    return False

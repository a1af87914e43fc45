"""The configurations of proxies, without the proxies."""

import re
from typing import Any

import pytest
import typer.main
import yaml

from benchmarks.acceptance.fleet import routing_proxies
from benchmarks.acceptance.fleet.routing_proxies import (
    DEPLOY,
    PROXIES,
    Backend,
    Changes,
    command_of,
    envoy_config,
    haproxy_config,
)
from penstock.cli import build
from penstock.core.errors import BenchError

BACKENDS = [Backend(port=7001, agent_port=7101, grpc_port=7201), Backend(port=7002, agent_port=7102, grpc_port=7202)]
HAPROXY_TEXT, ENVOY_TEXT = ((DEPLOY / name).read_text() for name in ("haproxy.cfg", "envoy.yaml"))


@pytest.mark.parametrize("text", [HAPROXY_TEXT, ENVOY_TEXT])
def test_the_command_at_the_top_is_read_as_it_is_meant(text: str) -> None:
    found = re.search(r"penstock serve (BUNDLE.*?)(  |\n)", text)
    assert found is not None
    serve: Any = typer.main.get_command(build())
    parsed = serve.commands["serve"].make_context("serve", found[1].split()).params
    # Longer than probes need to take a server out.
    assert parsed["leave_s"] >= 5


def test_haproxy_takes_a_server_out_before_it_drains_and_sends_more_than_16_kib_again() -> None:
    (check,) = re.findall(r"default-server check inter (\d+)ms fall (\d+)", HAPROXY_TEXT)
    assert int(check[0]) * int(check[1]) < 1000
    (size,) = re.findall(r"tune\.bufsize (\d+)", HAPROXY_TEXT)
    assert int(size) > 1 << 16


def test_other_addresses_replace_all_of_the_file() -> None:
    text = haproxy_config(7000, BACKENDS)
    assert "bind 127.0.0.1:7000" in text
    assert (
        re.findall(r"server s\d 127\.0\.0\.1:(\d+) agent-port (\d+)", text) == [("7001", "7101"), ("7002", "7102")] * 3
    )
    config: dict[str, Any] = yaml.safe_load(envoy_config(7000, BACKENDS))["static_resources"]
    ports = re.findall(r"'port_value': (\d+)", str(config))
    # For requests, for sequences, and for probes of gRPC.
    assert sorted(ports) == ["7000", *["7001"] * 3, *["7002"] * 3, "7201", "7202"]


def test_live_streams_are_apart_from_the_requests_that_haproxys_policy_counts() -> None:
    """A server that was restarted has no streams, and would get all requests."""
    (streams,) = re.findall(r"use_backend (\w+) if { req.hdr\(Upgrade\) -i websocket }", HAPROXY_TEXT)
    (backend,) = re.findall(rf"(?s)\nbackend {streams}\n(.*?)\n\n", HAPROXY_TEXT)
    assert "lua" not in backend
    assert "use-server" not in backend


def test_both_proxies_make_one_more_attempt_elsewhere_within_a_budget() -> None:
    assert "retries 1" in HAPROXY_TEXT
    assert "option redispatch 1" in HAPROXY_TEXT
    assert "retry-on conn-failure empty-response 503" in HAPROXY_TEXT
    assert "disable-l7-retry" in HAPROXY_TEXT
    config: dict[str, Any] = yaml.safe_load(ENVOY_TEXT)["static_resources"]
    (chain,) = config["listeners"][0]["filter_chains"]
    (host,) = chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    policy = host["routes"][-1]["route"]["retry_policy"]
    assert policy["num_retries"] == 1
    assert policy["retriable_status_codes"] == [503]
    assert "connect-failure" in policy["retry_on"]
    for cluster in config["clusters"]:
        (threshold,) = cluster["circuit_breakers"]["thresholds"]
        assert 25 < threshold["retry_budget"]["budget_percent"]["value"] <= 50
        (check,) = cluster["health_checks"]
        # A sequence stays at a server that leaves.
        alone = "live" if cluster["name"] == "sequences" else "ready"
        assert check["http_health_check"]["path"] == f"/v2/health/{alone}"
        assert check["interval"] == check["no_traffic_interval"] == "0.2s"
        # It would take full servers for broken ones.
        assert "outlier_detection" not in cluster


@pytest.mark.parametrize(
    ("changes", "haproxy", "envoy"),
    [
        (
            Changes(),
            {"agent-check", "balance roundrobin", "choose_by_finish", " 503\n"},
            {"client_side", "retriable-status-codes"},
        ),
        (
            Changes(predicted_finish=False),
            {"agent-check", "balance roundrobin", " 503\n"},
            {"client_side", "retriable-status-codes"},
        ),
        (Changes(load_report=False), {"balance roundrobin", " 503\n"}, {"ROUND_ROBIN", "retriable-status-codes"}),
        (
            Changes(second_attempts=False),
            {"agent-check", "balance roundrobin", "choose_by_finish"},
            {"client_side"},
        ),
        (
            Changes(fewest_connections=True),
            {"agent-check", "balance leastconn", " 503\n"},
            {"LEAST_REQUEST", "retriable-status-codes"},
        ),
    ],
)
def test_a_change_is_in_the_configuration(changes: Changes, haproxy: set[str], envoy: set[str]) -> None:
    words = {"agent-check", "balance roundrobin", "balance leastconn", "choose_by_finish", " 503\n"}
    text = haproxy_config(7000, BACKENDS, changes)
    assert {word for word in words if word in text} == haproxy
    # All of the policy, or nothing.
    assert text.count("finish") == (4 if "choose_by_finish" in haproxy else 1)
    assert ("use-server" in text) == ("choose_by_finish" in haproxy)
    words = {"client_side", "ROUND_ROBIN", "LEAST_REQUEST", "retriable-status-codes"}
    text = envoy_config(7000, BACKENDS, changes)
    assert {word for word in words if word in text} == envoy


def test_a_proxy_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        return None

    monkeypatch.setattr(routing_proxies, "find_program", nothing)
    for proxy in PROXIES:
        with pytest.raises(BenchError, match=f"there is no {proxy} here; 'make fleet' installs it"):
            command_of(proxy, DEPLOY / "haproxy.cfg")

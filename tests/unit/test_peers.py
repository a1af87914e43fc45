"""The comparison with other servers, without starting any."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers.run import (
    BEST,
    CLOSED,
    FIGURES,
    OVERLOADED,
    TIMES_UNDER_OVERLOAD,
    Values,
    Workload,
    measurements_of,
    ratios_of,
)
from benchmarks.peers.servers import HOME, PENSTOCK, SERVERS, select_servers
from penstock.bench.load.golden_target import request_bytes
from penstock.core.errors import BenchError

CNN = Workload(model="cnn", tuning="cnn", bundle=HOME / "bundles" / "cnn")


def test_every_peer_is_whole() -> None:
    for server in SERVERS:
        if server is not PENSTOCK:
            assert set(server.tuning) == {"cnn", "mlp"}
            for name in ("server.py", "requirements.txt", "README.md"):
                assert (server.folder / name).is_file(), server.folder / name
            lines = (server.folder / "requirements.txt").read_text().splitlines()
            assert all("==" in line and not line.startswith("torch==") for line in lines)


def test_an_unknown_server_is_refused_by_name() -> None:
    with pytest.raises(BenchError, match="there is no server 'nginx'"):
        select_servers(["nginx"])
    assert select_servers([]) == SERVERS


def test_penstocks_line_stands_beside_the_best_peers() -> None:
    mosec, triton = select_servers(["mosec", "triton"])
    values: Values = {(PENSTOCK, CLOSED): [3.0, 5.0, 4.0], (mosec, CLOSED): [2.0], (triton, CLOSED): [1.0]}
    ours, *theirs = measurements_of(CNN, values, "the command")
    assert ours.median == 4.0
    assert ours.peer is not None
    assert (ours.peer.name, ours.peer.ratio) == ("Mosec", 2.0)
    assert [line.peer for line in theirs] == [None, None]


def test_a_peer_that_keeps_no_budget_makes_no_ratio() -> None:
    (mosec,) = select_servers(["mosec"])
    ours, _ = measurements_of(CNN, {(PENSTOCK, BEST): [3.0], (mosec, BEST): [0.0]}, "the command")
    assert ours.peer is None
    assert BEST in FIGURES


def test_only_the_networks_of_the_project_have_targets() -> None:
    values: Values = {(PENSTOCK, BEST): [4.0], (PENSTOCK, OVERLOADED[0]): [3.0]}
    other = replace(CNN, model="other", bundle=Path("other"))
    for workload, found in ((CNN, "server.cnn.overload_1_5x"), (other, None), (replace(CNN, connections=64), None)):
        (line,) = ratios_of(workload, values, 0.0, "the command")
        assert (line.id, line.median) == (found, 0.75)
        assert f" {TIMES_UNDER_OVERLOAD * workload.connections} connections" in line.workload


def test_more_headers_stand_in_the_head() -> None:
    body = np.zeros(3, np.uint8).tobytes()
    request = request_bytes("127.0.0.1", 80, "/p", body, "a/b", "Inference-Header-Content-Length: 0\r\n")
    head, _, content = request.partition(b"\r\n\r\n")
    assert head.endswith(b"Content-Length: 3\r\nInference-Header-Content-Length: 0")
    assert content == body

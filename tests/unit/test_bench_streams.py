"""What plays live streams, as far as it needs no server: what is asked for, what is missing, what is compared."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.peers.streams import StreamSearch, measurements_of, select_stream_servers
from penstock.bench import compiled_program
from penstock.bench.streams.compiled_streams import checked_stream_kind
from penstock.bench.streams.model_metadata import input_of
from penstock.bench.streams.stream_benchmark import workload_for
from penstock.bench.streams.stream_result import StreamLoadResult
from penstock.bench.streams.stream_sender import address_of
from penstock.cli.bench_streams import result_record
from penstock.core.errors import BenchError
from penstock.serve.grpc import oip_v2_pb2 as pb


def described(*inputs: tuple[str, list[int]]) -> pb.ModelMetadataResponse:
    tensors = [
        pb.ModelMetadataResponse.TensorMetadata(name="sound", datatype=datatype, shape=shape)
        for datatype, shape in inputs
    ]
    return pb.ModelMetadataResponse(name="hark", inputs=tensors)


def test_a_chunk_is_what_the_metadata_say() -> None:
    for metadata, frames in ((described(("INT16", [-1, 320])), None), (described(("INT16", [1, -1])), 320)):
        chunk = input_of(metadata, frames)
        assert (chunk.name, chunk.dtype, chunk.shape) == ("sound", "int16", (320,))
    assert input_of(described(("FP32", [1, -1, 3])), 5).shape == (5, 3)


@pytest.mark.parametrize(
    ("metadata", "frames", "said"),
    [
        (described(), 1, "takes nothing; a stream has one input"),
        (described(("INT16", [1, 4]), ("INT16", [1, 4])), None, r"INT16\[1, 4\], sound INT16"),
        (described(("BYTES", [1, 4])), None, "one input of numbers"),
        (described(("INT16", [4])), None, r"\[1, frames, ...\]"),
        (described(("INT16", [1, -1])), None, "give the frames of a chunk by --frames"),
        (described(("INT16", [1, 4])), 5, "takes chunks of 4 frames, not 5"),
    ],
)
def test_what_takes_no_stream_is_said(metadata: pb.ModelMetadataResponse, frames: int | None, said: str) -> None:
    with pytest.raises(BenchError, match=said):
        input_of(metadata, frames)


def test_addresses() -> None:
    assert address_of("127.0.0.1:8001") == ("127.0.0.1", 8001)
    assert address_of("http://somewhere") == ("somewhere", 80)
    assert address_of("http://[::1]:8000/") == ("::1", 8000)
    for wrong in ("somewhere", ":8000", "here:there", ""):
        with pytest.raises(BenchError, match="must be HOST:PORT"):
            address_of(wrong)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"protocol": "http"}, "it must be websocket or grpc"),
        ({"model": "hark"}, "give its address by --url"),
        ({}, "without a bundle"),
        ({"protocol": "grpc", "url": "here:1", "model": "hark"}, "--rate-hz"),
        ({"url": "here:1", "model": "hark", "rate_hz": 8000.0}, "--protocol grpc"),
        ({"bundle": Path("somewhere"), "frames": 4}, "the bundle sets --rate-hz"),
        ({"bundle": Path("somewhere"), "per_connection": 0}, "it must be 1, or more with --protocol websocket"),
        ({"bundle": Path("somewhere"), "per_connection": 9, "protocol": "grpc"}, "--per-connection is 9"),
    ],
)
def test_what_is_missing_or_told_twice_is_said(told: dict[str, Any], said: str) -> None:
    options: dict[str, Any] = dict.fromkeys(("bundle", "url", "model", "rate_hz", "frames", "tolerance"))
    options |= {"protocol": "websocket", "seconds": 1.0}
    with pytest.raises(BenchError, match=said):
        workload_for(**options | told)


def test_penstocks_line_stands_beside_the_best_peers() -> None:
    ours, over_grpc, oldest, direct = select_stream_servers([], 20.0)
    assert select_stream_servers(["triton"], 20.0) == (oldest,)
    assert "--latency-ms" in ours.command("murmur", Path("bundle"), 1)
    assert "--grpc-port" in over_grpc.command("murmur", Path("bundle"), 1)
    with pytest.raises(BenchError, match="there is no server 'mosec'"):
        select_stream_servers(["mosec"], 20.0)
    search = cast(
        StreamSearch, SimpleNamespace(metric="streams", workload=SimpleNamespace(model="murmur", period_s=0.02))
    )
    lines = measurements_of(
        search, {ours: [300.0, 400.0], over_grpc: [90.0], oldest: [100.0], direct: [0.0]}, "it", "figure"
    )
    assert [line.median for line in lines] == [350.0, 90.0, 100.0, 0.0]
    assert [line.id for line in lines] == ["figure", None, None, None]
    beside = [line.peer and (line.peer.median, line.peer.ratio) for line in lines]
    assert beside == [(100.0, 3.5), (100.0, 0.9), None, None]
    assert "over gRPC" in lines[1].workload


@pytest.mark.parametrize("differences", [(0.0, np.nan), (np.nan, 0.0)])
def test_a_difference_that_is_not_a_number_survives_the_merge(differences: tuple[float, ...]) -> None:
    counts = dict.fromkeys(("streams", "offered", "lost", "repeated", "opened", "refused", "checked"), 1)
    parts = [
        StreamLoadResult(**counts, latency_s=np.ones(1), broken={}, difference=difference, late_s=np.zeros(1))
        for difference in differences
    ]
    assert np.isnan(StreamLoadResult.merge(parts).difference)


def test_the_compiled_sender_sends_websockets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="sends WebSockets, not grpc; choose python"):
        checked_stream_kind("compiled", "grpc")
    with pytest.raises(BenchError, match="--sender is 'rust'"):
        checked_stream_kind("rust", "grpc")
    assert checked_stream_kind("auto", "grpc") == "python"
    monkeypatch.setattr(compiled_program, "find_compiler", lambda: "g++")
    assert checked_stream_kind("auto", "websocket") == "compiled"


def test_a_result_for_programs_has_quantiles_and_counts() -> None:
    result = StreamLoadResult(
        streams=2,
        latency_s=np.array([0.001] * 98 + [0.03]),
        offered=100,
        lost=1,
        repeated=3,
        opened=2,
        refused=0,
        broken={"1013 full": 1},
        checked=1,
        difference=np.inf,
        late_s=np.array([0.0002]),
        cpu_s=0.5,
    )
    record = json.loads(json.dumps(result_record(result, 20.0, "compiled"), allow_nan=False))
    assert (record["p50_ms"], record["p98_ms"], record["p99_ms"], record["max_ms"]) == (1.0, 30.0, None, None)
    assert (record["late"], record["lost"], record["wrong"], record["broken"]) == (1, 1, 3, {"1013 full": 1})
    assert (record["sender"], record["sender_cpu_s"], record["sender_late_p99_ms"]) == ("compiled", 0.5, 0.2)
    assert (record["sender_idle"], record["difference"]) == (None, None)

"""`penstock bench streams` over both protocols, against a real server and against one that misbehaves."""

import gc
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.bench.streams.grpc_stream import METHOD
from penstock.bench.streams.stream_generator import bundle_workload, describe, measure_streams, send_job
from penstock.bench.streams.stream_result import StreamLoadResult
from penstock.bench.streams.stream_sender import StreamSenderJob, StreamWorkload
from penstock.cli import build
from penstock.core.errors import BenchError
from penstock.core.spec import TensorSpec
from penstock.serve.grpc import oip_v2_pb2 as pb
from tests.support.live import new_live_bundle
from tests.support.serving import RunningServer

CHUNK, PERIOD_S, STREAMS, SECONDS = 4, 0.02, 3, 0.5
SOUND = TensorSpec(dtype="int16", shape=(CHUNK,), meaning="sound", name="sound")
SOUNDS = np.arange(2 * 400, dtype=np.int16).reshape(2, 400)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


@pytest.fixture(scope="module")
def ports(bundle: Path) -> Iterator[dict[str, int]]:
    """Of a real server, by protocol."""
    with RunningServer(bundle, "--latency-ms", "2000", "--grpc-port", "0") as server:
        assert server.process.stdout is not None
        yield {"websocket": server.port, "grpc": int(server.process.stdout.readline().split()[-1])}


@pytest.mark.alone
def test_streams_are_carried_whole_and_compared(bundle: Path, ports: dict[str, int]) -> None:
    heard = bundle_workload(bundle, seconds=0.5, tolerance=None)
    for (protocol, port), processes in zip(ports.items(), (1, 2), strict=True):
        played = replace(heard, url=f"127.0.0.1:{port}", protocol=protocol)
        measured = measure_streams(played, STREAMS, seconds=0.5, warm_up_s=0.1, processes=processes)
        assert measured.complete, describe(measured)
        assert (measured.opened, measured.refused, measured.checked) == (STREAMS, 0, STREAMS)
        assert measured.offered == measured.latency_s.size > STREAMS
        assert 0 < measured.difference < 1e-4


@pytest.mark.thorough
@pytest.mark.alone
def test_streams_that_share_connections_are_carried_whole_and_compared(bundle: Path, ports: dict[str, int]) -> None:
    heard = bundle_workload(bundle, seconds=0.5, tolerance=None)
    for per_connection, processes in ((2, 1), (STREAMS, 2)):
        played = replace(heard, url=f"127.0.0.1:{ports['websocket']}", per_connection=per_connection)
        measured = measure_streams(played, STREAMS, seconds=0.5, warm_up_s=0.1, processes=processes)
        assert measured.complete, describe(measured)
        assert (measured.opened, measured.refused, measured.checked) == (STREAMS, 0, STREAMS)
        assert measured.offered == measured.latency_s.size > STREAMS
        assert 0 < measured.difference < 1e-4
    nobody = replace(heard, url=f"127.0.0.1:{ports['websocket']}", per_connection=2, model="nobody")
    refused = measure_streams(nobody, STREAMS, seconds=0.1, warm_up_s=0.1)
    assert (refused.opened, refused.refused) == (0, STREAMS)


@pytest.mark.thorough
@pytest.mark.alone
def test_a_model_without_its_bundle(ports: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Other tests of this machine may take its cores.
    monkeypatch.setattr("penstock.bench.streams.stream_benchmark.MIN_IDLE", 0.0)
    monkeypatch.setattr("penstock.bench.streams.stream_benchmark.MAX_LATE", 1e9)
    where = ["--protocol", "grpc", "--url", f"127.0.0.1:{ports['grpc']}", "--rate-hz", "8000", "--count", "2"]
    command = ["bench", "streams", *where, "--seconds", "0.5", "--model"]
    result = CliRunner().invoke(build(), [*command, "hark", "--frames", "160"])
    assert (result.exit_code, "2 streams: p50" in result.output) == (0, True), result.output
    result = CliRunner().invoke(build(), [*command, "hark"])
    assert "give the frames of a chunk by --frames" in str(result.exception)
    result = CliRunner().invoke(build(), [*command, "nobody", "--frames", "160"])
    assert "There is no model 'nobody' here" in str(result.exception)


class Misbehaving:
    """A gRPC server that answers chunks with their samples, or as its model's name says."""

    def __init__(self) -> None:
        self.asked: dict[Any, list[pb.ModelInferRequest]] = defaultdict(list)

    def answers(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for number, raw in enumerate(requests):
            request = pb.ModelInferRequest.FromString(raw)
            self.asked[request.parameters["sequence_id"].int64_param].append(request)
            kind = request.model_name
            if kind == "aborting":
                context.abort(grpc.StatusCode.UNAVAILABLE, "nobody is here")
            if kind == "losing" and number % 2:
                continue
            response = pb.ModelStreamInferResponse()
            response.infer_response.id = "" if kind == "nameless" else request.id
            if kind == "refusing" or (kind == "breaking" and number == 2):
                response.error_message = f"it is {kind}"
            samples = np.frombuffer(request.raw_input_contents[0], "<i2").astype("<f4")
            if kind == "not a number":
                samples[0] = np.nan
            kept = {"empty": 0, "short": CHUNK // 2}.get(kind, CHUNK)
            response.infer_response.raw_output_contents.append((samples + (kind == "wrong"))[:kept].tobytes())
            yield response.SerializeToString()
            if kind == "repeating":
                yield response.SerializeToString()


@pytest.fixture(scope="module")
def misbehaving() -> Iterator[tuple[Misbehaving, int]]:
    servicer = Misbehaving()
    service, method = METHOD.strip("/").split("/")
    handler = grpc.method_handlers_generic_handler(
        service, {method: grpc.stream_stream_rpc_method_handler(servicer.answers)}
    )
    server = grpc.server(ThreadPoolExecutor(2 * STREAMS), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, port
    server.stop(None).wait()


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """What plays in this process turns the collection of garbage off."""
    yield
    gc.enable()


def sent(port: int, model: str, protocol: str = "grpc", stragglers_s: float = 20.0) -> StreamLoadResult:
    """Send streams, for longer each time that the machine stood still, until each has begun and most are answered."""
    for factor in (1, 4):
        result = sent_once(port, model, protocol, factor * SECONDS, factor * stragglers_s)
        # Half of the chunks of a server that loses some.
        enough = result.latency_s.size >= STREAMS * SECONDS / PERIOD_S / 4
        if sum(result.broken.values()) == STREAMS or (enough and not result.broken):
            return result
    return sent_once(port, model, protocol, 16 * SECONDS, 16 * stragglers_s)


def sent_once(port: int, model: str, protocol: str, seconds: float, stragglers_s: float) -> StreamLoadResult:
    now = time.monotonic()
    job = StreamSenderJob(
        workload=StreamWorkload(
            url=f"127.0.0.1:{port}",
            model=model,
            input=SOUND,
            sounds=SOUNDS,
            period_s=PERIOD_S,
            protocol=protocol,
            expected=SOUNDS.astype(np.float32),
        ),
        streams=STREAMS,
        start_s=now,
        open_s=0.0,
        measured_from_s=now,
        end_s=now + seconds,
        stragglers_s=stragglers_s,
        check_every=1,
        seed=1,
        cpus=None,
    )
    return send_job(job)


def test_each_stream_is_one_sequence_from_start_to_end(misbehaving: tuple[Misbehaving, int]) -> None:
    servicer, port = misbehaving
    measured = sent(port, "right")
    # Of the last attempt.
    sequences = list(servicer.asked.values())[-STREAMS:]
    assert (measured.opened, measured.lost, measured.repeated, measured.broken) == (STREAMS, 0, 0, {})
    assert measured.difference == 0
    assert measured.latency_s.min() > 0
    assert len(sequences) == STREAMS
    total = 0
    for index, requests in enumerate(sequences):
        assert [request.id for request in requests] == [*map(str, range(len(requests) - 1)), "end"]
        flags = [sorted(set(request.parameters) - {"sequence_id"}) for request in requests]
        assert flags == [["sequence_start"], *[[]] * (len(requests) - 2), ["sequence_end"]], index
        assert all(list(request.inputs[0].shape) == [1, CHUNK] for request in requests)
        total += len(requests) - 1
    # The first chunk of each is not due at any time.
    assert total == measured.offered + STREAMS


@pytest.mark.thorough
def test_what_a_server_does_wrong_is_counted(misbehaving: tuple[Misbehaving, int]) -> None:
    _, port = misbehaving
    # Some answers never come: the wait for them is short.
    refusing = sent(port, "refusing", stragglers_s=1.0)
    assert (refusing.opened, refusing.refused, refusing.broken) == (0, STREAMS, {"it is refusing": STREAMS})
    breaking = sent(port, "breaking", stragglers_s=1.0)
    assert (breaking.opened, breaking.refused, breaking.broken) == (STREAMS, 0, {"it is breaking": STREAMS})
    losing = sent(port, "losing", stragglers_s=1.0)
    assert losing.lost == losing.offered - losing.latency_s.size >= STREAMS
    assert losing.repeated > 0
    assert sent(port, "repeating").repeated > 0
    assert sent(port, "aborting", stragglers_s=1.0).broken == {"nobody is here": STREAMS}
    assert sent(port, "wrong").difference == 1
    assert np.isnan(sent(port, "not a number").difference)
    assert sent(port, "empty").difference == sent(port, "short").difference == np.inf
    with pytest.raises(BenchError, match="without its id"):
        sent(port, "nameless")


def test_a_server_of_another_protocol_or_none_is_said(ports: dict[str, int]) -> None:
    with pytest.raises(BenchError, match="name its gRPC port"):
        sent(ports["websocket"], "hark")
    assert set(sent(ports["grpc"], "hark", "websocket", stragglers_s=1.0).broken) != set()
    with pytest.raises(BenchError, match="cannot be reached"):
        sent(1, "hark")

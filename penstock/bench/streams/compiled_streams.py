"""The compiled sender of live streams over WebSockets, stream_sender.cpp: its jobs and outcomes."""

import json
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import numpy as np

from penstock.bench.compiled_program import (
    RunningProgram,
    SenderKind,
    checked_kind,
    compiled_program,
    resolved,
    running_program,
)
from penstock.bench.streams.client_frames import upgrade_request
from penstock.bench.streams.shared_websocket import shared_start
from penstock.bench.streams.stream_result import StreamLoadResult
from penstock.bench.streams.stream_sender import StreamSenderJob, StreamWorkload, address_of, output_difference
from penstock.bench.streams.websocket_stream import START, stream_path
from penstock.core.errors import BenchError
from penstock.core.remote.remote_copy import DEFAULT_CACHE
from penstock.core.streams.stream_entries import PATH

SOURCE = Path(__file__).with_name("stream_sender.cpp")
HEAD = struct.Struct("=6d8Q2I64s")
TEXT_SIZE = struct.Struct("=Q")


def checked_stream_kind(name: str, protocol: str) -> SenderKind:
    """Return the sender of a name for streams of a protocol, with `"auto"` decided; gRPC is sent by Python alone.

    Raises:
        BenchError: There is no such sender, no compiler for it, or it does not speak the protocol.
    """
    if protocol == "websocket":
        return checked_kind(name)
    if name == "compiled":
        raise BenchError(f"the compiled sender sends WebSockets, not {protocol}; choose python.")
    checked_kind(name)
    return "python"


def stream_program(kind: SenderKind, cache: Path = DEFAULT_CACHE) -> Path | None:
    """Return the compiled sender, building it if need be; None for the Python one.

    Args:
        kind: As `checked_stream_kind` returns it.
        cache: The folder that holds it.

    Raises:
        BenchError: There is no compiler, or it cannot be built.
    """
    return None if kind == "python" else compiled_program(SOURCE, cache)


def running_streams(program: Path, job: StreamSenderJob) -> AbstractContextManager[RunningProgram]:
    """Run a process of the compiled sender until the block ends.

    Raises:
        BenchError: The server cannot be reached.
    """
    return running_program(program, _parts(job), job.cpus)


def compiled_result(job: StreamSenderJob, process: RunningProgram) -> StreamLoadResult:
    """Wait for the outcome of a job.

    Raises:
        BenchError: The process failed.
    """
    return _result(job, process.outcome(job.end_s + job.stragglers_s))


def _parts(job: StreamSenderJob) -> Iterator[bytes]:
    workload = job.workload
    address, port, is_ipv6 = resolved(*address_of(workload.url))
    sounds = np.ascontiguousarray(workload.sounds)
    chunks = sounds.shape[1] // workload.input.shape[0]
    shared = workload.per_connection > 1
    yield HEAD.pack(
        *(job.start_s, job.open_s, job.measured_from_s, job.end_s, job.stragglers_s, workload.period_s),
        *(job.streams, workload.per_connection if shared else 0, job.check_every),
        *(len(sounds), chunks, workload.input.nbytes, *_output_bytes(workload)),
        *(port, is_ipv6, address.encode()),
    )
    for text in (
        upgrade_request(workload.url, PATH if shared else stream_path(workload.model)),
        shared_start(workload.model) if shared else START,
    ):
        yield TEXT_SIZE.pack(len(text)) + text
    yield job.phases_s().tobytes()
    for sound in sounds:
        yield sound[: chunks * workload.input.shape[0]].tobytes()


def _output_bytes(workload: StreamWorkload) -> tuple[int, int]:
    """Bytes of a frame of outputs and of all outputs of a stream; 0 to check nothing."""
    expected = workload.expected
    return (0, 0) if expected is None else (expected[0, 0].nbytes, expected[0].nbytes)


def _result(job: StreamSenderJob, outcome: IO[bytes]) -> StreamLoadResult:
    counts = json.loads(outcome.readline().decode(errors="replace"))
    latency_s, late_s = (
        np.frombuffer(outcome.read(counts[name] * 8), np.float64) for name in ("latencies", "lateness")
    )
    differences = [
        output_difference(job.workload, index, results, outcome.read(nbytes))
        for index, results, nbytes in counts["kept"]
    ]
    return StreamLoadResult(
        streams=job.streams,
        latency_s=latency_s,
        offered=counts["offered"],
        lost=counts["offered"] - len(latency_s),
        repeated=counts["repeated"],
        opened=counts["opened"],
        refused=counts["refused"],
        broken=counts["broken"],
        checked=len(differences),
        difference=float(np.max(differences, initial=0.0)),
        late_s=late_s,
        cpu_s=counts["cpu_s"],
        held=counts["held"],
    )

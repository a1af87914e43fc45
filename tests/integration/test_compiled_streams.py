"""The compiled sender of live streams beside the Python one: against a real server, and against servers with faults."""

import gc
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.bench.compiled_program import SenderKind, find_compiler
from penstock.bench.streams.compiled_streams import compiled_result, running_streams, stream_program
from penstock.bench.streams.stream_generator import bundle_workload, describe, measure_streams, send_job
from penstock.bench.streams.stream_result import StreamLoadResult
from penstock.bench.streams.stream_sender import StreamSenderJob, StreamWorkload
from penstock.cli import build
from penstock.core.errors import BenchError
from penstock.core.spec import TensorSpec
from tests.support.live import new_live_bundle
from tests.support.odd_streams import WINDOW, OddStreams, odd_streams
from tests.support.processes import eventually
from tests.support.serving import RunningServer
from tests.support.thorough import thorough

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")

CHUNK, STREAMS, SECONDS = 4, 3, 0.4
AHEAD_S = 0.5
ATTEMPTS = 3
# Where every answer comes.
PATIENT_S = 20.0
SOUND = TensorSpec(dtype="int16", shape=(CHUNK,), meaning="sound", name="sound")
SOUNDS = np.arange(2 * 400, dtype=np.int16).reshape(2, 400)
PLAYED = StreamWorkload(
    url="", model="right", input=SOUND, sounds=SOUNDS, period_s=0.02, expected=SOUNDS.astype(np.float32)
)
BOTH: tuple[SenderKind, ...] = ("python", "compiled")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_live_bundle(tmp_path_factory)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(bundle, "--latency-ms", "2000") as running:
        yield running


@pytest.fixture(scope="module")
def odd() -> Iterator[tuple[OddStreams, int]]:
    with odd_streams() as served:
        yield served


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    """What plays in this process turns the collection of garbage off."""
    yield
    gc.enable()


def sent(workload: StreamWorkload, sender: SenderKind, stragglers_s: float = 2.0) -> StreamLoadResult:
    for _ in range(ATTEMPTS - 1):
        result = sent_once(workload, sender, stragglers_s)
        if result.broken or result.offered >= STREAMS * SECONDS / workload.period_s / 2:
            return result
        # Less than half was due since the streams were opened: the machine stood still before.
    return sent_once(workload, sender, stragglers_s)


def sent_until(
    right: Callable[[StreamLoadResult], bool], workload: StreamWorkload, sender: SenderKind
) -> StreamLoadResult:
    """Send until the result is right, and wait for longer each time: some answers never come, and others late."""
    for stragglers_s in (0.1, 1.0):
        if right(result := sent(workload, sender, stragglers_s)):
            return result
    return sent(workload, sender, stragglers_s=PATIENT_S)


def sent_once(workload: StreamWorkload, sender: SenderKind, stragglers_s: float) -> StreamLoadResult:
    # The first use builds it, which takes seconds.
    program = stream_program(sender)
    # The process starts in this time, also on a busy machine.
    start_s = time.monotonic() + AHEAD_S
    job = StreamSenderJob(
        workload=workload,
        streams=STREAMS,
        start_s=start_s,
        open_s=0.0,
        measured_from_s=start_s,
        end_s=start_s + SECONDS,
        stragglers_s=stragglers_s,
        check_every=1,
        seed=1,
        cpus=None,
    )
    if program is None:
        return send_job(job)
    with running_streams(program, job) as process:
        return compiled_result(job, process)


@pytest.mark.parametrize("per_connection", [1, thorough(2)])
def test_both_senders_say_the_same_of_a_real_server(bundle: Path, server: RunningServer, per_connection: int) -> None:
    heard = bundle_workload(bundle, seconds=SECONDS, tolerance=None)
    played = replace(heard, url=f"127.0.0.1:{server.port}", per_connection=per_connection)
    by_python, compiled = (sent(played, sender, PATIENT_S) for sender in BOTH)
    for each in (by_python, compiled):
        assert each.complete, describe(each)
        assert (each.opened, each.refused, each.checked, each.held) == (STREAMS, 0, STREAMS, 0)
        assert each.offered == each.latency_s.size == each.late_s.size > STREAMS
        assert 0 < each.difference < 1e-4
        assert each.cpu_s > 0
        assert each.latency_s.min() > 0
    nobody = replace(played, model="nobody")
    by_python, compiled = (sent(nobody, sender) for sender in BOTH)
    assert (compiled.opened, compiled.refused, compiled.offered) == (0, STREAMS, 0)
    assert by_python.refused == STREAMS
    assert compiled.broken == by_python.broken
    assert "nobody" in next(iter(compiled.broken))


def test_processes_share_the_streams(bundle: Path, server: RunningServer) -> None:
    heard = replace(bundle_workload(bundle, seconds=0.2, tolerance=None), url=f"127.0.0.1:{server.port}")

    def measured() -> StreamLoadResult:
        counted = iter((3.0, 10.0))
        return measure_streams(
            heard,
            STREAMS,
            seconds=0.2,
            warm_up_s=0.1,
            processes=2,
            sender="compiled",
            counter=lambda: next(counted),
        )

    whole = measured()
    # The machine may stand still while the streams are opened.
    for _ in range(ATTEMPTS - 1):
        whole = whole if whole.complete else measured()
    assert whole.complete, describe(whole)
    assert (whole.opened, whole.checked, whole.counted) == (STREAMS, STREAMS, 7.0)


@pytest.mark.parametrize("sender", BOTH)
@pytest.mark.parametrize("per_connection", [1, thorough(STREAMS)])
def test_latency_counts_from_when_a_chunk_is_due(
    odd: tuple[OddStreams, int], sender: SenderKind, per_connection: int
) -> None:
    delaying = replace(PLAYED, url=f"127.0.0.1:{odd[1]}", model="delaying", per_connection=per_connection)
    # Each is answered when the next one has come, and the last one never.
    measured = sent_until(lambda result: result.lost == STREAMS, delaying, sender)
    assert measured.lost == STREAMS
    assert delaying.period_s <= measured.latency_s.min() < 10 * delaying.period_s


@pytest.mark.thorough
@pytest.mark.parametrize("sender", BOTH)
@pytest.mark.parametrize("per_connection", [1, STREAMS])
def test_what_a_server_does_wrong_is_counted(
    odd: tuple[OddStreams, int], sender: SenderKind, per_connection: int
) -> None:
    played = replace(PLAYED, url=f"127.0.0.1:{odd[1]}", per_connection=per_connection)
    right = sent(played, sender, PATIENT_S)
    assert right.complete, describe(right)
    assert (right.difference, right.checked) == (0, STREAMS)
    assert right.offered == right.latency_s.size > STREAMS
    # A wrong number, and the right one after it.
    misnumbering = sent_until(
        lambda result: result.repeated == 2 * STREAMS, replace(played, model="misnumbering"), sender
    )
    assert misnumbering.repeated == 2 * STREAMS
    assert not misnumbering.complete
    assert sent(replace(played, model="repeating"), sender, PATIENT_S).repeated > STREAMS
    losing = sent_until(lambda result: result.repeated > 0, replace(played, model="losing"), sender)
    assert losing.lost == losing.offered - losing.latency_s.size >= STREAMS
    assert losing.repeated > 0
    assert sent(replace(played, model="wrong"), sender, PATIENT_S).difference == 1
    closing = sent_until(
        lambda result: sum(result.broken.values()) == STREAMS, replace(played, model="closing"), sender
    )
    assert (closing.opened, closing.broken) == (STREAMS, {"1011 it is closing": STREAMS})
    refusing = sent(replace(played, model="refusing"), sender)
    said = "503 Service Unavailable: come back later" if per_connection == 1 else "come back later"
    assert (refusing.opened, refusing.refused, refusing.broken) == (0, STREAMS, {said: STREAMS})


@pytest.mark.parametrize("per_connection", [1, thorough(STREAMS)])
def test_a_stream_sends_no_more_than_its_window(odd: tuple[OddStreams, int], per_connection: int) -> None:
    silent = replace(PLAYED, url=f"127.0.0.1:{odd[1]}", model="silent", per_connection=per_connection)
    measured = sent(silent, "compiled", stragglers_s=0.1)

    def taken() -> list[int]:
        """Chunks of the streams of the last attempt."""
        return list(odd[0].taken.values())[-STREAMS:]

    # The server's threads may come to them later.
    eventually(lambda: sum(taken()) >= WINDOW * STREAMS, within_s=20)
    assert taken() == [WINDOW] * STREAMS
    assert measured.lost == measured.offered
    assert measured.held == measured.offered - WINDOW * STREAMS > 0
    # Lateness is the sender's own, not that of a window.
    assert measured.late_s.size == measured.offered


@pytest.mark.thorough
def test_frames_that_no_penstock_server_sends_are_said(odd: tuple[OddStreams, int]) -> None:
    played = replace(PLAYED, url=f"127.0.0.1:{odd[1]}")
    fragmenting = sent(replace(played, model="fragmenting"), "compiled")
    assert fragmenting.broken == {"the server sent a fragment or an extension": STREAMS}
    cutting = sent(replace(played, model="cutting", per_connection=STREAMS), "compiled")
    assert cutting.broken == {"the server sent an entry that is cut off": STREAMS}
    with pytest.raises(BenchError, match=r"the compiled sender failed: .* a result of 5 frames in 16 bytes"):
        sent(replace(played, model="miscounting"), "compiled")


def test_pings_are_answered(odd: tuple[OddStreams, int]) -> None:
    pinging = replace(PLAYED, url=f"127.0.0.1:{odd[1]}", model="pinging")
    # On a busy machine the server of this test takes longer for a ping than a stream's window allows.
    assert any(sent(pinging, "compiled").complete for _ in range(ATTEMPTS))
    assert odd[0].pongs > STREAMS


@pytest.mark.parametrize("per_connection", [1, STREAMS])
def test_chunks_and_results_beyond_a_buffer(odd: tuple[OddStreams, int], per_connection: int) -> None:
    # 200 kB a chunk, 400 kB a result: partial writes, and partial reads.
    frames = 100_001
    sounds = np.arange(2 * 12 * frames, dtype=np.int64).astype(np.int16).reshape(2, -1)
    large = StreamWorkload(
        url=f"127.0.0.1:{odd[1]}",
        model="right",
        input=replace(SOUND, shape=(frames,)),
        sounds=sounds,
        period_s=0.1,
        per_connection=per_connection,
        expected=sounds.astype(np.float32),
    )
    measured = sent(large, "compiled", stragglers_s=20.0)
    assert measured.complete, describe(measured)
    assert (measured.difference, measured.checked) == (0, STREAMS)


def test_a_server_that_speaks_no_websocket_or_is_gone(odd: tuple[OddStreams, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            # The first connection finds the address.
            for _ in range(STREAMS + 1):
                with listener.accept()[0] as connection:
                    connection.settimeout(5)
                    if connection.recv(4096):
                        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        plain = sent(replace(PLAYED, url=f"127.0.0.1:{listener.getsockname()[1]}"), "compiled")
        thread.join()
    assert plain.broken == {"200 OK": STREAMS}
    with pytest.raises(BenchError, match="cannot be reached"):
        sent(replace(PLAYED, url="127.0.0.1:1"), "compiled")


@pytest.mark.thorough
def test_one_line_of_json_from_the_command_line(
    bundle: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests of this machine may take its cores.
    monkeypatch.setattr("penstock.bench.streams.stream_benchmark.MIN_IDLE", 0.0)
    monkeypatch.setattr("penstock.bench.streams.stream_benchmark.MAX_LATE", 1e9)
    command = ["bench", "streams", str(bundle), "--url", f"127.0.0.1:{server.port}", "--count", "2"]
    result = CliRunner().invoke(build(), [*command, "--seconds", "0.3", "--sender", "compiled", "--format", "json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert (record["streams"], record["opened"], record["wrong"], record["lost"]) == (2, 2, 0, 0)
    assert record["p50_ms"] <= record["p98_ms"] <= record["p99_ms"] <= record["max_ms"]
    assert record["sender"] == "compiled"
    assert record["sender_cpu_s"] > 0
    assert "2 streams: p50" in result.stderr


def test_its_cores_are_those_that_it_is_given(odd: tuple[OddStreams, int]) -> None:
    core = min(os.sched_getaffinity(0))
    played = replace(PLAYED, url=f"127.0.0.1:{odd[1]}", expected=None)
    measured = measure_streams(played, 1, seconds=0.1, warm_up_s=0.0, cpus=frozenset({core}), sender="compiled")
    assert (measured.opened, measured.checked) == (1, 0)

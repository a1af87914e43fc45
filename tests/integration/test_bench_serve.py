"""The load generator against servers that are right, wrong, slow, stalling and gone."""

import json
import math
import multiprocessing
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.bench.checked_load import measure_checked
from penstock.bench.compiled_program import SenderKind
from penstock.bench.load.compiled_sender import sender_program
from penstock.bench.load.generator import Load, LoadResult, measure
from penstock.bench.load.golden_target import golden_target, request_bytes
from penstock.bench.load.null_server import null_server
from penstock.bench.load.sender import Target
from penstock.cli import build
from penstock.core.errors import BenchError
from tests.support.odd_server import ANSWERS, serve
from tests.support.serving import RunningServer, write_doubler
from tests.support.thorough import thorough

CLOSED = Load(rate=None, connections=4, seconds=0.5, warm_up_s=0.2)
# Its rate is that of the clock, also on a busy machine.
BY_THE_CLOCK = Load(rate=100, connections=4, seconds=0.5, warm_up_s=0.2)
# More answers than this come in the closed loop, unless the machine stands still.
ENOUGH = 100


@pytest.fixture(params=[thorough("python"), "compiled"])
def sender(request: pytest.FixtureRequest) -> SenderKind:
    if request.param == "compiled" and sender_program("auto") is None:
        pytest.skip("no C++ compiler")
    return request.param


def target_at(port: int) -> Target:
    requests = tuple(request_bytes("127.0.0.1", port, "/", bytes([which]), "x/y") for which in range(2))
    return Target(host="127.0.0.1", port=port, requests=requests, answers=ANSWERS, tolerance=1e-6)


@contextmanager
def server_that_is(kind: str) -> Generator[Target]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(kind, theirs), daemon=True)
    process.start()
    try:
        yield target_at(ours.recv())
    finally:
        process.kill()
        process.join()
        ours.close()
        theirs.close()


def measured(target: Target, sender: SenderKind) -> LoadResult:
    """The closed loop, for longer each time that the machine stood still, until there are answers to count."""
    load = replace(CLOSED, sender=sender)
    result = measure(target, load, none_answered=True)
    while result.latency_s.size <= ENOUGH and load.seconds < 20:
        load = replace(load, seconds=4 * load.seconds)
        result = measure(target, load, none_answered=True)
    return result


def test_closed_and_open_loop_against_a_server_that_is_right(sender: SenderKind) -> None:
    with server_that_is("right") as target:
        closed = measured(target, sender)
        assert closed.checked == closed.latency_s.size > ENOUGH
        assert (closed.refused, closed.failed, closed.lost) == (0, 0, 0)
        opened = measure(target, Load(rate=300, connections=16, seconds=1, warm_up_s=0.2, sender=sender))
        assert opened.offered == pytest.approx(300, rel=0.25)
        assert opened.latency_s.size == opened.offered
        assert (closed.late, closed.queued) == (0, 0)
        narrow = measure(target, Load(rate=20_000, connections=1, seconds=0.5, warm_up_s=0.1, sender=sender))
        assert narrow.queued > 100


def test_a_description_before_the_answer_is_counted_off(sender: SenderKind) -> None:
    with server_that_is("describing") as target:
        result = measured(replace(target, preamble_nbytes=2), sender)
        assert result.checked == result.latency_s.size > ENOUGH


def test_a_wrong_answer_has_no_speed(sender: SenderKind) -> None:
    with server_that_is("wrong") as target, pytest.raises(BenchError, match="are not the golden ones"):
        # By the clock, so that enough are sent for some to be wrong.
        measure(target, Load(rate=300, connections=4, seconds=0.5, warm_up_s=0.2, sender=sender))


def test_refusals_are_counted_and_not_taken_for_answers(sender: SenderKind) -> None:
    with server_that_is("refusing") as target:
        result = measure(target, Load(rate=200, connections=16, seconds=1, warm_up_s=0.2, sender=sender))
        assert result.refused == pytest.approx(result.offered / 2, rel=0.2)
        assert result.share_within(10_000) == pytest.approx(0.5, abs=0.1)


@pytest.mark.thorough
def test_broken_connections_are_opened_anew_and_their_requests_are_lost(sender: SenderKind) -> None:
    with server_that_is("breaking") as target:
        result = measure(target, Load(rate=200, connections=16, seconds=1, warm_up_s=0.2, sender=sender))
        assert 0 < result.lost < result.offered / 2
        assert result.latency_s.size + result.lost == result.offered


@pytest.mark.thorough
def test_a_server_that_stands_still_shows_in_the_percentiles(sender: SenderKind) -> None:
    # Counted from when they were sent, one or two latencies would show the stall; from when they were due, many do.
    with server_that_is("stalling") as target:
        result = measure(target, Load(rate=200, connections=2, seconds=2, warm_up_s=0.2, sender=sender))
        assert result.percentile_ms(99) > 350
        assert np.count_nonzero(result.latency_s > 0.1) > 50


@pytest.mark.thorough
def test_the_generator_refuses_to_measure_what_is_as_fast_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with null_server(ANSWERS[0].tobytes(), None) as port:
        target = replace(target_at(port), requests=target_at(port).requests[:1], answers=ANSWERS[:1])
        # Given, because two measurements of one server differ by more than twice on a busy machine.
        monkeypatch.setattr("penstock.bench.checked_load.null_rate", lambda *_: math.inf)
        rate = measure_checked(target, BY_THE_CLOCK, None).result.answered_a_second
        assert rate > 0
        monkeypatch.setattr("penstock.bench.checked_load.null_rate", lambda *_: 1.9 * rate)
        with pytest.raises(BenchError, match="less than twice"):
            measure_checked(target, BY_THE_CLOCK, None)


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[RunningServer, Path]]:
    bundle = write_doubler(tmp_path_factory.mktemp("doubler"), sleep_s=0.002)
    with RunningServer(bundle) as server:
        yield server, bundle


@pytest.mark.alone
def test_bench_serve_from_the_command_line(
    doubler: tuple[RunningServer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, bundle = doubler
    results = tmp_path / "serve.jsonl"
    url = f"http://127.0.0.1:{server.port}"

    def run(options: list[str]) -> str:
        return CliRunner().invoke(build(), ["bench", "serve", url, *options]).output

    shown = run(["--bundle", str(bundle), "--rate", "100", "--seconds", "1", "--record", str(results)])
    assert "within 50 ms" in shown
    assert "all right" in shown
    (line,) = results.read_text().splitlines()
    assert json.loads(line)["unit"] == "requests/s"
    # The generator's own speed was measured once.
    monkeypatch.setattr("penstock.bench.checked_load.null_rate", lambda *_: math.inf)
    assert "closed loop, 4 connections" in run(["--bundle", str(bundle), "--connections", "4", "--seconds", "0.5"])


def test_another_bundle_than_the_served_one_is_noticed(doubler: tuple[RunningServer, Path], tmp_path: Path) -> None:
    import penstock
    from penstock.core.source_files.find_application import find_application

    server, bundle = doubler
    found = find_application(str(bundle.parent / "app.py"))
    penstock.Bundle.write(found, found.model(), np.ones((1, 4), np.float32), to=tmp_path / "other")
    with pytest.raises(BenchError, match="serves another bundle"):
        golden_target(f"http://127.0.0.1:{server.port}", tmp_path / "other")
    with pytest.raises(BenchError, match="cannot be sent as 'png'"):
        golden_target(f"http://127.0.0.1:{server.port}", bundle, "png")


def test_nobody_there_is_said() -> None:
    with pytest.raises(BenchError, match=r"no penstock server answers at http://127\.0\.0\.1:9"):
        golden_target("http://127.0.0.1:9", Path("nowhere"))

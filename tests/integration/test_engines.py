"""A server with two engines: what is spread over them, and what clients notice when one of them dies."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Bundle, Client
from penstock.bench.process_usage import worker_pids
from penstock.core.errors import InvalidInput
from penstock.core.source_files.find_application import find_application
from penstock.runtime.load import make_network
from tests.support.live import CHUNK, LIVE_PY, offline, sounds, write_live_app
from tests.support.processes import Crowd, eventually, exists, kill, mapped_tables, tables_of
from tests.support.serving import RunningServer, serve_command, write_doubler

pytestmark = pytest.mark.thorough

ENGINES = ("engine 0 on cpu", "engine 1 on cpu")
FRONT_ENDS = ("front-end 0", "front-end 1")
# What a batch takes at least, so that engines are measured alike whatever else this machine does.
NAP_S = 0.02
NAPPING = LIVE_PY.replace(
    "    return Sequential(\n",
    f"""
    class Nap(torch.nn.Module):
        def forward(self, x):
            __import__("time").sleep({NAP_S})
            return x

    while __import__("os").path.exists("HOLD"):
        __import__("time").sleep(0.02)
    return Sequential(
        Nap(),
""",
)
# Asked so often, each front-end has answered.
OFTEN = 16
# Whichever engine makes it first is the only one that can.
FOR_ONE_ENGINE = """
def network():
    import os
    import pathlib
    from torch import nn

    owner = pathlib.Path(__file__).with_name("owner")
    if not owner.exists():
        owner.mkdir()
        (owner / str(os.getpid())).touch()
    elif not (owner / str(os.getpid())).exists():
        raise RuntimeError("somebody else has it")
    return nn.Linear(4, 4)
"""


def hold_of(models: Path) -> Path:
    """While this file exists, no engine begins, so that a test sees that one is gone however late it looks."""
    return models.parent / "hold"


@pytest.fixture
def hold(models: Path) -> Iterator[Path]:
    yield hold_of(models)
    hold_of(models).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    for name in ("hark", "doubler"):
        (folder / name).mkdir()
    write_live_app(folder / "hark", NAPPING.replace("HOLD", str(hold_of(folder / "models"))))
    found = find_application(str(folder / "hark" / "hark_app.py"))
    Bundle.write(found, make_network(found), sounds(), to=folder / "hark" / "bundle")
    write_doubler(folder / "doubler", sleep_s=NAP_S)
    for name in ("hark", "doubler"):
        shutil.copytree(folder / name / "bundle", folder / "models" / name / "1")
    return folder / "models"


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[RunningServer]:
    options = ("--device", "cpu,cpu", "--frontends", "2")
    with RunningServer(None, "--models", str(models), *options) as server:
        yield server


@pytest.fixture
def server(running: RunningServer) -> RunningServer:
    # As at its start, whatever the test before did.
    eventually(lambda: serving(running) == {0, 1} and open_streams(running) == [0, 0], within_s=120)
    return running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(f"http://{server.host}:{server.port}", retries=0) as client:
        yield client


def engines(server: RunningServer, name: str) -> list[dict[str, Any]]:
    """What the server says of each engine that serves a model."""
    return server.ask("GET", "/v1/stats")[2]["models"][name]["engines"]


def serving(server: RunningServer) -> set[int]:
    """The engines that every front-end has both models in; all that one has, if it differs."""
    said = {
        frozenset(engine["engine"] for engine in engines(server, name))
        for _ in range(OFTEN)
        for name in ("hark", "doubler")
    }
    return set(said.pop()) if len(said) == 1 else set()


def open_streams(server: RunningServer) -> list[int]:
    return [engine["streams_open"] for engine in engines(server, "hark")]


def rows(server: RunningServer) -> list[int]:
    return [engine["rows"] for engine in engines(server, "doubler")]


def watch_until(server: RunningServer, there: set[int]) -> float:
    """Wait until so many engines serve, with the server ready all the time; gives when they did."""
    statuses: set[int] = set()

    def holds() -> bool:
        statuses.add(server.ask("GET", "/v2/health/ready")[0])
        return serving(server) == there

    eventually(holds, within_s=120)
    assert statuses == {200}
    return time.monotonic()


def test_streams_are_spread_evenly_and_are_right(server: RunningServer, client: Client, models: Path) -> None:
    assert worker_pids(server.process.pid).keys() == {*ENGINES, *FRONT_ENDS}
    signals = sounds(6, 5 * CHUNK)
    streams = [client.stream("hark") for _ in signals]
    assert open_streams(server) == [3, 3]
    for stream, sound in zip(streams, signals, strict=True):
        stream.send(sound)
    for stream, whole in zip(streams, offline(models / "hark" / "1", signals), strict=True):
        frames = [frame for result in stream.end() for frame in result.event or ()]
        np.testing.assert_allclose(frames, whole, atol=1e-5)
        stream.close()
    eventually(lambda: open_streams(server) == [0, 0], within_s=5)


def test_a_killed_engine_ends_no_stream(server: RunningServer, client: Client, models: Path, hold: Path) -> None:
    signals = sounds(4, 5 * CHUNK)
    streams = [client.stream("hark") for _ in signals]
    heard = [iter(stream) for stream in streams]
    # Before the hold, as it makes the network too.
    expected = offline(models / "hark" / "1", signals)
    frames: list[list[Any]] = []
    for stream, results, sound in zip(streams, heard, signals, strict=True):
        stream.send(sound[:CHUNK])
        frames.append(list(next(results).event or ()))
    hold.touch()
    kill(server, ENGINES[1])
    for index, (stream, sound) in enumerate(zip(streams, signals, strict=True)):
        for at in range(CHUNK, len(sound), CHUNK):
            stream.send(sound[at : at + CHUNK])
        frames[index] += [frame for result in stream.end() for frame in result.event or ()]
        stream.close()
    for index, whole in enumerate(expected):
        np.testing.assert_allclose(frames[index], whole, atol=1e-5)
    watch_until(server, {0})
    # Meanwhile all go to the other one, and the next to the one that is back.
    with client.stream("hark"), client.stream("hark"):
        assert open_streams(server) == [2]
        hold.unlink()
        watch_until(server, {0, 1})
        with client.stream("hark"), client.stream("hark"):
            assert open_streams(server) == [2, 2]


def test_requests_go_to_both_engines_and_to_the_one_that_is_left(server: RunningServer, hold: Path) -> None:
    before = rows(server)
    with Crowd(server) as crowd:
        crowd.until_right(200)
        assert all(after > had for after, had in zip(rows(server), before, strict=True))
        hold.touch()
        kill(server, ENGINES[0])
        lost_s = watch_until(server, {1})
        crowd.until_right(100, since_s=lost_s)
        hold.unlink()
        back_s = watch_until(server, {0, 1})
        crowd.until_right(100, since_s=back_s)
        assert rows(server)[0] > 0
    # Those that waited for it too: the other one answered them.
    assert crowd.outcomes.keys() == {"right"}

    def all_counted() -> bool:
        answered = {server.ask("GET", "/v1/stats")[2]["models"]["doubler"]["answered"] for _ in range(OFTEN)}
        return min(answered) >= crowd.outcomes["right"]

    # A front-end counts an answer after it has sent it.
    eventually(all_counted, within_s=10)


def test_a_model_is_replaced_in_all_engines_or_in_none(
    server: RunningServer, client: Client, models: Path, tmp_path: Path
) -> None:
    text = (models.parent / "doubler" / "app.py").read_text()
    begin, end = text.index("def network():"), text.index("def decode(")
    (tmp_path / "app.py").write_text(text[:begin] + FOR_ONE_ENGINE + "\n\n" + text[end:])
    found = find_application(str(tmp_path / "app.py"))
    Bundle.write(found, found.model(), np.zeros((2, 4), np.float32), to=models / "doubler" / "3")
    shutil.rmtree(tmp_path / "owner")
    mapped = {process: mapped_tables(process) for process in worker_pids(server.process.pid).values()}
    with Crowd(server, clients=3) as crowd:
        crowd.until_right(20)
        with pytest.raises(InvalidInput, match=r"engine \d on cpu: .*somebody else has it"):
            client.load("doubler")
        shutil.rmtree(models / "doubler" / "3")
        shutil.copytree(models / "doubler" / "1", models / "doubler" / "2")
        client.load("doubler")
        crowd.until_right(20, since_s=time.monotonic())
    assert crowd.outcomes.keys() == {"right"}
    assert [engine["engine"] for engine in engines(server, "doubler")] == [0, 1]
    # No table of what was replaced, or of what could not be, is left in any process.
    for process, count in mapped.items():
        eventually(lambda process=process, count=count: mapped_tables(process) <= count, within_s=5)
    eventually(lambda: tables_of([server.process.pid]) == 4, within_s=5)


def test_figures_are_told_of_each_engine(server: RunningServer) -> None:
    assert server.ask("POST", "/v1/apps/doubler", b"[1, 2, 3, 4]")[0] == 200
    # A front-end lets go of a slot after it has sent the answer.
    eventually(lambda: not any(engine["slots"]["in_use"] for engine in engines(server, "doubler")), within_s=10)
    text = server.ask("GET", "/metrics")[2].decode()
    for line in (
        'penstock_engines{app="doubler"} 2.0',
        'penstock_streams_open{app="hark",engine="1"} 0.0',
        'penstock_slots_in_use{app="doubler",engine="0"} 0.0',
        'penstock_batch_rows_count{app="hark",engine="0"}',
        'penstock_requests_total{app="doubler",outcome="answered"}',
        'penstock_streams_opened_total{app="hark"}',
    ):
        assert line in text
    stats = server.ask("GET", "/v1/stats")[2]["models"]["doubler"]
    assert [engine["device"] for engine in stats["engines"]] == ["cpu", "cpu"]
    assert stats["slots"]["total"] == sum(engine["slots"]["total"] for engine in stats["engines"])
    assert sum(stats["latency"]["counts"]) == sum(engine["rows"] for engine in stats["engines"])


@pytest.mark.slow
def test_an_engine_that_cannot_begin_ends_the_start_with_a_sentence(models: Path) -> None:
    command = serve_command(models / "hark" / "1", "--device", "cpu,cuda:99", "--executor", "auto")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("penstock: engine 1 on cuda:99: --device is cuda:99, but ")


@pytest.mark.slow
def test_a_drain_loses_nothing_and_leaves_nothing(models: Path) -> None:
    with RunningServer(models / "doubler" / "1", "--device", "cpu,cpu", "--verbose") as server:
        processes = worker_pids(server.process.pid)
        assert processes.keys() >= {*ENGINES, "front-end 0"}
        with Crowd(server, clients=12, pause_s=0.0) as crowd:
            crowd.until_right(300)
            server.stop()
            assert server.process.wait(10) == 0
        assert not any(map(exists, processes.values()))
        assert crowd.outcomes.keys() <= {"right", "closed"}
        log = server.log()
        told = [int(line.split("drained; ")[1].split()[0]) for line in log.splitlines() if "drained; " in line]
        assert sum(told) == crowd.outcomes["right"]
        # Each line of an engine's says which one it is, and where it runs.
        assert all(f"INFO {engine} penstock" in log for engine in ENGINES)


@pytest.mark.slow
def test_nothing_is_left_when_the_supervisor_is_killed(models: Path) -> None:
    with RunningServer(None, "--models", str(models), "--device", "cpu,cpu", "--frontends", "2") as server:
        processes = list(worker_pids(server.process.pid).values())
        assert len(processes) == len(ENGINES) + len(FRONT_ENDS)
        server.process.kill()
        eventually(lambda: not any(map(exists, processes)), within_s=5)
        eventually(lambda: tables_of(processes) == 0, within_s=5)

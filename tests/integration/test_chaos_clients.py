"""The clients of a chaos run, compiled and in Python, against a server that answers as it is told."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Generator

import pytest

from penstock.bench.chaos import clients, compiled_clients
from penstock.bench.chaos.chaos_history import ChaosHistory
from penstock.bench.chaos.checker import check
from penstock.bench.chaos.clients import ClientsJob, ClientsOutcome
from penstock.bench.chaos.compiled_clients import running_clients
from penstock.bench.chaos.numbered_input import doubles_of
from penstock.bench.compiled_program import SenderKind
from tests.support.processes import eventually

HANG_S = 0.5
RESET, TWICE, REFUSED, CLOSED = 7, 11, 13, 17
HUNG = 19


class Answering:
    """A server that treats some requests, by their number, in a way of their own."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(ready)))
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
            self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._over.wait()
        server.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            line, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            model = line.split()[1].rpartition("/")[2]
            self.asked[model] += 1
            length = next(int(field.split(": ")[1]) for field in fields if field.startswith("Content-Length"))
            number = int(json.loads(await reader.readexactly(length))[0])
            if number == RESET:
                return
            if number == HUNG:
                await asyncio.sleep(60)
            said = {"error": "Too many."} if number == REFUSED else {}
            body = json.dumps(
                said | {"doubles": doubles_of(number), "weights": 3, "source": -3 if model == "guest" else 3}
            )
            status, closes = (503 if number == REFUSED else 200), "Connection: close\r\n" if number == CLOSED else ""
            answer = f"HTTP/1.1 {status} Said\r\n{closes}content-length: {len(body)}\r\n\r\n{body}".encode()
            writer.write(answer * (1 + (number == TWICE)))


@pytest.fixture
def server() -> Generator[Answering]:
    answering = Answering()
    yield answering
    answering.close()


server_anew = server


def outcome_of(server: Answering, sender: SenderKind, hang_s: float) -> tuple[ChaosHistory, ClientsOutcome]:
    """The outcome of clients that run until a request hangs, and what was known of the server."""
    job = ClientsJob(
        host="127.0.0.1",
        port=server.port,
        models={"steady": 0.8, "guest": 0.2},
        rate=300.0,
        connections=4,
        seed=0,
    )
    history = ChaosHistory(started={"steady": 3}, began_s=time.monotonic(), over_s=0.0, load_s=0.0)
    with running_clients(job, sender) as running:
        time.sleep(hang_s + 0.5)
        # Those that end in a way of their own, and some behind them.
        eventually(lambda: server.asked.total() > 2 * HUNG, within_s=20)
        return history, running.stop()


@pytest.mark.parametrize("sender", [pytest.param("python", marks=pytest.mark.slow), "compiled"])
def test_every_request_has_its_end(
    sender: SenderKind, server: Answering, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Processes that are spawned do not see this.
    monkeypatch.setattr(compiled_clients, "HANG_S", HANG_S)
    history, outcome = outcome_of(server, sender, HANG_S if sender == "compiled" else clients.HANG_S)
    if sum(answer.end in ("hung", "unsent") for answer in outcome.answers) != 1:
        # The machine stood still, so that others hung too.
        monkeypatch.setattr(compiled_clients, "HANG_S", clients.HANG_S)
        # Anew, without the requests that the one before has not read.
        server.close()
        server = request.getfixturevalue("server_anew")
        history, outcome = outcome_of(server, sender, clients.HANG_S)
    history.over_s = time.monotonic()
    history.answers = outcome.answers
    ends = {(answer.number, answer.end) for answer in outcome.answers}
    assert {(RESET, "reset"), (HUNG, "hung"), (TWICE, "answer"), (TWICE, "unasked")} <= ends
    assert Counter(end for _, end in ends)["answer"] == len(outcome.answers) - 3
    by_number = {answer.number: answer for answer in outcome.answers if answer.end == "answer"}
    assert by_number[REFUSED].status == 503
    assert by_number[REFUSED].sentence.startswith('{"error": "Too many."')
    assert {answer.sentence for answer in outcome.answers if answer.status != 503} == {""}
    assert by_number[CLOSED].status == 200
    assert by_number[CLOSED].port not in {answer.port for answer in outcome.answers if answer.number > CLOSED}
    assert [
        answer.number for answer in outcome.answers if answer.end == "answer" and answer.number not in by_number
    ] == []
    assert sorted({answer.number for answer in outcome.answers}) == list(range(len(by_number) + 2))
    assert by_number[5].doubles == doubles_of(5)
    assert {(answer.model, answer.weights, answer.source) for answer in by_number.values() if answer.status == 200} == {
        ("steady", 3, 3),
        ("guest", 3, -3),
    }
    assert Counter(answer.model for answer in outcome.answers if answer.end != "unasked") == server.asked
    assert all(answer.due_s <= answer.sent_s <= answer.ended_s for answer in outcome.answers)
    assert all(answer.opened_s <= answer.sent_s for answer in outcome.answers)
    # A request is sent after it was taken up. The figure has the precision of a float.
    assert 0 <= outcome.late_s <= max(answer.sent_s - answer.due_s for answer in outcome.answers) + 1e-3
    # Poisson arrivals at the rate.
    due_s = [answer.due_s for answer in outcome.answers]
    assert 0.5 < len(by_number) / (300 * (max(due_s) - min(due_s))) < 1.5
    kinds = {violation.kind for violation in check(history)}
    assert kinds == {"lost", "hung", "answered twice", "mixture"}


def without_server(after_s: float) -> ClientsOutcome:
    """The outcome of clients whose server goes, after a further time."""
    server = Answering()
    job = ClientsJob(host="127.0.0.1", port=server.port, models={"steady": 1.0}, rate=50.0, connections=2, seed=0)
    with running_clients(job, "compiled") as running:
        time.sleep(0.2)
        server.close()
        time.sleep(after_s)
        return running.stop()


def test_requests_without_a_server_are_unsent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_clients, "HANG_S", HANG_S)
    outcome = without_server(0.2)
    if all(answer.end != "unsent" for answer in outcome.answers):
        # The clients stood still in this time.
        outcome = without_server(5.0)
    assert {answer.end for answer in outcome.answers} <= {"answer", "reset", "unsent"}
    assert "unsent" in {answer.end for answer in outcome.answers}


@pytest.mark.parametrize("sender", [pytest.param("python", marks=pytest.mark.slow), "compiled"])
def test_numbers_go_on_where_other_clients_ended(sender: SenderKind, server: Answering) -> None:
    job = ClientsJob(
        host="127.0.0.1", port=server.port, models={"steady": 1.0}, rate=50.0, connections=2, seed=0, first=100
    )
    with running_clients(job, sender) as running:
        eventually(lambda: server.asked.total() > 5, within_s=20)
        outcome = running.stop()
    assert len(outcome.answers) > 1
    assert sorted(answer.number for answer in outcome.answers) == list(range(100, 100 + len(outcome.answers)))
    assert all(answer.doubles == doubles_of(answer.number) for answer in outcome.answers)

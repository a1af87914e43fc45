"""Clients that send by the clock, each request with an input of its own, and write down how every one ended."""

import json
import math
import multiprocessing
import random
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol, final

import numpy as np

from penstock.bench.chaos.chaos_history import End, RequestEnd
from penstock.bench.chaos.numbered_input import input_of
from penstock.bench.socket_loop import PolledSocket, SocketLoop

HANG_S = 5.0
# Requests of a connection, on average: a front-end that comes back gets connections again.
REQUESTS_EACH = 40
STOP_LOOKS_S = 0.05
TURN_S = 0.005
# Delay before another attempt where no server listens.
RETRY_S = 0.01
# First bytes of a body other than that of 200 that are kept.
SENTENCE_BYTES = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientsJob:
    """The load of the clients.

    Args:
        host: The server's address.
        port: Its port.
        models: Each model and its share of the requests.
        rate: Requests a second, as a Poisson process.
        connections: Most connections at a time.
        seed: Seed of arrivals and of the models.
        cpus: The cores of the process; None for any.
        first: Number of the first request.
    """

    host: str
    port: int
    models: dict[str, float]
    rate: float
    connections: int
    seed: int
    cpus: frozenset[int] | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class ClientsOutcome:
    """The outcome of the clients.

    Args:
        answers: How every request ended.
        late_s: How late they were themselves in taking up a request that was due, the 99th percentile.
    """

    answers: list[RequestEnd]
    late_s: float


class RunningClients(Protocol):
    """Clients in a process of their own."""

    def stop(self) -> ClientsOutcome:
        """Send nothing more, wait for the last answers, and return all of them."""
        ...


def request_head(job: ClientsJob, model: str) -> str:
    """Return what comes before the length of the body."""
    return (
        f"POST /v1/apps/{model} HTTP/1.1\r\nHost: {job.host}:{job.port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: "
    )


@final
class PythonClients:
    """The clients where no compiler is installed, from construction to `stop`.

    Args:
        job: What they send.
    """

    def __init__(self, job: ClientsJob) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(job, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._ours.recv()

    def stop(self) -> ClientsOutcome:
        """Send nothing more, wait for the last answers, and return all of them."""
        self._ours.send("stop")
        outcome = self._ours.recv()
        self._process.join()
        return outcome

    def kill(self) -> None:
        """Kill the process, if it runs."""
        self._process.kill()
        self._process.join()


def _run(job: ClientsJob, parent: Connection) -> None:
    loop = _Clients(job)
    parent.send("ready")
    answers = loop.run(parent)
    parent.send(ClientsOutcome(answers, float(np.percentile(loop.late_s, 99)) if loop.late_s else 0.0))


@final
class _Clients(SocketLoop):
    def __init__(self, job: ClientsJob) -> None:
        super().__init__(job.host, job.port, job.cpus)
        self.job = job
        self.answers: list[RequestEnd] = []
        self.chance = random.Random(job.seed)
        self.queue: deque[tuple[float, int, str]] = deque()
        self.free: deque[_Client] = deque()
        self.late_s: list[float] = []
        self._names, self._shares = list(job.models), list(job.models.values())
        self.heads = {name: request_head(job, name) for name in job.models}
        self._next = job.first
        self._retry_s = 0.0

    def run(self, parent: Connection) -> list[RequestEnd]:
        due_s = time.monotonic()
        look_s = end_s = math.inf
        look_s = 0.0
        while (now_s := time.monotonic()) < end_s and not (end_s < math.inf and self._is_over()):
            if now_s >= look_s:
                look_s = now_s + STOP_LOOKS_S
                self._give_up(now_s)
                if end_s == math.inf and parent.poll():
                    end_s = now_s + HANG_S + 1
            while due_s <= now_s and end_s == math.inf:
                model = self.chance.choices(self._names, self._shares)[0]
                self.queue.append((due_s, self._next, model))
                self.late_s.append(now_s - due_s)
                self._next += 1
                due_s += self.chance.expovariate(self.job.rate)
            self._send(now_s)
            self.handle_events(min(TURN_S, max(0.0, due_s - now_s)))
        self._finish()
        return self.answers

    def over(self, client: "_Client") -> None:
        """Take note that a client's connection ended."""
        if client.opening:
            self._retry_s = time.monotonic() + RETRY_S
        if client in self.free:
            self.free.remove(client)

    def _is_over(self) -> bool:
        return not self.queue and all(client.request is None for client in self._clients())

    def _clients(self) -> "list[_Client]":
        return [each for each in self.by_number.values() if isinstance(each, _Client)]

    def _send(self, now_s: float) -> None:
        while self.queue and self.free:
            self.free.popleft().ask(*self.queue.popleft())
        if self.queue and now_s >= self._retry_s:
            opening = sum(client.opening for client in self._clients())
            for _ in range(min(len(self.queue) - opening, self.job.connections - len(self.by_number))):
                _Client(self)

    def _give_up(self, now_s: float) -> None:
        for client in self._clients():
            if client.request is not None and now_s - client.sent_s > HANG_S:
                client.end("hung")
                client.close()
            elif client.opening and now_s - client.made_s > HANG_S:
                client.close()
        while self.queue and now_s - self.queue[0][0] > HANG_S:
            self._unsent(now_s)

    def _unsent(self, now_s: float) -> None:
        due_s, number, model = self.queue.popleft()
        self.answers.append(
            RequestEnd(number=number, model=model, due_s=due_s, sent_s=due_s, ended_s=now_s, end="unsent")
        )

    def _finish(self) -> None:
        for client in self._clients():
            if client.request is not None:
                client.end("hung")
        while self.queue:
            self._unsent(time.monotonic())
        self.close()


@final
class _Client(PolledSocket):
    def __init__(self, clients: _Clients) -> None:
        self._clients = clients
        self._buffer = b""
        self._port = 0
        self._last = 0
        self._uses = 1 + int(clients.chance.expovariate(1 / REQUESTS_EACH))
        self.request: tuple[float, int, str] | None = None
        self.sent_s = 0.0
        self.made_s = time.monotonic()
        super().__init__(clients)

    def opened(self) -> None:
        self._port = self._socket.getsockname()[1]
        self._clients.free.append(self)

    def ask(self, due_s: float, number: int, model: str) -> None:
        """Send a request."""
        self.request = due_s, number, model
        self._last = number
        self.sent_s = time.monotonic()
        body = json.dumps(input_of(number))
        self.write(f"{self._clients.heads[model]}{len(body)}\r\n\r\n{body}".encode())

    def end(self, end: End, status: int = 0, content: bytes = b"") -> None:
        """Write down how the request ended."""
        due_s, number, model = self.request or (self.sent_s, self._last, "")
        self.request = None
        said = json.loads(content) if status == 200 else {}
        self._clients.answers.append(
            RequestEnd(
                number=number,
                model=model,
                due_s=due_s,
                sent_s=self.sent_s,
                ended_s=time.monotonic(),
                end=end,
                status=status,
                port=self._port,
                doubles=tuple(said.get("doubles", ())),
                weights=said.get("weights", 0),
                source=said.get("source", 0),
                opened_s=self.made_s,
                sentence="" if status == 200 else content[:SENTENCE_BYTES].decode(errors="replace"),
            )
        )

    def lost(self, reason: str) -> None:
        self._clients.over(self)
        self.close()
        if self.request is not None:
            self.end("reset")

    def received(self, data: bytes) -> None:
        if self.request is None:
            # 408 before an idle connection is closed belongs to no request, and answers none.
            if not data.startswith(b"HTTP/1.1 408 "):
                self.end("unasked")
            self._clients.over(self)
            self.close()
            return
        buffer = self._buffer = self._buffer + data
        head, found, rest = buffer.partition(b"\r\n\r\n")
        if not found:
            return
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        length = int(fields.get(b"content-length", b"0"))
        if len(rest) < length:
            return
        self._buffer = b""
        self.end("answer", int(head[9:12]), rest[:length])
        self._uses -= 1
        if len(rest) > length:
            self.end("unasked")
        if len(rest) > length or self._uses <= 0 or fields.get(b"connection") == b"close":
            self.close()
        else:
            self._clients.free.append(self)

"""The compiled clients of a chaos run, clients.cpp: their jobs and outcomes."""

import struct
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, final, get_args

import numpy as np

from penstock.bench.chaos.chaos_history import End, RequestEnd
from penstock.bench.chaos.clients import (
    HANG_S,
    REQUESTS_EACH,
    ClientsJob,
    ClientsOutcome,
    PythonClients,
    RunningClients,
    request_head,
)
from penstock.bench.compiled_program import (
    RunningProgram,
    SenderKind,
    checked_kind,
    compiled_program,
    resolved,
    running_program,
)
from penstock.core.remote.remote_copy import DEFAULT_CACHE

SOURCE = Path(__file__).with_name("clients.cpp")
HEAD = struct.Struct("=3d3Q4I64s")
MODEL = struct.Struct("=dQ")
LATE, SENTENCE = struct.Struct("=dQ"), struct.Struct("=2Q")
ENDS = cast("tuple[End, ...]", get_args(End))
ANSWER = ENDS.index("answer")
ENDED = np.dtype(
    [
        ("number", "u8"),
        *((name, "f8") for name in ("due_s", "sent_s", "ended_s", "opened_s")),
        ("doubles", "f8", 4),
        *((name, "u4") for name in ("model", "end", "status", "port")),
        *((name, "i4") for name in ("weights", "source")),
    ]
)
# Requests that are read together; there may be millions.
READ_AT_ONCE = 10_000


@contextmanager
def running_clients(
    job: ClientsJob, sender: SenderKind = "auto", cache: Path = DEFAULT_CACHE
) -> Generator[RunningClients]:
    """Run the clients; they are killed at the end of the block.

    Args:
        job: What they send.
        sender: `"auto"` takes the compiled ones where a compiler is installed.
        cache: The folder that holds their program.

    Raises:
        BenchError: The server cannot be reached, or there is no compiler for the compiled ones.
    """
    if checked_kind(sender) == "python":
        clients = PythonClients(job)
        try:
            yield clients
        finally:
            clients.kill()
        return
    with running_program(compiled_program(SOURCE, cache), _parts(job), job.cpus) as process:
        yield _CompiledClients(job, process)


@final
class _CompiledClients:
    def __init__(self, job: ClientsJob, process: RunningProgram) -> None:
        self._names = tuple(job.models)
        self._process = process
        self._sentences: dict[int, str] = {}

    def stop(self) -> ClientsOutcome:
        self._process.process.terminate()
        outcome = self._process.outcome(time.monotonic() + HANG_S)
        late_s, sentences = LATE.unpack(outcome.read(LATE.size))
        for _ in range(sentences):
            number, length = SENTENCE.unpack(outcome.read(SENTENCE.size))
            self._sentences[number] = outcome.read(length).decode(errors="replace")
        answers: list[RequestEnd] = []
        while part := outcome.read(READ_AT_ONCE * ENDED.itemsize):
            answers += map(self._request_end, np.frombuffer(part, ENDED).tolist())
        return ClientsOutcome(answers, late_s)

    def _request_end(self, each: tuple[Any, ...]) -> RequestEnd:
        number, due_s, sent_s, ended_s, opened_s, doubles, model, end, status, port, weights, source = each
        return RequestEnd(
            number=number,
            model=self._names[model],
            due_s=due_s,
            sent_s=sent_s,
            ended_s=ended_s,
            end=ENDS[end],
            status=status,
            port=port,
            doubles=tuple(doubles) if status == 200 else (),
            weights=weights,
            source=source,
            opened_s=opened_s,
            sentence=self._sentences.get(number, "") if end == ANSWER and status != 200 else "",
        )


def _parts(job: ClientsJob) -> Iterator[bytes]:
    address, port, is_ipv6 = resolved(job.host, job.port)
    yield HEAD.pack(
        *(job.rate, HANG_S, REQUESTS_EACH, job.connections, job.seed, job.first),
        *(len(job.models), port, is_ipv6, 0, address.encode()),
    )
    for name, share in job.models.items():
        head = request_head(job, name).encode()
        yield MODEL.pack(share, len(head)) + head

"""The compiled sender of requests, sender.cpp: its jobs and outcomes."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from penstock.bench.compiled_program import SenderKind, checked_kind, compiled_program, resolved, running_program
from penstock.bench.load.sender import Finished, SenderJob, SenderResult, keep_every, sum_outcome
from penstock.core.remote.remote_copy import DEFAULT_CACHE

SOURCE = Path(__file__).with_name("sender.cpp")
HEAD = struct.Struct("=4d4Q4I64s")
COUNTS = struct.Struct("=4Q")
ANSWER = np.dtype([("due_s", "f8"), ("done_s", "f8"), ("which", "u4"), ("status", "u4"), ("nbytes", "u8")])
NO_ANSWERS_KEPT = 1 << 62


def sender_program(kind: SenderKind, cache: Path = DEFAULT_CACHE) -> Path | None:
    """Return the compiled sender, building it if need be; None for the Python one.

    Args:
        kind: `"auto"` takes the compiled one where a compiler is installed.
        cache: The folder that holds it.

    Raises:
        BenchError: There is no compiler for what is named, or it cannot be built.
    """
    return None if checked_kind(kind) == "python" else compiled_program(SOURCE, cache)


def run_compiled(program: Path, jobs: Sequence[SenderJob]) -> list[SenderResult]:
    """Send the requests of some jobs, each in a process of the compiled sender.

    Raises:
        BenchError: The server cannot be reached, or a process failed.
    """
    with ExitStack() as stack:
        running = [(job, stack.enter_context(running_program(program, _parts(job), job.cpus))) for job in jobs]
        return [_result(job, process.outcome(job.end_s + job.stragglers_s)) for job, process in running]


def _parts(job: SenderJob) -> Iterator[bytes]:
    target = job.target
    address, port, is_ipv6 = resolved(target.host, target.port)
    due_s = np.zeros(0) if job.due_s is None else job.due_s
    yield HEAD.pack(
        *(job.start_s, job.measured_from_s, job.end_s, job.stragglers_s, job.connections),
        *(keep_every(job) if target.answers is not None else NO_ANSWERS_KEPT, len(target.requests), len(due_s)),
        *(port, is_ipv6, job.due_s is None, 0, address.encode()),
    )
    for request in target.requests:
        yield struct.pack("=Q", len(request)) + request
    yield due_s.astype(np.float64).tobytes()


def _result(job: SenderJob, outcome: IO[bytes]) -> SenderResult:
    count, unanswered, late, queued = COUNTS.unpack(outcome.read(COUNTS.size))
    answers = np.frombuffer(outcome.read(count * ANSWER.itemsize), ANSWER)
    bodies = [outcome.read(nbytes) if nbytes else b"" for nbytes in answers["nbytes"].tolist()]
    finished = Finished(
        due_s=answers["due_s"],
        done_s=answers["done_s"],
        which=answers["which"].astype(np.int64),
        statuses=answers["status"].astype(np.int64),
    )
    return sum_outcome(job, finished, bodies, unanswered, late=late, queued=queued)

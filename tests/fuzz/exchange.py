"""One connection of a hostile client: sending bytes, and parsing and checking the replies."""

import asyncio
import json
import math
import random
import re
import socket
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.fuzz.requests import ANY, Case

# The longest that any answer may take; the server ends a silent client earlier than that.
LONGEST_S = 10.0
# Bytes after which an endless request that nobody refuses is a failure.
MOST_ENDLESS = 64 << 20
BYTE_BY_BYTE = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One answer.

    Args:
        status: Its status.
        headers: By lower-case name.
        body: As it was sent.
    """

    status: int
    headers: dict[str, str]
    body: bytes


class Unreadable(Exception):
    """The reply is not HTTP."""


def answers_in(received: bytes, *, is_head: bool = False) -> list[Answer]:
    """Parse the replies of a server.

    Raises:
        Unreadable: It is not a row of whole answers.
    """
    answers: list[Answer] = []
    while received:
        head, end, received = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        protocol, _, rest = first.partition(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if protocol != "HTTP/1.1" or not end or not rest[:3].isdigit():
            raise Unreadable(f"{first[:80]!r} begins no answer")
        if rest[:3] == "100":
            continue
        dates = sum(line.lower().startswith("date:") for line in lines)
        if dates != 1:
            raise Unreadable(f"an answer has {dates} lines of Date")
        length = 0 if is_head else int(headers.get("content-length", "-1"))
        if not 0 <= length <= len(received):
            raise Unreadable(f"an answer of {length:,} bytes has {len(received):,}")
        answers.append(Answer(status=int(rest[:3]), headers=headers, body=received[:length]))
        received = received[length:]
    return answers


def statuses_in(received: bytes) -> list[int]:
    """Find the statuses in the bytes of a server, whatever the length of each reply."""
    return [int(found) for found in re.findall(rb"HTTP/1\.1 ([2-5][0-9][0-9]) ", received)]


def cut(data: bytes, chance: random.Random) -> list[bytes]:
    """Cut bytes at random, into single bytes, or not at all."""
    way = chance.randrange(4)
    if way == 0:
        return [data]
    places = range(len(data)) if way == 1 and len(data) <= BYTE_BY_BYTE else [
        chance.randrange(len(data) + 1) for _ in range(chance.randint(1, 8))
    ]  # fmt: skip
    return [data[start:end] for start, end in pairwise(sorted({0, len(data), *places}))]


async def exchanged(address: tuple[str, int], case: Case, chance: random.Random) -> bytes:
    """Send a case, shut down sending, and return all bytes until the server closes.

    Raises:
        TimeoutError: The server neither answers nor closes.
    """
    reader, writer = await opened(address)
    received = bytearray()
    receiving = asyncio.create_task(_receive(reader, received))
    try:
        for piece in cut(case.data, chance):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        sent = 0
        while case.endless and not received and not receiving.done() and sent < MOST_ENDLESS:
            writer.write(case.endless)
            await writer.drain()
            sent += len(case.endless)
            await asyncio.sleep(0)
        writer.write_eof()
    except OSError:
        pass  # refused and closed meanwhile; what it said before that is received
    try:
        await asyncio.wait_for(receiving, LONGEST_S)
    finally:
        writer.transport.abort()
    return bytes(received)


async def opened(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that sends every piece at once."""
    reader, writer = await asyncio.open_connection(*address)
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return reader, writer


async def _receive(reader: asyncio.StreamReader, received: bytearray) -> None:
    try:
        while part := await reader.read(1 << 16):
            received += part
    except ConnectionError:
        return


async def reset(address: tuple[str, int], data: bytes) -> None:
    """Send some bytes and reset the connection."""
    _, writer = await opened(address)
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.write(data)
    await asyncio.sleep(0)
    writer.transport.abort()


def what_is_wrong(case: Case, received: bytes, expected: dict[str, Any] | None) -> str | None:
    """Explain why the reply to a case is wrong; None if it is right.

    Args:
        case: What was sent.
        received: What came back.
        expected: The content of a right answer, if it is known.
    """
    statuses = statuses_in(received)
    if case.statuses is None:
        return None if set(statuses) <= ANY else f"{statuses} for what was changed at random"
    try:
        answers = answers_in(received, is_head=case.is_head)
    except Unreadable as error:
        return str(error)
    statuses = [answer.status for answer in answers]
    right = len(statuses) == len(case.statuses) and all(map(frozenset.__contains__, case.statuses, statuses))
    if not right:
        wanted = [sorted(group) for group in case.statuses]
        return f"{statuses} where {wanted} is right: {received[:300]!r}"
    for answer in answers:
        if answer.status >= 400 and not case.is_head and not _is_a_sentence(answer):
            return f"a refusal without its sentence: {answer.body[:200]!r}"
        if answer.status == 200 and expected is not None and not alike(content_of(answer), expected):
            return f"another answer than before: {answer.body[:200]!r}"
    return None


def content_of(answer: Answer) -> Any:
    """Decode a reply: JSON, or the numbers of an inference."""
    content = json.loads(answer.body)
    return content["outputs"][0]["data"] if isinstance(content, dict) and "outputs" in content else content


def alike(one: Any, other: Any) -> bool:
    """Compare two replies up to the rounding of sums in another order."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-4)
    return one == other


def _is_a_sentence(answer: Answer) -> bool:
    return answer.headers.get("content-type") == "application/json" and bool(json.loads(answer.body)["error"])

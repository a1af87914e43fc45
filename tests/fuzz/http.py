"""Throw connections at a server that is running: `python -m tests.fuzz.http URL --inputs N [--seed S] [--pid PID]`.

After each batch a neighbour's request must be answered rightly and no slot be held, and in the end the server must hold
no more memory and descriptors than before. Prints a table; exits with 1 on any failure.
"""

import argparse
import asyncio
import http.client
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, final
from urllib.parse import urlsplit

from penstock.core.spec import TensorSpec
from tests.fuzz import exchange, process, requests
from tests.fuzz.mutate import mutations
from tests.fuzz.requests import RIGHT, App, Case

BATCH = 40
AT_ONCE = 16
IDLE_CONNECTIONS = 2_000
SLOW_CONNECTIONS = 20
NEIGHBOUR_S = 2.0
SETTLING_S = 4.0
# What an allocator keeps after the first round is not growth; a leak of one large body a round is.
MOST_GROWTH_BYTES = 24 << 20
# These take long or many connections: once in so many rounds.
SELDOM = frozenset({"never read", "slow", "idle"})
SELDOM_ROUNDS = 10
# Not for a short run: they take seconds, or more descriptors than a system gives by default.
SLOW_KINDS = frozenset({"idle", "without end"})
SHOWN_FAILURES = 20


@dataclass(slots=True)
class Row:
    """Results of one kind of input."""

    inputs: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])


def app_of(description: dict[str, Any]) -> App:
    """The application that `GET /v1/apps` describes."""
    return App(
        name=description["name"],
        input=TensorSpec.from_json(description["input"]),
        accepts=tuple(description["accepts"]),
        max_body_bytes=description["max_body_bytes"],
    )


@final
class Fuzzer:
    """One run against one server.

    Args:
        host: Of the server.
        port: Of the server.
        seed: Of chance.
    """

    def __init__(self, host: str, port: int, seed: int) -> None:
        self.address = host, port
        self.rows: dict[str, Row] = {}
        self._chance = random.Random(seed)
        self._app = app_of(json.loads(self._get("/v1/apps"))["apps"][0])
        self._expected = [self._asked(variant) for variant in (0, 1)]
        seeds = [requests.right(self._app, 0, self._chance) for _ in range(20)]
        seeds += [requests.right_infer(self._app, 1, self._chance) for _ in range(10)]
        seeds += [requests.wrong(self._app, self._chance).data[:20_000] for _ in range(20)]
        self._mutations = mutations(seeds, self._chance)
        self.kinds: dict[str, Callable[[Row], Awaitable[None]]] = {
            "right": self._each(self._right),
            "right, pipelined": self._each(self._pipelined),
            "right, Open Inference Protocol": self._each(self._right_infer),
            "what the server says": self._each(lambda: requests.looking(self._app, self._chance)),
            "wrong content": self._each(lambda: requests.wrong(self._app, self._chance)),
            "not HTTP": self._each(lambda: requests.not_http(self._app, self._chance)),
            "without end": self._each(lambda: requests.endless(self._app, self._chance)),
            "changed at random": self._each(lambda: Case(data=next(self._mutations), statuses=None)),
            "chance alone": self._each(self._noise),
            "cut short": self._each(self._cut_short),
            "reset": self._reset,
            "never read": self._never_read,
            "slow": self._slow,
            "idle": self._idle,
        }

    def _right(self) -> Case:
        variant = self._chance.randrange(2)
        return Case(data=requests.right(self._app, variant, self._chance), statuses=(RIGHT,), variant=variant)

    def _right_infer(self) -> Case:
        return Case(data=requests.right_infer(self._app, self._chance.randrange(2), self._chance), statuses=(RIGHT,))

    def _pipelined(self) -> Case:
        variant, count = self._chance.randrange(2), self._chance.randint(2, 40)
        data = b"".join(requests.right(self._app, variant, self._chance) for _ in range(count))
        return Case(data=data, statuses=(RIGHT,) * count, variant=variant)

    def _noise(self) -> Case:
        return Case(data=self._chance.randbytes(self._chance.randrange(1, 2_000)), statuses=None)

    def _cut_short(self) -> Case:
        data = requests.right(self._app, 0, self._chance)
        return Case(data=data[: self._chance.randrange(1, len(data) - 8)], statuses=())

    def _each(self, make: Callable[[], Case]) -> Callable[[Row], Awaitable[None]]:
        async def batch(row: Row) -> None:
            cases = iter([make() for _ in range(BATCH)])

            async def client() -> None:
                for case in cases:
                    await self._one(row, case)

            await asyncio.gather(*(client() for _ in range(AT_ONCE)))

        return batch

    async def _one(self, row: Row, case: Case) -> None:
        start_s = time.monotonic()
        try:
            received = await exchange.exchanged(self.address, case, self._chance)
        except TimeoutError:
            row.failures.append(f"no end after {exchange.LONGEST_S:g} s: {case.data[:300]!r}")
            return
        finally:
            row.inputs += 1
            row.longest_s = max(row.longest_s, time.monotonic() - start_s)
        expected = None if case.variant is None else self._expected[case.variant]
        wrong = exchange.what_is_wrong(case, received, expected)
        if wrong is not None:
            row.failures.append(f"{wrong} for {case.data[:300]!r}{' and more' if case.data[300:] else ''}")
            return
        row.statuses.update(map(str, exchange.statuses_in(received)))

    async def _reset(self, row: Row) -> None:
        for _ in range(BATCH):
            data = requests.right(self._app, 0, self._chance) * self._chance.choice((1, 1, 30))
            await exchange.reset(self.address, data[: self._chance.randrange(1, len(data) + 1)])
            row.inputs += 1

    async def _never_read(self, row: Row) -> None:
        """Send many requests and read no reply: the server must stop reading (backpressure)."""
        writers = [(await exchange.opened(self.address))[1] for _ in range(4)]
        asked = requests.request("GET", "/v1/stats") * 500
        for writer in writers:
            for _ in range(20):
                writer.write(asked)
            row.inputs += 1
        await asyncio.sleep(0.5)
        await self._neighbour(row)
        for writer in writers:
            writer.transport.abort()

    async def _slow(self, row: Row) -> None:
        """Send requests a few bytes at a time: they are answered, and no other client waits."""

        async def trickle(data: bytes) -> None:
            reader, writer = await exchange.opened(self.address)
            step = max(1, len(data) // 20)
            for start in range(0, len(data), step):
                writer.write(data[start : start + step])
                await asyncio.sleep(0.05)
            answer = await asyncio.wait_for(reader.readline(), exchange.LONGEST_S)
            writer.transport.abort()
            row.inputs += 1
            row.statuses[answer[9:12].decode()] += 1
            if int(answer[9:12] or b"0") not in RIGHT:
                row.failures.append(f"{answer!r} for a slow {data[:300]!r}")

        sent = [requests.right(self._app, 0, self._chance) for _ in range(SLOW_CONNECTIONS)]
        slow = asyncio.gather(*map(trickle, sent))
        await asyncio.sleep(0.2)
        await self._neighbour(row)
        await slow

    async def _idle(self, row: Row) -> None:
        """Open thousands of silent connections, half of them after the beginning of a request."""
        writers: list[asyncio.StreamWriter] = []
        for count in range(IDLE_CONNECTIONS):
            writers.append((await exchange.opened(self.address))[1])
            if count % 2:
                writers[-1].write(b"GET / HT")
            row.inputs += 1
        await self._neighbour(row)
        for writer in writers:
            writer.transport.abort()

    async def run(self, name: str) -> None:
        """One batch of one kind, and the neighbour after it."""
        row = self.rows.setdefault(name, Row())
        start_s = time.monotonic()
        await self.kinds[name](row)
        await self._neighbour(row)
        row.seconds += time.monotonic() - start_s

    async def _neighbour(self, row: Row) -> None:
        start_s = time.monotonic()
        try:
            answer = await asyncio.to_thread(self._asked, 0)
            held = await asyncio.to_thread(self._slots_held)
        except (OSError, http.client.HTTPException, ValueError) as error:
            row.failures.append(f"the neighbour got no answer ({error!r})")
            return
        if not exchange.alike(answer, self._expected[0]):
            row.failures.append(f"the neighbour got {answer!r}")
        if held:
            row.failures.append(f"{held} slots are still held")
        if time.monotonic() - start_s > NEIGHBOUR_S:
            row.failures.append(f"the neighbour waited {time.monotonic() - start_s:.1f} s")

    def _asked(self, variant: int) -> Any:
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        body = self._app.chunk(variant).tobytes()
        headers = {"Content-Type": requests.RAW, "Penstock-Latency-Ms": "5000"}
        connection.request("POST", f"/v1/apps/{self._app.name}", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status != 200:
            raise ValueError(f"{answer.status} {content[:200]!r}")
        return json.loads(content)

    def _slots_held(self) -> int:
        # The engine may still be at work for clients that are gone.
        end_s = time.monotonic() + NEIGHBOUR_S / 2
        while (held := json.loads(self._get("/v1/stats"))["slots"]["in_use"]) and time.monotonic() < end_s:
            time.sleep(0.05)
        return held

    def _get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection(*self.address, timeout=10)
        connection.request("GET", path)
        content = connection.getresponse().read()
        connection.close()
        return content


def report(rows: dict[str, Row]) -> int:
    """Print the table and the failures; return their number."""
    print(f"{'kind':32} {'inputs':>8} {'took':>7} {'longest':>9} {'failures':>8}  answers")
    for name, row in rows.items():
        statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(row.statuses.items()))
        figures = f"{row.inputs:8,} {row.seconds:5.1f} s {row.longest_s * 1e3:6.0f} ms {len(row.failures):8,}"
        print(f"{name:32} {figures}  {statuses}")
    failures = [f"{name}: {failure}" for name, row in rows.items() for failure in row.failures]
    for failure in failures[:SHOWN_FAILURES]:
        print(failure)
    return len(failures)


def settled(pid: int, before: int) -> int:
    """Count the descriptors of a server after it has closed its connections."""
    end_s = time.monotonic() + SETTLING_S
    while process.descriptors(pid) > before and time.monotonic() < end_s:
        time.sleep(0.1)
    return process.descriptors(pid)


async def fuzzed(fuzzer: Fuzzer, inputs: int, pid: int | None) -> Row:
    """Send batches of every kind up to a number of inputs; report the resources of the server's process."""
    row = Row()
    before = memory = 0
    rounds = 0
    while sum(other.inputs for other in fuzzer.rows.values()) < inputs:
        for name in fuzzer.kinds:
            if name not in SELDOM or rounds % SELDOM_ROUNDS == 0:
                await fuzzer.run(name)
        rounds += 1
        if sum(len(other.failures) for other in fuzzer.rows.values()) >= SHOWN_FAILURES:
            break
        # What is allocated once is there after the first round.
        if pid is not None and rounds == 1:
            before, memory = await asyncio.to_thread(settled, pid, 0), process.memory_bytes(pid)
    if pid is None:
        print("The server's process is not seen from here; give --pid to have its memory and descriptors watched.")
        return row
    after, now = await asyncio.to_thread(settled, pid, before), process.memory_bytes(pid)
    print(f"{rounds} rounds; memory {memory / 1e6:.0f} -> {now / 1e6:.0f} MB, descriptors {before} -> {after}")
    if after > before:
        row.failures.append(f"{after - before} descriptors more than after the first round")
    if now - memory > MOST_GROWTH_BYTES:
        row.failures.append(f"{(now - memory) / 1e6:.0f} MB more than after the first round")
    return row


def main() -> int:
    """Run the command line; return 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.http", description=__doc__)
    parser.add_argument("url", help="such as http://127.0.0.1:8000/")
    parser.add_argument("--inputs", type=int, default=10_000, help="at least so many are sent, in whole rounds")
    parser.add_argument("--seed", type=int, default=1, help="of chance")
    parser.add_argument("--pid", type=int, help="the server's process; by default who listens on the port here")
    arguments = parser.parse_args()
    place = urlsplit(arguments.url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    fuzzer = Fuzzer(host, port, arguments.seed)
    start_s = time.monotonic()
    fuzzer.rows["the server's process"] = asyncio.run(
        fuzzed(fuzzer, arguments.inputs, arguments.pid or process.listening_on(port))
    )
    failures = report(fuzzer.rows)
    sent, seconds = sum(row.inputs for row in fuzzer.rows.values()), time.monotonic() - start_s
    print(f"{sent:,} inputs, {sent / seconds:,.0f} inputs/s, {failures:,} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

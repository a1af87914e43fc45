"""The listening side of a front-end: accepts connections, closes inactive ones, drains."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import nlargest
from typing import Any, cast, final

from penstock.core.errors import Overloaded
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.exchange.access import is_probe
from penstock.serve.exchange.open_connections import OpenConnections, all_in_use, has_bytes
from penstock.serve.exchange.peer import Peer
from penstock.serve.exchange.request import Head
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.exchange.reserved_places import ReservedPlaces
from penstock.serve.exchange.response import Handlers
from penstock.serve.http.answer_cost import AnswerCost
from penstock.serve.http.complete_connection import LINGER_S
from penstock.serve.http.connection import Connection
from penstock.serve.http.neglected_queues import NeglectedQueues
from penstock.serve.http.parser import HeadCache, RequestParser
from penstock.serve.http.refusals import Refusals
from penstock.serve.http.request_age import request_age
from penstock.serve.http.response_date import ResponseDate
from penstock.serve.http.server_sockets import BACKLOG
from penstock.serve.http.tls_files import tls_of
from penstock.serve.settings import LimitSettings, NetworkSettings
from penstock.serve.streams.quotas import address_block

log = logging.getLogger(__name__)

SWEEP_S = 0.5
# Connections swept in one iteration of the event loop.
SWEPT = 500
# A drained server waits this long for requests that are already in its sockets.
GRACE_S = 0.25
RETRY_S = 0.1
# Index of the front-end's own socket among those it accepts from.
OWN = -1
# A connection that was handed over stays for a while: one that does most of a front-end's work would go back.
STAYS_NS = 10_000_000_000
# Those in the middle of a request are waited for, so long and so many for each that is to be handed over.
HAND_OVER_S, CANDIDATES = 1.0, 4
# Connections accepted at once where others must come first, and those that another front-end neglects.
ACCEPTED, NEGLECTED = 4, 16


@final
@dataclass(eq=False)
class Listener:
    """The connections of one front-end.

    Args:
        network: TLS.
        limits: Limits and timeouts.
        listener: The socket that clients connect to.
        handlers: Answer the requests.
        batch_loop: Runs the batches.
        max_body_bytes: Returns the maximum size of a body after a head.
        budget_ns: Latency budget of a request that names none.
        bounds: Bounds of requests that have not come whole, which all connections share.
        answered: Returns the number of answers and chunks of streams so far.
        date: The date of responses.

    Attributes:
        refusals: The refusals of all connections.

    Raises:
        ServeError: The TLS files cannot be used.
    """

    network: NetworkSettings
    limits: LimitSettings
    listener: socket.socket
    handlers: Handlers
    batch_loop: BatchLoop
    max_body_bytes: Callable[[Head], int]
    budget_ns: int
    bounds: RequestBounds
    answered: Callable[[], int]
    date: ResponseDate
    _known: HeadCache = field(default_factory=HeadCache, init=False)
    _connections: OpenConnections[Peer] = field(init=False)
    # Those beyond the limit, and those that made room.
    _others: set[Peer] = field(default_factory=set[Peer], init=False)
    _connecting: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]], init=False)
    # The sockets it accepts from, by the index of their front-end.
    _accepting: dict[int, socket.socket] = field(default_factory=dict[int, socket.socket], init=False)
    _neglected: NeglectedQueues | None = field(default=None, init=False)
    # Sockets of other front-ends that it accepts from in a turn that waits.
    _neglected_in_turn: set[socket.socket] = field(default_factory=set[socket.socket], init=False)
    # A connection that waits until another one is old enough to make room for it, by the socket that it came from.
    _next: dict[socket.socket, tuple[socket.socket, str]] = field(
        default_factory=dict[socket.socket, tuple[socket.socket, str]], init=False
    )
    # When the system may have room for connections again.
    _has_room_s: float = field(default=0.0, init=False)
    _draining: bool = field(default=False, init=False)
    # Those beyond the limit: they answer health probes alone.
    _reserved: ReservedPlaces[socket.socket] = field(init=False)
    # Those that made room: they stay open so that their clients can read why.
    _evicted: ReservedPlaces[socket.socket] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = self.batch_loop.turns
        self._connections = OpenConnections(has_bytes)
        loop = asyncio.get_running_loop()
        self._reserved = ReservedPlaces(_shut, loop.call_later)
        self._evicted = ReservedPlaces(_shut, loop.call_later)
        answer_cost = AnswerCost(time.process_time_ns, self.answered)
        self.refusals = Refusals(self.budget_ns, loop.call_soon, time.monotonic_ns, answer_cost=answer_cost)
        self._tls: dict[str, Any] = {}
        if (tls := tls_of(self.network)) is not None:
            self._tls = {
                "ssl": tls,
                "ssl_handshake_timeout": min(self.limits.request_timeout_s, self.limits.head_timeout_s),
                # A client that does not close TLS must not delay a drain.
                "ssl_shutdown_timeout": LINGER_S,
            }

    def forget_heads(self) -> None:
        """Drop cached routes, after the models behind names have changed."""
        self._known.clear()

    def listen(self) -> None:
        """Start to accept connections."""
        self.listener.listen(BACKLOG)
        self.accept_from(OWN, self.listener)

    def accept_from(self, index: int, listener: socket.socket) -> None:
        """Accept connections from a socket, until `release`: its own, or that of another front-end."""
        listener.setblocking(False)
        self._accepting[index] = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def watch(self, others: Sequence[socket.socket]) -> None:
        """Keep the sockets of other front-ends, until a drain; `note_work` looks at them."""
        self._neglected = NeglectedQueues(others, self._accept_neglected)

    def note_work(self) -> None:
        """Accept what waits for too long at the sockets of other front-ends, while this one has work."""
        if self._neglected is not None and not self._draining:
            self._neglected.note_work()

    def release(self, index: int) -> None:
        """Stop accepting from a socket, and close it."""
        listener = self._accepting.pop(index, None)
        if listener is not None:
            if (waits := self._next.pop(listener, None)) is not None:
                self._take(*waits, has_room=self._has_room())
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def close_after_next(self) -> None:
        """Close every connection after its next answer."""
        self._draining = True
        for connection in self._all():
            connection.close_after_next()

    async def drain(self, seconds: float, hurry: Callable[[], bool]) -> None:
        """Answer the requests that were accepted and those still in the sockets, then close every connection.

        Args:
            seconds: Maximum duration.
            hurry: Returns whether to end at once.
        """
        end_s = time.monotonic() + seconds
        self.close_after_next()
        if OWN not in self._accepting:
            self._leave_to_others()
        # Balancers see that the server is not ready; clients that go on see `Connection: close`.
        await asyncio.sleep(min(GRACE_S, seconds))
        # Closing a listening socket resets the connections in its backlog: accept them first.
        for index, listener in list(self._accepting.items()):
            self._accept(listener)
            self.release(index)
        if self._neglected is not None:
            self._neglected.close(self._accept)
        self.listener.close()
        await asyncio.sleep(min(GRACE_S, seconds))
        self.refusals.end()
        for connection in self._all():
            connection.close_when_idle()
        while (self._connections or self._others) and time.monotonic() < end_s and not hurry():
            await asyncio.sleep(0.005)
        self.abort()

    def _leave_to_others(self) -> None:
        """Close the sockets at once: this front-end has no models yet. Those that serve accept what still waits."""
        if self._neglected is not None:
            self._neglected.close(lambda listener: None)
        self.listener.close()

    def abort(self) -> None:
        """Close every connection at once."""
        for connection in self._all():
            connection.abort()

    async def movable(self, since_ns: int) -> tuple[int, int]:
        """Count the connections that `hand_over` could give away, each after its present request.

        Args:
            since_ns: Those that have received nothing since this time are not counted: what they would take along is
                not known.

        Returns:
            Their number, and how many more connections this listener has room for.
        """
        count, connections = 0, [*self._connections]
        for begin in range(0, len(connections), SWEPT):
            now_ns = time.monotonic_ns()
            for each in connections[begin : begin + SWEPT]:
                if isinstance(each, Connection) and each.last_active_ns >= since_ns and each.stays_ns <= now_ns:
                    count += each.may_move
            await asyncio.sleep(0)
        # Without a descriptor that is free, a connection that comes would be lost.
        has_descriptors = time.monotonic() >= self._has_room_s
        return count, max(0, self.limits.max_connections - self._connections.count) if has_descriptors else 0

    def hand_over(self, most: int) -> Iterator[int | None]:
        """Give up connections, each between two requests; those used last go first.

        Those that are in the middle of a request are waited for, up to `HAND_OVER_S`. The caller may pause meanwhile.

        Returns:
            Descriptors of their sockets, which the caller closes; None where none of them can be given up at present.
        """
        now_ns, end_s = time.monotonic_ns(), time.monotonic() + HAND_OVER_S
        peers = (each for each in self._connections if isinstance(each, Connection) and each.stays_ns <= now_ns)
        able = (each for each in peers if each.may_move)
        waiting = nlargest(CANDIDATES * most, able, key=lambda each: each.last_active_ns)
        while most and waiting and time.monotonic() < end_s:
            busy = list[Connection]()
            for connection in waiting:
                if most == 0 or self._draining:
                    return
                if (descriptor := connection.hand_over()) is not None:
                    most -= 1
                    yield descriptor
                elif connection.may_move:
                    busy.append(connection)
            waiting = busy
            yield None

    def take_over(self, client: socket.socket) -> None:
        """Go on with a connection that another front-end gave up."""
        try:
            address = client.getpeername()[0]
        except OSError:  # its client is gone
            client.close()
            return
        client.setblocking(False)
        has_room = self._has_room()
        connection = self._take(client, address, has_room=has_room)
        if has_room:
            connection.stays_ns = time.monotonic_ns() + STAYS_NS
            connection.usage.settle()
        if self._draining:
            # The drain may have closed those that are idle already, and would wait for this one.
            asyncio.get_running_loop().call_later(GRACE_S, connection.close_when_idle)

    def _accept(self, listener: socket.socket) -> None:
        """Accept all that wait, or some of them where connecting takes more than its share of the time."""
        if self._draining or not self._turns.newcomers.heavy:
            if pause_s := self._accept_some(listener, BACKLOG):
                self._pause_accepting(listener, pause_s)
        else:
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            self._turns.add_new(partial(self._accept_in_turn, listener))

    def _accept_in_turn(self, listener: socket.socket) -> None:
        if listener.fileno() < 0:
            return
        if pause_s := self._accept_some(listener, ACCEPTED):
            self._pause_accepting(listener, pause_s)
        else:
            self._accept_again(listener)

    def _accept_neglected(self, listener: socket.socket) -> None:
        if listener in self._neglected_in_turn or time.monotonic() < self._has_room_s:
            return
        if self._turns.newcomers.heavy:
            self._neglected_in_turn.add(listener)
            self._turns.add_new(partial(self._accept_neglected_in_turn, listener))
        else:
            self._accept_where_room(listener, NEGLECTED)

    def _accept_neglected_in_turn(self, listener: socket.socket) -> None:
        self._neglected_in_turn.remove(listener)
        if listener.fileno() >= 0:
            self._accept_where_room(listener, ACCEPTED)

    def _accept_where_room(self, listener: socket.socket, most: int) -> None:
        # Its owner may be about to accept, and have room.
        self._accept_some(listener, min(most, self.limits.max_connections - self._connections.count))

    def _accept_some(self, listener: socket.socket, most: int) -> float:
        """Accept up to so many connections; returns a pause in seconds where there is no room for one."""
        begin_cpu_ns = self._turns.cpu_ns()
        count, pause_s = 0, 0.0
        # A connection waits once, for those behind it too.
        may_wait = listener not in self._next and not self._draining
        # All waiting connections, not one per iteration: many may arrive while a batch runs.
        while count < most and not pause_s:
            try:
                client, address = self._next.pop(listener, None) or _accepted(listener)
            except BlockingIOError:
                break
            except OSError as error:
                log.warning("connections cannot be accepted for %g s: %s", RETRY_S, error)
                pause_s, self._has_room_s = RETRY_S, time.monotonic() + RETRY_S
                break
            has_room = self._has_room()
            if not has_room and may_wait:
                pause_s = self._connections.wait_s(time.monotonic_ns())
            if pause_s:
                # Those behind it wait with it, in the order in which they came, for a tenth of a second at most.
                self._next[listener] = client, address
            else:
                self._take(client, address, has_room=has_room)
                count += 1
        self._turns.charge_connecting(begin_cpu_ns, count)
        return pause_s

    def _take(self, client: socket.socket, address: str, *, has_room: bool) -> Connection:
        if has_room:
            connection = self._connection(client)
            self._connections.accept(connection, client, address_block(address), time.monotonic_ns())
        else:
            connection = self._reserved_connection(client)
            self._reserved.add(client)
        task = asyncio.get_running_loop().create_task(self._connected(client, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return connection

    def _pause_accepting(self, listener: socket.socket, seconds: float) -> None:
        # For example no descriptors are left: the socket stays readable, so an immediate retry would spin.
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(seconds, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)
            if listener in self._next:
                self._accept(listener)

    def _has_room(self) -> bool:
        """Tell whether a new connection has room, after one that does nothing has made it, where there is none."""
        if self._connections.count < self.limits.max_connections:
            return True
        found = self._connections.evict(time.monotonic_ns())
        if found is None:
            return False
        connection, client = cast(Connection, found[0]), found[1]
        connection.make_room(self._full(), self._others)
        if connection in self._others:
            self._evicted.add(client)
        else:
            _shut(client)
        return True

    def _all(self) -> list[Peer]:
        return [*self._connections, *self._others]

    async def _connected(self, waiting: socket.socket, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        try:
            waiting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(cast(Any, lambda: connection), waiting, **self._tls)
        except (OSError, ssl.SSLError) as error:
            log.info("a client was gone before it was accepted: %s", error)
            connection.open_connections.discard(connection)
            waiting.close()

    def _connection(self, client: socket.socket) -> Connection:
        parser = RequestParser(self.max_body_bytes, self._known, max_headers=self.limits.max_headers)
        return Connection(
            self.handlers,
            self._connections,
            parser,
            self.batch_loop,
            time.monotonic_ns,
            lambda: self._draining,
            request_age(client),
            self.bounds,
            self.refusals,
            self.date,
        )

    def _reserved_connection(self, client: socket.socket) -> Connection:
        """Make a connection beyond the limit: it answers one health probe, and rejects any other request."""
        parser = RequestParser(self._probed_bytes, max_headers=self.limits.max_headers)
        handlers = Handlers(handle=self.handlers.handle, reject=self.handlers.reject)
        return Connection(
            handlers,
            self._others,
            parser,
            self.batch_loop,
            time.monotonic_ns,
            lambda: True,  # it closes after its answer
            request_age(client),
            self.bounds,
            date=self.date,
        )

    def _probed_bytes(self, head: Head) -> int:
        if is_probe(head.path):
            return self.max_body_bytes(head)
        raise self._full()

    def _full(self) -> Overloaded:
        return all_in_use(self.limits.max_connections)

    async def sweep(self) -> None:
        """Enforce the timeouts of every connection; called every `SWEEP_S`."""
        limits, now_s = self.limits, time.monotonic()
        connections = self._all()
        for begin in range(0, len(connections), SWEPT):
            for connection in connections[begin : begin + SWEPT]:
                connection.sweep(now_s, limits.idle_timeout_s, limits.request_timeout_s)
            await asyncio.sleep(0)


def _accepted(listener: socket.socket) -> tuple[socket.socket, str]:
    """A connection, and the address of its client."""
    client, address = listener.accept()
    return client, address[0]


def _shut(client: socket.socket) -> None:
    with suppress(OSError):  # it is closed already
        client.shutdown(socket.SHUT_RDWR)

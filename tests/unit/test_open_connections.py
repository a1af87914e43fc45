"""Which connection makes room for a new one."""

import socket
from dataclasses import dataclass

import pytest

from penstock.core.errors import RequestError
from penstock.serve.exchange.open_connections import EXAMINED, MIN_WAIT_S, YOUNG_NS, OpenConnections
from penstock.serve.exchange.peer import Peer
from penstock.serve.exchange.request_bounds import OLD_NS

MS = 1_000_000


@dataclass(eq=False)
class Client:
    """A connection whose state the test sets."""

    since_ns: int = 0
    begun: bool = False
    busy: bool = False
    unread: bool = False
    examined: int = 0

    def unused(self) -> tuple[int, bool] | None:
        self.examined += 1
        return None if self.busy else (self.since_ns, self.begun)

    def make_room(self, error: RequestError, others: set[Peer]) -> None: ...

    def sweep(self, now_s: float, idle_timeout_s: float, request_timeout_s: float) -> None: ...

    def close_after_next(self) -> None: ...

    def close_when_idle(self) -> None: ...

    def abort(self) -> None: ...


class Scene:
    """The connections of a server, and the time."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._clients: dict[socket.socket, Client] = {}
        self.open = OpenConnections(lambda client: self._clients[client].unread)

    def connect(self, address: str, *, begun: bool = False, busy: bool = False) -> Client:
        client, end = Client(self.now_ns, begun=begun, busy=busy), socket.socket()
        end.close()
        self._clients[end] = client
        self.open.accept(client, end, address, self.now_ns)
        self.open.add(client)
        return client

    def connect_many(self, count: int, address: str, *, begun: bool = False, busy: bool = False) -> list[Client]:
        found: list[Client] = []
        for _ in range(count):
            found.append(self.connect(address, begun=begun, busy=busy))
            self.now_ns += MS
        return found

    def evicted(self) -> Client | None:
        found = self.open.evict(self.now_ns)
        if found is None:
            return None
        assert isinstance(found[0], Client)
        assert found[0] not in self.open
        return found[0]


def test_the_longest_unused_of_the_address_with_most_connections_makes_room() -> None:
    scene = Scene()
    few = scene.connect_many(3, "b")
    many = scene.connect_many(5, "a")
    scene.now_ns += YOUNG_NS
    assert [scene.evicted() for _ in range(2)] == many[:2]
    # Both have three now: one of each.
    assert {scene.evicted(), scene.evicted()} == {many[2], few[0]}
    assert scene.open.count == 4
    assert len([scene.evicted() for _ in range(4)]) == 4
    assert (scene.evicted(), scene.open.count) == (None, 0)


def test_a_connection_that_was_used_since_goes_after_those_that_were_not() -> None:
    scene = Scene()
    first, second, third = scene.connect_many(3, "a")
    first.since_ns = scene.now_ns
    scene.now_ns += YOUNG_NS
    assert [scene.evicted() for _ in range(3)] == [second, third, first]
    clients = scene.connect_many(5, "a")
    for client, since_ms in zip(clients, (5, 3, 1, 2, 4), strict=True):
        client.since_ns = scene.now_ns + since_ms * MS
    scene.now_ns += 2 * YOUNG_NS
    assert [scene.evicted() for _ in range(5)] == [clients[place] for place in (2, 3, 1, 4, 0)]


@pytest.mark.parametrize("begun", [False, True])
def test_where_all_were_used_since_they_were_accepted_the_first_eviction_finds_one(begun: bool) -> None:
    scene = Scene()
    clients = scene.connect_many(1000, "a", begun=begun)
    for client in clients:
        client.since_ns = scene.now_ns
        scene.now_ns += MS
    scene.now_ns += YOUNG_NS
    assert scene.evicted() is clients[0]
    assert all(scene.evicted() for _ in range(990))


def test_a_burst_of_new_ones_keeps_none_from_the_place_of_an_old_one() -> None:
    scene = Scene()
    old = scene.connect_many(20, "a", begun=True)
    scene.now_ns += YOUNG_NS
    for _ in range(20):
        scene.connect("a", begun=True)
    assert [scene.evicted() for _ in range(21)] == [*old, None]


def test_who_waits_for_an_answer_or_is_young_or_has_sent_what_is_unread_stays() -> None:
    scene = Scene()
    (busy,) = scene.connect_many(1, "a", busy=True)
    (unread,) = scene.connect_many(1, "a")
    unread.unread = True
    scene.now_ns += OLD_NS
    (young,) = scene.connect_many(1, "a")
    assert scene.evicted() is None
    scene.now_ns += YOUNG_NS
    assert scene.evicted() is young
    assert scene.evicted() is None
    busy.busy = unread.unread = False
    assert scene.evicted() is None  # a moment ago they were not idle
    scene.now_ns += YOUNG_NS
    assert {scene.evicted(), scene.evicted()} == {busy, unread}


def test_a_request_that_has_just_begun_goes_only_where_there_is_nothing_else() -> None:
    scene = Scene()
    old, begun, later = scene.connect_many(3, "a", begun=True)
    (idle,) = scene.connect_many(1, "b")
    old.since_ns -= OLD_NS
    scene.now_ns += YOUNG_NS
    # More of it does not help: who dribbles can always have sent a byte.
    begun.unread = later.unread = True
    assert [scene.evicted() for _ in range(5)] == [old, idle, begun, later, None]


def test_a_large_address_whose_connections_are_all_in_use_does_not_keep_the_place_of_another() -> None:
    scene = Scene()
    scene.connect_many(100, "proxy", busy=True)
    idle = scene.connect_many(10, "a")
    scene.now_ns += YOUNG_NS
    assert [scene.evicted() for _ in range(10)] == idle
    assert scene.evicted() is None


def test_an_eviction_examines_few_connections_and_finds_the_one_that_is_free() -> None:
    scene = Scene()
    clients = scene.connect_many(1000, "a", busy=True)
    clients[700].busy = False
    scene.now_ns += YOUNG_NS
    found: list[Client | None] = []
    while not any(found):
        before = sum(client.examined for client in clients)
        found.append(scene.evicted())
        assert sum(client.examined for client in clients) - before <= EXAMINED
    assert found[-1] is clients[700]
    assert len(found) == 700 // EXAMINED + 1


def test_many_addresses_with_one_connection_each_make_room_in_turn() -> None:
    scene = Scene()
    clients = [scene.connect_many(1, str(number))[0] for number in range(20)]
    scene.now_ns += YOUNG_NS
    assert {scene.evicted() for _ in range(20)} == set(clients)


def test_what_is_gone_is_forgotten() -> None:
    scene = Scene()
    client = scene.connect("a")
    refused, end = Client(), socket.socket()
    end.close()
    scene.open.accept(refused, end, "a", scene.now_ns)
    assert scene.open.count == 2  # it counts before it is connected
    for each in (refused, client, client):
        scene.open.discard(each)
    # Nor does it leave a trace in the order.
    lasts = scene.connect("b")
    for each in scene.connect_many(1000, "b"):
        scene.open.discard(each)
    scene.now_ns += YOUNG_NS
    assert scene.evicted() is lasts
    # A WebSocket counts, and makes no room.
    stream = Client()
    scene.open.add(stream)
    scene.now_ns += OLD_NS
    assert (scene.open.count, scene.evicted()) == (1, None)


def test_whoever_finds_no_room_waits_until_the_oldest_is_old_enough() -> None:
    scene = Scene()
    scene.connect_many(3, "a", busy=True)
    assert scene.evicted() is None
    assert scene.open.wait_s(scene.now_ns) == 0.0
    first = scene.connect("a")
    began_ns = scene.now_ns
    scene.now_ns += MS
    scene.connect_many(2, "a")
    assert scene.evicted() is None
    wait_s = scene.open.wait_s(scene.now_ns)
    assert wait_s == (began_ns + YOUNG_NS - scene.now_ns) / 1e9
    scene.now_ns += round(wait_s * 1e9)
    # The wait is over, but the connection has not been examined yet. Zero would mean that there is none.
    assert scene.open.wait_s(scene.now_ns) == MIN_WAIT_S
    assert scene.evicted() is first
    assert scene.open.wait_s(scene.now_ns) == 0.0

"""Places for connections beyond the limit: how many, for how long, and who loses one."""

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.serve.exchange.reserved_places import PLACE_S, PLACES, ReservedPlaces


@dataclass
class Timers:
    """What an event loop was asked to call later, and the time."""

    now_s: float = 0.0
    _calls: list[tuple[float, Callable[[], None]]] = field(default_factory=list[tuple[float, Callable[[], None]]])

    def clock_s(self) -> float:
        return self.now_s

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._calls.append((self.now_s + seconds, call))

    @property
    def count(self) -> int:
        return len(self._calls)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        due = [call for at_s, call in self._calls if at_s <= self.now_s]
        self._calls = [each for each in self._calls if each[0] > self.now_s]
        for call in due:
            call()


class Scene:
    """The places, and the connections that have lost theirs."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.ended: list[int] = []
        self.places: ReservedPlaces[int] = ReservedPlaces(
            self.ended.append, self.timers.call_later, self.timers.clock_s
        )

    def add(self, *connections: int) -> None:
        for connection in connections:
            self.places.add(connection)


def test_each_has_its_place_for_as_long() -> None:
    scene = Scene()
    scene.add(1)
    scene.timers.advance(PLACE_S / 2)
    scene.add(2)
    assert 1 in scene.places
    assert 3 not in scene.places
    scene.timers.advance(PLACE_S / 2)
    assert (scene.ended, 1 in scene.places, 2 in scene.places) == ([1], False, True)
    scene.timers.advance(PLACE_S / 2)
    assert scene.ended == [1, 2]


def test_the_newest_stay_where_there_are_more() -> None:
    scene = Scene()
    scene.add(*range(PLACES))
    assert scene.ended == []
    scene.add(PLACES, PLACES + 1)
    assert scene.ended == [0, 1]
    # Each ends once, also those that were displaced before their time.
    scene.timers.advance(PLACE_S)
    assert scene.ended == [*range(PLACES + 2)]


def test_a_flood_has_one_timer() -> None:
    scene = Scene()
    for _ in range(10):
        scene.add(*range(len(scene.ended), len(scene.ended) + 3 * PLACES))
        scene.timers.advance(PLACE_S / 8)
        assert scene.timers.count == 1
    scene.timers.advance(PLACE_S)
    assert scene.timers.count == 0


def test_one_that_has_ended_by_itself_leaves_its_place_to_another() -> None:
    scene = Scene()
    scene.add(*range(PLACES))
    scene.places.discard(3)
    scene.places.discard(3)
    assert 3 not in scene.places
    scene.add(PLACES)
    assert scene.ended == []
    scene.timers.advance(PLACE_S)
    assert scene.ended == [each for each in range(PLACES + 1) if each != 3]


def test_ending_one_may_free_its_place_again() -> None:
    # As of a connection that is closed at once, and says so.
    timers, ended = Timers(), list[int]()

    def end(connection: int) -> None:
        ended.append(connection)
        places.discard(connection)

    places: ReservedPlaces[int] = ReservedPlaces(end, timers.call_later, timers.clock_s)
    for connection in range(PLACES + 1):
        places.add(connection)
    timers.advance(PLACE_S)
    assert ended == [*range(PLACES + 1)]

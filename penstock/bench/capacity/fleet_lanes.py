"""Lanes of a simulation: fleets that are simulated side by side, and what fails in them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.errors import BenchError

# L lanes, S servers of a lane

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """Times in which a proxy and a client notice a failure.

    Args:
        detect_ms: Time until the proxy's health checks have found out.
        connect_ms: Time that a request loses when it is sent to a server that is down and not found out.
        reconnect_ms: Time until a client's interrupted stream has connected again: this to twice this, at random.
    """

    detect_ms: float = 600.0
    connect_ms: float = 20.0
    reconnect_ms: float = 500.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise BenchError(f"{name} is {getattr(self, name):g}; it must not be below 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Servers that fail at one moment.

    Args:
        at_s: The moment, in seconds of the simulation.
        down_LS: The servers.
        detection: What others see of it.
    """

    at_s: float
    down_LS: Flags
    detection: Detection = field(default_factory=Detection)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLanes:
    """Fleets of one kind that are simulated in lockstep, each with a load of its own.

    Args:
        rate_L: Arrivals a second of each lane.
        exists_LS: The servers of each lane.
        slowness_LS: Time of a batch over its cost in `ServerModel`; 2 at half speed.
        failures: What fails, or None.
    """

    rate_L: Floats
    exists_LS: Flags
    slowness_LS: Floats
    failures: Failures | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Lanes, and servers of the largest."""
        lanes, servers = self.exists_LS.shape
        return lanes, servers


def equal_servers(rates: Sequence[float] | Floats, servers: Sequence[int] | Counts, **more: Any) -> FleetLanes:
    """Make lanes of equal servers.

    Args:
        rates: Arrivals a second of each lane.
        servers: Servers of each lane.
        more: Other fields of `FleetLanes`.
    """
    exists_LS = np.arange(max(servers)) < np.asarray(servers)[:, None]
    more = {"slowness_LS": np.ones(exists_LS.shape), **more}
    return FleetLanes(rate_L=np.asarray(rates, np.float64), exists_LS=exists_LS, **more)


def zone_and_nodes(servers: Sequence[int] | Counts, zones: int, nodes: int) -> Flags:
    """Return the servers of the first zone and some nodes of the others, `[L, S]`.

    Servers are spread over the zones in turn. At least one server of a lane stays.

    Args:
        servers: Servers of each lane.
        zones: Zones; 1 for none that fails.
        nodes: Nodes of other zones that fail at the same time.
    """
    place = np.arange(max(servers))
    down = np.zeros((len(servers), len(place)), bool)
    for lane, count in enumerate(servers):
        others = [at for at in place[:count] if zones < 2 or at % zones]
        down[lane, :count] = True
        down[lane, others[nodes:]] = False
        if not others[nodes:]:
            down[lane, count - 1] = False
    return down

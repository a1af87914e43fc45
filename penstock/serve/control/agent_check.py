"""The port that HAProxy's `agent-check` reads: one line with the state of this server and its weight.

`ready up 75%` sets the weight to 75% of the configured one and ends an earlier `drain`; `drain` leaves the connections
and brings no more; `down#why` takes the server out. HAProxy's configuration manual lists the words under `agent-check`.
"""

import asyncio
import math
import socket
from collections.abc import Callable
from typing import cast, final

from penstock.core.errors import RequestError
from penstock.serve.observe.load_report import LoadMeter
from penstock.serve.registry.model_registry import ModelRegistry

# Utilisation up to which a server has its whole weight.
FULL_WEIGHT = 0.8
# Beyond, the weight falls by this power of the utilisation. Servers of different speed settle where their utilisations
# differ by the (POWER + 1)-th root of the ratio of their speeds: 1.15 for 2.
POWER = 4
# Time constant of the weight. The loop through the proxy is stable while a check moves the weight by less than
# 2 / (POWER + 1) of the difference: checks may be up to 2 s apart.
FOLLOW_S = 4.0
# Longest reason.
MAX_REASON = 80


def weight_percent(utilisation: float) -> float:
    """Return the weight that a server of this utilisation should have, in percent of its configured one."""
    return 100.0 if utilisation <= FULL_WEIGHT else 100 * (FULL_WEIGHT / utilisation) ** POWER


@final
class AgentCheck:
    """Answers agent checks.

    Args:
        models: The served models, for the readiness.
        load: Measures the load.
        clock_s: A monotonic clock in seconds.
    """

    def __init__(self, models: ModelRegistry, load: LoadMeter, clock_s: Callable[[], float]) -> None:
        self._models, self._load, self._clock_s = models, load, clock_s
        self._percent, self._asked_s = 100.0, clock_s()
        self._server: asyncio.Server | None = None

    async def listen(self, listener: socket.socket) -> None:
        """Answer the connections of a socket, until `close`."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _AgentConnection(self.line), sock=listener)

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()

    def line(self) -> bytes:
        """Return the answer of now."""
        if self._models.ends:
            return b"drain\n"
        try:
            self._models.reject_unready()
        except RequestError as error:
            # HAProxy shows what follows the mark; its words end at a comma.
            reason = str(error).replace(",", ";").encode("ascii", "replace").decode()
            return f"down#{reason[:MAX_REASON]}\n".encode()
        now_s = self._clock_s()
        share = 1 - math.exp(-(now_s - self._asked_s) / FOLLOW_S)
        self._percent += share * (weight_percent(self._load.report().utilisation) - self._percent)
        self._asked_s = now_s
        # A weight of 0 would drain it.
        return f"ready up {max(1, round(self._percent))}%\n".encode()


@final
class _AgentConnection(asyncio.Protocol):
    """Says the line and closes; what a check sends is not read."""

    def __init__(self, line: Callable[[], bytes]) -> None:
        self._line = line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast(asyncio.Transport, transport)
        connection.write(self._line())
        connection.close()

"""Where a network answers: in training's code, on a server, in Python on a device, and in a browser."""

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np

from penstock.core.application import reply_of
from penstock.core.pack import Pack
from penstock.core.spec import Array
from penstock.device.engine import Engine, LiveEngine
from penstock.runtime.load import Predictor
from penstock.serve.client import Client
from penstock.verify.examples import Example

# U frames that come of a signal

ASKED_S = 60.0


class Place(ABC):
    """Somewhere that is asked what everywhere is asked.

    Attributes:
        name: In the table.
    """

    name: str

    @abstractmethod
    def answer(self, example: Example) -> Any:
        """The first output of the network, an array without batch dimension; or a reply, JSON values made of it.

        A reply is given where the place is asked with a body, whose raw array it makes itself.
        """


@final
class Training(Place):
    """The network as it was trained, run by torch: what the others are compared with.

    Args:
        predictor: Of the bundle.
    """

    name = "training code"

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def answer(self, example: Example) -> Array:
        """See `Place`; a signal is run whole."""
        if self._predictor.application.live is not None:
            return self._predictor.predict(example.raw[None])[0]
        return self._predictor.predict(example.raw)

    def reply(self, answer: Array) -> Any:
        """What a client gets of an answer."""
        return reply_of(self._predictor.application)(answer)


@final
class Server(Place):
    """A server, by HTTP; live signals over a WebSocket, in chunks.

    Args:
        client: Of the server.
        pack: Whose answers it should give.
    """

    name = "server"

    def __init__(self, client: Client, pack: Pack) -> None:
        self._client = client
        self._pack = pack

    def answer(self, example: Example) -> Any:
        """See `Place`."""
        if self._pack.live is not None:
            return self._streamed(example.raw)
        if example.body is not None:
            return self._client.ask(self._pack.name, example.body, content_type=example.content_type)
        return self._client.predict(self._pack.name, example.raw)

    def _streamed(self, signal_T: Array) -> Array:
        with self._client.stream(self._pack.name, events="binary", latency_ms=ASKED_S * 1e3) as stream:
            stream.send(signal_T)
            parts = [result.output for result in stream.end() if result.output is not None]
        return np.concatenate(parts).reshape(-1, *self._pack.outputs[0].shape[1:])


@final
class Device(Place):
    """The engine of devices in Python, without torch.

    Args:
        pack: What it runs.
    """

    name = "Python engine"

    def __init__(self, pack: Pack) -> None:
        self._engine = Engine(pack) if pack.live is None else LiveEngine(pack)

    def answer(self, example: Example) -> Array:
        """See `Place`."""
        if isinstance(self._engine, LiveEngine):
            return self._engine.whole(example.raw)
        return self._engine.run(example.raw)[0]

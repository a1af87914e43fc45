"""Backends that run a bundle: the training code, a server, and the Python engine of devices."""

from abc import ABC, abstractmethod
from typing import Any, cast, final

import numpy as np

from penstock.client.client import Client
from penstock.core.application import reply_of
from penstock.core.pack import Pack
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array
from penstock.device.pack_engine import LivePackEngine, PackEngine
from penstock.runtime.load import Predictor
from penstock.verify.verify_inputs import Example

# U frames that come of a signal

TIMEOUT_S = 60.0

# Of one tensor of fixed size, or of several by name.
Answer = Array | dict[str, Array]


class Backend(ABC):
    """Runs an example.

    Attributes:
        name: Its name in the table.
    """

    name: str

    @abstractmethod
    def answer(self, example: Example) -> Any:
        """Return the network's answer without batch dimension, several tensors by name; or the reply's JSON values."""


@final
class TrainingBackend(Backend):
    """The network run by torch, the reference.

    Args:
        predictor: The bundle's network.
    """

    name = "training code"

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def answer(self, example: Example) -> Answer:
        """Run the example; a signal is run whole."""
        application = self._predictor.application
        if application.live is not None:
            return self._predictor.predict(example.raw[None])[0]
        return self._predictor.predict(named_input(application.input, example.raw))

    def named(self, reply: Any, example: Example) -> Any:
        """An answer's tensors by name, where a default reply has them as nested lists; any other answer as it is.

        Boxes in the pixels of a picture become those of the frame.
        """
        output, application = self._predictor.application.output, self._predictor.application
        if not isinstance(output, RecordSpec) or application.reply is not None or not isinstance(reply, dict):
            return reply
        lists = cast(dict[str, Any], reply)
        if any(isinstance(each, np.ndarray) for each in lists.values()):
            return lists
        found = output.unpack(output.from_numbers(lists))
        if application.shows is None or example.body is None:
            return found
        ones = {application.shows.boxes: np.ones(1)}
        share = application.shows.in_picture(ones, *example.raw.shape[:2])[application.shows.boxes]
        return {**found, application.shows.boxes: found[application.shows.boxes] / share.astype(np.float32)}

    def reply(self, answer: Answer) -> Any:
        """The reply for an output, as JSON values."""
        return reply_of(self._predictor.application)(answer)


@final
class ServerBackend(Backend):
    """A server, over HTTP; live signals over a WebSocket, in chunks.

    Args:
        client: A client of the server.
        pack: The pack of the same bundle.
    """

    name = "server"

    def __init__(self, client: Client, pack: Pack) -> None:
        self._client = client
        self._pack = pack

    def answer(self, example: Example) -> Any:
        """Run the example."""
        if self._pack.live is not None:
            return self._streamed(example.raw)
        if example.body is not None:
            return self._client.ask(self._pack.name, example.body, content_type=example.content_type)
        return self._client.predict(self._pack.name, named_input(self._pack.input, example.raw))

    def _streamed(self, signal_T: Array) -> Array:
        with self._client.stream(self._pack.name, events="binary", latency_ms=TIMEOUT_S * 1e3) as stream:
            stream.send(signal_T)
            parts = [result.output for result in stream.end() if result.output is not None]
        return np.concatenate(parts).reshape(-1, *self._pack.outputs[0].shape[1:])


@final
class PackBackend(Backend):
    """The Python engine of devices, without torch.

    Args:
        pack: The pack it runs.
    """

    name = "Python engine"

    def __init__(self, pack: Pack) -> None:
        self._engine = PackEngine(pack) if pack.live is None else LivePackEngine(pack)

    def answer(self, example: Example) -> Answer:
        """Run the example."""
        if isinstance(self._engine, LivePackEngine):
            return self._engine.whole(example.raw)
        pack = self._engine.pack
        if pack.tensors.is_plain:
            return self._engine.run(example.raw)[0]
        given = pack.input
        inputs = given.unpack(example.raw) if isinstance(given, RecordSpec) else {given.name: example.raw}
        outputs = self._engine.predict(inputs)
        return outputs if isinstance(pack.output, RecordSpec) else outputs[pack.output.name]


def named_input(spec: RawSpec | ChunkSpec, raw: Array) -> Any:
    """Return an input as predictors take it: a record's tensors by name, any other array as it is."""
    return spec.unpack(raw) if isinstance(spec, RecordSpec) else raw

"""Backends that run a bundle: the training code, a server, and the Python engine of devices."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, cast, final

import numpy as np

from penstock.client.client import Client
from penstock.core.agreement import Agreement
from penstock.core.application import Application, reply_of
from penstock.core.dim import Dim
from penstock.core.packs.pack import Pack
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


class Reference(Backend):
    """Runs an example, and is what the others are compared with."""

    @abstractmethod
    def comparable(self, given: Any, answer: Any, rule: Agreement, example: Example) -> tuple[Any, Any, Agreement]:
        """An answer and the expected one by the names of their tensors, and the rule for them."""

    @abstractmethod
    def reply(self, answer: Any, example: Example) -> Any:
        """The reply to an example for an output, as JSON values."""


@final
class TrainingBackend(Reference):
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

    def comparable(self, given: Any, answer: Any, rule: Agreement, example: Example) -> tuple[Any, Any, Agreement]:
        """An answer and the expected one by the names of their tensors, and the rule for them.

        A default reply has nested lists. The reply to a picture lacks the boxes with small scores, and the others are
        in the picture's pixels; both answers then have the boxes of the reply, in the pixels of the frame.
        """
        output, application = self._predictor.application.output, self._predictor.application
        if not isinstance(output, RecordSpec) or application.reply is not None or not isinstance(given, dict):
            return given, answer, rule
        lists, shows = cast(dict[str, Any], given), application.shows
        if any(isinstance(each, np.ndarray) for each in lists.values()):
            return lists, answer, rule
        if shows is None or example.body is None:
            return output.unpack(output.from_numbers(lists)), answer, rule
        if rule.sets is None or not isinstance(application.outputs[shows.boxes].shape[0], Dim):
            return given, answer, rule
        found = output.unpack(output.from_numbers(lists))
        share = np.float32(shows.share(*example.raw.shape[:2]))
        sets = replace(rule.sets, score=shows.scores, threshold=max(shows.least, rule.sets.threshold or 0.0))
        kept = shows.kept(answer, application.outputs)
        return {**found, shows.boxes: found[shows.boxes] / share}, kept, replace(rule, sets=sets)

    def reply(self, answer: Answer, example: Example) -> Any:
        """The reply to an example for an output, as JSON values."""
        application = self._predictor.application
        if application.shows is not None and example.body is not None and isinstance(answer, dict):
            height, width, *_ = example.raw.shape
            answer = application.shows.in_picture(answer, height, width, application.outputs)
        return reply_of(application)(answer)


@final
class ServerBackend(Backend):
    """A server, over HTTP; live signals over a WebSocket, in chunks.

    Args:
        client: A client of the server.
        application: What it serves.
    """

    name = "server"

    def __init__(self, client: Client, application: Application) -> None:
        self._client = client
        self._application = application

    def answer(self, example: Example) -> Any:
        """Run the example."""
        application = self._application
        if application.live is not None:
            return self._streamed(example.raw)
        if example.body is not None:
            return self._client.ask(application.name, example.body, content_type=example.content_type)
        return self._client.predict(application.name, named_input(application.input, example.raw))

    def _streamed(self, signal_T: Array) -> Array:
        with self._client.stream(self._application.name, events="binary", latency_ms=TIMEOUT_S * 1e3) as stream:
            stream.send(signal_T)
            parts = [result.output for result in stream.end() if result.output is not None]
        return np.concatenate(parts).reshape(-1, *self._application.output.shape[1:])


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
        if pack.generate is None and pack.tensors.is_plain:
            return self._engine.run(example.raw)[0]
        given, made = pack.input, pack.tensors.output
        inputs = given.unpack(example.raw) if isinstance(given, RecordSpec) else {given.name: example.raw}
        outputs = self._engine.predict(inputs)
        return outputs if isinstance(made, RecordSpec) else outputs[made.name]


def named_input(spec: RawSpec | ChunkSpec, raw: Array) -> Any:
    """Return an input as predictors take it: a record's tensors by name, any other array as it is."""
    return spec.unpack(raw) if isinstance(spec, RecordSpec) else raw

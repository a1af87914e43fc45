"""`GET /v1/apps/{name}/examples`: golden examples as requests to try, with their recorded answers."""

import asyncio
import logging
from typing import final

import orjson

from penstock.serve.background import BackgroundTasks
from penstock.serve.exchange.request import Request
from penstock.serve.exchange.response import Answer, Response, internal_error, rejected
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.request_examples import examples_body
from penstock.serve.registry.served_chain import Served
from penstock.serve.registry.served_model import ServedModel

log = logging.getLogger(__name__)

NONE = orjson.dumps({"examples": []})
# A few versions of some models.
MAX_KEPT = 16


@final
class ExampleCalls:
    """Answers the requests for examples; each bundle is read once.

    Args:
        models: The models, by name.
        offered: Whether there are examples at all.
    """

    def __init__(self, models: ModelRegistry, *, offered: bool) -> None:
        self._models, self._offered = models, offered
        self._tasks = BackgroundTasks()
        self._reading: dict[tuple[str, bool], asyncio.Task[bytes]] = {}

    def handle(self, served: Served, request: Request, answer: Answer) -> None:
        """Answer with the examples of a model; of a chain, with the inputs of the part that takes the same ones."""
        model = self._model_of(served)
        if model is None or not self._offered:
            answer(Response(200, NONE))
            return
        key = model.content_hash, served is model
        if key not in self._reading:
            while len(self._reading) >= MAX_KEPT:
                del self._reading[next(iter(self._reading))]
            # In a thread: files are read, and pictures encoded.
            work = asyncio.to_thread(
                examples_body, model.bundle, model.manifest, model.application, answered=served is model
            )
            self._reading[key] = asyncio.get_running_loop().create_task(work)
        self._tasks.start(_answered(self._reading[key], served.name, answer))

    def _model_of(self, served: Served) -> ServedModel | None:
        if isinstance(served, ServedModel):
            return served
        application = served.application
        for part in map(self._models.named, served.parts):
            if not isinstance(part, ServedModel) or part.application.live != application.live:
                continue
            if part.application.inputs == application.inputs and part.application.accepts == application.accepts:
                return part
        return None


async def _answered(reading: "asyncio.Task[bytes]", name: str, answer: Answer) -> None:
    try:
        answer(Response(200, await asyncio.shield(reading)))
    except Exception:
        log.exception("the examples of %r could not be read", name)
        answer(rejected(internal_error()))

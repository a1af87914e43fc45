"""`GET /v1/listen` and `GET /v1/realtime`: upgrades to live streams by the protocols of other speech services."""

import time
from datetime import UTC, datetime
from functools import partial
from typing import final
from urllib.parse import parse_qsl

from penstock.core.errors import InvalidInput
from penstock.serve.exchange.access import Access
from penstock.serve.exchange.local_client import address_of
from penstock.serve.exchange.request import Request
from penstock.serve.exchange.request_bounds import RequestBounds
from penstock.serve.exchange.response import Answer, Switched
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.speech_models import speech_model, with_speech
from penstock.serve.streams.quotas import StreamClient
from penstock.serve.transcription.listen_options import MAX_PARAMETERS, ListenOptions
from penstock.serve.transcription.listen_session import ListenSession
from penstock.serve.transcription.realtime_session import RealtimeSession
from penstock.serve.transcription.vendor_errors import REQUEST_ID
from penstock.serve.websocket.handshake import key_of, reject_draining, switched_headers
from penstock.serve.websocket.live_stream import MakeProtocol
from penstock.serve.websocket.stream_connection import StreamConnection


@final
class ServiceStreams:
    """Opens live streams whose protocol is another service's.

    Args:
        models: All models.
        access: The sites whose pages may open streams.
        bounds: Bounds of messages that have not come whole.
    """

    def __init__(self, models: ModelRegistry, access: Access, bounds: RequestBounds) -> None:
        self._models, self._access, self._bounds = models, access, bounds

    def listen(self, request: Request, answer: Answer) -> None:
        """Answer a request of Deepgram's clients.

        Raises:
            RequestError: It is no upgrade, its query is refused, or no stream is admitted now.
        """
        key = key_of(request.head)
        options = ListenOptions.of(request.head.query)
        served = with_speech(self._models, options.model)
        model, created = speech_model(served), datetime.now(UTC).isoformat(timespec="milliseconds")

        def protocol(stream: str) -> ListenSession:
            return ListenSession(model, options, stream=stream, created=created)

        self._switch(served, request, answer, key, protocol, REQUEST_ID)

    def realtime(self, request: Request, answer: Answer) -> None:
        """Answer a request of OpenAI's clients for a transcription session.

        Raises:
            RequestError: It is no upgrade, asks for another kind of session, or no stream is admitted now.
        """
        key = key_of(request.head)
        query = _query_of(request.head.query)
        if query.get("intent", "transcription") != "transcription":
            raise InvalidInput(f"intent is {query['intent'][:40]!r}; transcription alone is served.")
        served = with_speech(self._models, query.get("model", ""))
        model = speech_model(served)

        def protocol(stream: str) -> RealtimeSession:
            return RealtimeSession(model, stream=stream)

        self._switch(served, request, answer, key, protocol)

    def _switch(
        self,
        served: ServedModel,
        request: Request,
        answer: Answer,
        key: str,
        protocol: MakeProtocol,
        id_header: str | None = None,
    ) -> None:
        head = request.head
        self._access.check_origin(head)
        reject_draining(self._models)
        served.reject_lost()
        streams = served.streams
        assert streams is not None, served.name
        client = StreamClient(self._access.client(head) or "", address_of(request.transport))
        admit = partial(streams.admit_stream, budget_ns=streams.budget_ns, client=client)
        connection = StreamConnection(admit, time.monotonic, protocol=protocol, bounds=self._bounds)
        headers = (*switched_headers(head, key), *served.version_headers)
        if id_header is not None:
            headers = (*headers, (id_header, connection.stream.name))
        answer(Switched(status=101, headers=headers, take=connection.take_over))


def _query_of(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict"))
    except ValueError:
        raise InvalidInput(f"The query is not UTF-8, or has more than {MAX_PARAMETERS} parameters.") from None

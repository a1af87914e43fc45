"""A chain in two places: its parts run by torch in this process, and a server of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from penstock.client.client import Client
from penstock.core.agreement import Agreement
from penstock.core.application import reply_of
from penstock.core.chains.chain_run import as_chunk
from penstock.core.errors import PackError
from penstock.core.record import RecordSpec
from penstock.core.source_files.find_application import find_chain
from penstock.runtime.load_chain import ChainPredictor, load_chain
from penstock.verify.backends import Backend, Reference, named_input
from penstock.verify.grpc_backend import GrpcBackend
from penstock.verify.verify_inputs import Example


@final
class LoadedChain(Reference):
    """A chain whose parts are run by torch, one after another: the reference.

    Args:
        reference: The file of the chain.
        bundles: The bundles of its parts.

    Raises:
        PackError: The first part is live.
    """

    name = "training code"

    def __init__(self, reference: str, bundles: Sequence[Path]) -> None:
        chain = find_chain(reference).chain
        if chain.segments is not None:
            raise PackError(
                f"chain {chain.name!r} begins with a live signal, and verify compares single requests; verify each "
                f"part by itself."
            )
        self.predictor: ChainPredictor = load_chain(reference, bundles)
        self.application = self.predictor.plan.application
        self.golden = self.predictor.golden()

    def examples(self) -> list[Example]:
        """The examples of the first part as inputs of the chain; random ones where the chain has other inputs."""
        return [Example(name=f"golden example {number}", raw=chunk) for number, chunk in enumerate(self.golden.inputs)]

    def answer(self, example: Example) -> Any:
        """Run the steps."""
        spec, output = self.application.output, self.predictor.run(example.raw)
        return spec.unpack(output) if isinstance(spec, RecordSpec) else output

    def comparable(self, given: Any, answer: Any, rule: Agreement, example: Example) -> tuple[Any, Any, Agreement]:
        """An answer and the expected one; a chain has no sets of rows."""
        return given, answer, rule

    def reply(self, answer: Any, example: Example) -> Any:
        """The reply for an output, as JSON values."""
        predictor = self.predictor
        found = predictor.plan.unpacked(as_chunk(self.application.output, answer))
        if example.body is not None:
            found = predictor.shown(found)
        return reply_of(self.application)(found)

    def over_grpc(self, address: str) -> GrpcBackend:
        """The chain on a server, over gRPC."""
        application = self.application
        return GrpcBackend(address, application.name, input=application.input, answer=application.output, single=False)


@final
class ServedChainBackend(Backend):
    """The chain on a server, over HTTP.

    Args:
        client: A client of the server.
        chain: The chain.
    """

    name = "server"

    def __init__(self, client: Client, chain: LoadedChain) -> None:
        self._client, self._application = client, chain.application

    def answer(self, example: Example) -> Any:
        """Run the example."""
        application = self._application
        if example.body is not None:
            return self._client.ask(application.name, example.body, content_type=example.content_type)
        return self._client.predict(application.name, named_input(application.input, example.raw))

"""Loading of chains: every part run by torch in this process, one after another, with the answer of a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from penstock.core.application import decoded_chunk, reply_of
from penstock.core.bundles.bundle import WEIGHTS
from penstock.core.bundles.golden import Golden, default_tolerance
from penstock.core.chains.chain import Chain
from penstock.core.chains.chain_run import (
    ChainPlan,
    FunctionCall,
    PartRows,
    as_chunk,
    chain_hash,
    check_weights,
)
from penstock.core.errors import ApplicationError, InvalidInput
from penstock.core.random_arrays import random_chunks
from penstock.core.record import RecordSpec
from penstock.core.source_files.find_application import FoundChain, find_chain
from penstock.core.spec import Array
from penstock.core.streams.live import events_of
from penstock.core.streams.segments import SegmentFinder, Segments
from penstock.runtime.load import Predictor, load

RANDOM_EXAMPLES, MAX_RAWS = 8, 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ChainPredictor:
    """A chain that runs in this process.

    Args:
        plan: The chain with the applications of its parts; of one with segments, its later steps.
        parts: The parts by name.
        content_hash: Hash of the chain's source and of the bundles of its parts, as a server of them has it.
        live: The first part of a chain with segments.
        segments: What feeds the later steps with its events.
    """

    plan: ChainPlan
    parts: Mapping[str, Predictor]
    content_hash: str
    live: Predictor | None = None
    segments: Segments | None = None

    def predict(self, inputs: Any) -> Any:
        """Answer one request.

        Args:
            inputs: One chunk of the chain's input: an array or nested lists; several inputs, or inputs of varying
                length, as a dictionary of arrays by name. For a chain whose first part has a `prepare`, one raw array.
                For one whose first part is live, the whole signal.

        Returns:
            The answer: one array, or a dictionary of arrays by name. For a chain whose first part is live, a list with
            the answer of each segment.

        Raises:
            RequestError: The input does not fit, or a function of the chain failed.
        """
        spec = self.plan.application.input
        if self.segments is not None:
            return [self.plan.unpacked(self.run(as_chunk(spec, each))) for each in self._found(self.segments, inputs)]
        return self.plan.unpacked(self.run(as_chunk(spec, inputs)))

    def _found(self, segments: Segments, signal: Any) -> Sequence[Any]:
        part = self.live
        assert part is not None, self.plan.chain
        live = part.application.live
        assert live is not None, self.plan.chain
        event, _ = events_of(live)(part.predict(signal), None, True)
        return SegmentFinder(self.plan.chain.name, segments)(event, True)

    def golden(self) -> Golden:
        """Make golden examples of the chain: inputs of its first part's examples, with the answers of the steps.

        A chain with inputs of its own gets random ones.

        Raises:
            ApplicationError: The first part is live.
        """
        if self.live is not None:
            raise ApplicationError(
                f"Chain {self.plan.chain.name!r} begins with the live {self.live.application.name!r} and takes no "
                f"single requests; measure its parts instead."
            )
        chain, spec = self.plan.chain, self.plan.application.input
        recorded = self.parts[chain.parts[0]].files.golden
        if chain.takes_raw(self.plan.parts):
            # Each record has room for the largest raw array.
            inputs = np.stack([as_chunk(spec, {spec.tensors[0].name: raw}) for raw in recorded.raws[:MAX_RAWS]])
        elif chain.input is None and not chain.inputs:
            inputs = recorded.inputs
        elif isinstance(spec, RecordSpec):
            inputs = spec.random(np.random.default_rng(0), RANDOM_EXAMPLES)
        else:
            inputs = random_chunks(spec, RANDOM_EXAMPLES, np.random.default_rng(0))
        outputs = np.stack([self.run(np.asarray(chunk)) for chunk in inputs])
        return Golden(inputs=inputs, outputs=outputs, tolerance=default_tolerance(outputs))

    def answer(self, body: bytes, content_type: str = "") -> Any:
        """Decode a request's body, run the steps, and make the reply that a client would get.

        Args:
            body: The request's bytes, for example a PNG file.
            content_type: Its content type, `"image/png"`.

        Raises:
            InvalidInput: The chain cannot decode it.
        """
        application = self.plan.application
        if self.live is not None:
            raise InvalidInput(f"chain {application.name!r} takes a signal, no requests; use predict().")
        if application.decode is None:
            raise InvalidInput(f"chain {application.name!r} has no decode; use predict().")
        chunk = decoded_chunk(application, application.decode(body, content_type))
        return reply_of(application)(self.shown(self.plan.unpacked(self.run(chunk))))

    def shown(self, answer: Any) -> Any:
        """Return the answer to a picture: of boxes, those whose score counts."""
        shows = self.plan.chain.shows
        return answer if shows is None else shows.kept(answer, self.plan.application.outputs)

    def run(self, chunk: Array) -> Array:
        """Run the steps for one chunk of the chain's input; returns one chunk of its output.

        Raises:
            RequestError: A function of the chain failed, or a part rejected its input.
        """
        progress = self.plan.steps(chunk)
        given: Any = None
        while True:
            try:
                request = progress.send(given)
            except StopIteration as done:
                return done.value
            given = request.function() if isinstance(request, FunctionCall) else self._rows(request)

    def _rows(self, request: PartRows) -> list[Array]:
        if not request.rows:
            return []
        part = self.parts[self.plan.chain.steps[request.step].part_name]
        chunks = [part.prepare(row.array) if row.is_raw else row.array for row in request.rows]
        rows = part.executor.max_rows
        outputs = [part.executor.predict(np.stack(chunks[at : at + rows])) for at in range(0, len(chunks), rows)]
        return list(np.concatenate(outputs))


def load_chain(
    chain: str | Path | Chain,
    bundles: Sequence[str | Path],
    *,
    accept_changed: bool = False,
    threads: int | None = None,
) -> ChainPredictor:
    """Load a chain and its parts, each verified as by `load`.

    Args:
        chain: A chain.py, `"chain.py:attr"`, an import path, or the record itself.
        bundles: The bundles of its parts; others are left out.
        accept_changed: See `load`.
        threads: See `load`.

    Raises:
        ApplicationError: The chain cannot be found, a part is missing, or the parts do not fit.
        BundleError: See `load`.
    """
    found = FoundChain(chain=chain, reference="", sha256="") if isinstance(chain, Chain) else find_chain(str(chain))
    parts: dict[str, Predictor] = {}
    for bundle in bundles:
        part = load(bundle, accept_changed=accept_changed, threads=threads)
        parts[part.application.name] = part
    check_weights(found.chain, {name: part.files.manifest.files[WEIGHTS] for name, part in parts.items()})
    parts = {name: parts[name] for name in found.chain.parts}
    chain, applications = found.chain, {name: part.application for name, part in parts.items()}
    chain.check_parts(applications)
    hashes = {name: part.files.manifest.content_hash for name, part in parts.items()}
    content_hash = chain_hash(found.sha256, hashes)
    if chain.segments is None:
        return ChainPredictor(plan=ChainPlan(chain=chain, parts=applications), parts=parts, content_hash=content_hash)
    return ChainPredictor(
        plan=ChainPlan(chain=chain.later, parts=applications),
        parts=parts,
        content_hash=content_hash,
        live=parts[chain.steps[0].part_name],
        segments=chain.segments,
    )

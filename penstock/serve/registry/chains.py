"""The chains of a front-end: served once all of their parts are, and kept in step with them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from penstock.core.errors import ApplicationError
from penstock.core.source_files.find_application import FoundChain, find_chain
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_chain import ServedChain
from penstock.serve.table.chain_counts import ChainCounts


@final
@dataclass(kw_only=True, slots=True, eq=False)
class Chains:
    """Chains of one front-end.

    Args:
        models: The registry, which has the parts and gets the chains.
        budget_ns: Latency budget of a request that names none.
        index: Index of this front-end.
        now_ns: The engines' clock.
    """

    models: ModelRegistry
    budget_ns: int
    index: int
    now_ns: Callable[[], int]
    # Chains that wait for a part after this front-end was restarted.
    _waiting: list[tuple[FoundChain, ChainCounts]] = field(
        init=False, default_factory=list[tuple[FoundChain, ChainCounts]]
    )
    _served: list[ServedChain] = field(init=False, default_factory=list[ServedChain])

    def attach(self, reference: str, counts: ChainCounts, *, again: bool = False) -> FoundChain:
        """Serve a chain under its name.

        Args:
            reference: See `find_chain`.
            counts: Counts of all front-ends.
            again: Whether another front-end serves it already; it then waits for parts that are missing.

        Raises:
            ApplicationError: It cannot be found, a part is missing or does not fit, or its name is taken.
        """
        found = find_chain(reference)
        if any(served.name == found.chain.name for served in self.models):
            raise ApplicationError(f"Two models have the name {found.chain.name!r}; rename the chain {reference}.")
        try:
            self._serve(found, counts)
        except ApplicationError:
            if not again:
                raise
            self._waiting.append((found, counts))
        return found

    def refresh(self) -> None:
        """Take the parts as they are served now.

        Raises:
            ApplicationError: A part does not fit a chain any more.
        """
        for chain in self._served:
            # A chain waits until all its parts are loaded.
            if all(self.models.has_model(part) for part in chain.parts):
                chain.refresh()
                self.models.put(chain)
        waiting, self._waiting = self._waiting, []
        for found, counts in waiting:
            self.attach(found.reference, counts, again=True)

    def close(self) -> None:
        """End the threads of the chains."""
        for chain in self._served:
            chain.close()

    def _serve(self, found: FoundChain, counts: ChainCounts) -> None:
        chain = ServedChain(
            found, self.models.model, counts, index=self.index, budget_ns=self.budget_ns, now_ns=self.now_ns
        )
        self._served.append(chain)
        self.models.put(chain)

"""The order to try a bundle, from a server to the process of `penstock.runtime.trial`."""

import json
from dataclasses import asdict, dataclass
from typing import Self, final

# Longest verdict in characters, and its bytes at most: an empty pipe takes them in one write.
MAX_VERDICT, MAX_VERDICT_BYTES = 4096, 64 << 10


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOrder:
    """A bundle to try, and how it is served.

    Args:
        bundle: The bundle's folder.
        app: The application, if it moved.
        accept_changed: Accept an application whose sources changed.
        network: Whether the engine makes the network itself, so that it is made here too.
    """

    bundle: str
    app: str | None
    accept_changed: bool
    network: bool

    def to_json(self) -> str:
        """Encode for the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Decode what `to_json` wrote."""
        return cls(**json.loads(text))

"""A static host of a folder that counts what it sends."""

from collections.abc import Mapping
from pathlib import Path
from typing import final

from penstock.export.static_host import StaticHost


@final
class CountingHost(StaticHost):
    """Serve every file of a folder as it is at that moment.

    Args:
        folder: The root.
        headers: Sent with every response.

    Attributes:
        sent: Request path and size in bytes of each file sent.
    """

    def __init__(self, folder: Path, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(folder, lambda name: True, headers=headers or {})
        self.sent: list[tuple[str, int]] = []

    def on_sent(self, path: str, size: int) -> None:
        """Record a file."""
        self.sent.append((path, size))

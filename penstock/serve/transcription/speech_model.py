"""A served model as clients of speech services name and describe it."""

import hashlib
import uuid
from dataclasses import dataclass
from typing import final

from penstock.core.application import Application


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechModel:
    """A model whose application declares `speech`.

    Args:
        name: Its name in requests.
        version: Its version.
        content_hash: Content hash of its bundle.
        application: Its application.
    """

    name: str
    version: str
    content_hash: str
    application: Application

    @property
    def uuid(self) -> str:
        """An identifier of the bundle's content in the form of a UUID (RFC 9562, version 8)."""
        digest = hashlib.sha256(self.content_hash.encode()).digest()[:16]
        number = int.from_bytes(digest, "big") & ~(0xF << 76) & ~(0x3 << 62) | 8 << 76 | 2 << 62
        return str(uuid.UUID(int=number))

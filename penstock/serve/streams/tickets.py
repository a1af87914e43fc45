"""Tickets: the state of a live stream, sealed so that a server with the same keys can go on with the stream.

A ticket is a head of `HEAD_BYTES`, then what AES-256-GCM gives: format, salt, counter, expiry. Each process that seals
draws a salt, derives its own key with it, and counts its tickets: no key and nonce are used twice, however many servers
share a key. What a ticket is bound to is no part of it; another server must name the same to open it.
"""

import json
import os
import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from penstock.core.errors import InvalidTicket, ServeError

# A client whose server died offers its newest ticket within seconds; a stream may have paused before that.
LIFE_S = 600
MAX_KEYS = 2
# Changes with the content of tickets.
FORMAT = 1
# Format, salt, counter, and expiry in seconds since 1970.
_HEAD = struct.Struct(">B16sQQ")
HEAD_BYTES, TAG_BYTES = _HEAD.size, 16
_SALT_BYTES = 16
_KEY = re.compile(r"[0-9a-fA-F]{64}")

FOREIGN = (
    "The ticket is of another model, precision, API key or server key, or was altered; send the stream from its "
    "beginning."
)


@dataclass(frozen=True, slots=True)
class TicketKeys:
    """The keys of tickets.

    Args:
        keys: The first one seals; all of them open.
    """

    keys: tuple[bytes, ...]

    @classmethod
    def read(cls, files: tuple[Path, ...]) -> Self:
        """Read files with a key in each line that is not empty and begins with no #.

        Raises:
            ServeError: A file cannot be read, a line is no key, or there is none or more than `MAX_KEYS`.
        """
        keys: list[bytes] = []
        for file in files:
            try:
                lines = file.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ServeError(f"--ticket-key {file} cannot be read ({reason}).") from None
            for number, line in enumerate(lines, 1):
                text = line.strip()
                if not text or text.startswith("#"):
                    continue
                if not _KEY.fullmatch(text):
                    raise ServeError(
                        f"line {number} of {file} is no key of 64 hexadecimal digits; 'openssl rand -hex 32' makes one."
                    )
                keys.append(bytes.fromhex(text))
        if not 1 <= len(keys) <= MAX_KEYS or len(set(keys)) != len(keys):
            names = ", ".join(map(str, files))
            raise ServeError(
                f"{names}: {len(keys)} keys of tickets; give one, or the new one and then the old one that it replaces."
            )
        return cls(tuple(keys))


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketScope:
    """The stream to which a ticket is bound.

    Args:
        application: Name of the application.
        version_hash: Hash of the weights and of the sources that answer.
        precision: Precision of the network, and what its state consists of.
        client: Name of the client's API key; empty without keys.
    """

    application: str
    version_hash: str
    precision: str
    client: str

    def sealed_with(self, head: bytes) -> bytes:
        """The associated data of a ticket."""
        return head + json.dumps([self.application, self.version_hash, self.precision, self.client]).encode()


@final
class TicketSealer:
    """Seals and opens tickets, for one process.

    Args:
        keys: The keys.
        now_s: The time, in seconds since 1970.

    Raises:
        ServeError: The package for it is not installed.
    """

    def __init__(self, keys: TicketKeys, now_s: Callable[[], float] = time.time) -> None:
        try:
            # Imported only where there are tickets.
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ModuleNotFoundError:
            raise ServeError("--ticket-key needs a package that is not there; install penstock-nn[tickets].") from None

        def cipher(key: bytes, salt: bytes) -> Any:
            return AESGCM(HKDF(SHA256(), 32, salt, b"penstock ticket").derive(key))

        self._keys, self._now_s = keys.keys, now_s
        self._cipher, self._invalid = cipher, InvalidTag
        self._salt = os.urandom(_SALT_BYTES)
        self._own, self._sealed = cipher(keys.keys[0], self._salt), 0

    def seal(self, content: bytes, scope: TicketScope) -> bytes:
        """Seal a content.

        Args:
            content: The content.
            scope: What the ticket is bound to.
        """
        self._sealed += 1
        head = _HEAD.pack(FORMAT, self._salt, self._sealed, int(self._now_s()) + LIFE_S)
        return head + self._own.encrypt(_nonce(self._sealed), content, scope.sealed_with(head))

    def open(self, ticket: bytes, scope: TicketScope) -> bytes:
        """Open a ticket; returns its content.

        Args:
            ticket: The ticket.
            scope: What it must be bound to.

        Raises:
            InvalidTicket: It was not sealed with one of the keys for this scope, or it has expired.
        """
        if len(ticket) < HEAD_BYTES + TAG_BYTES:
            raise InvalidTicket(FOREIGN)
        head = ticket[:HEAD_BYTES]
        version, salt, counter, expires_s = _HEAD.unpack(head)
        if version != FORMAT:
            raise InvalidTicket(FOREIGN)
        for key in self._keys:
            try:
                content = self._cipher(key, salt).decrypt(_nonce(counter), ticket[HEAD_BYTES:], scope.sealed_with(head))
            except self._invalid:
                continue
            if expires_s < self._now_s():
                raise InvalidTicket("The ticket has expired; send the stream from its beginning.")
            return content
        raise InvalidTicket(FOREIGN)


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "big")

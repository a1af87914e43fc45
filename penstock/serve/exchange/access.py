"""Access control: API keys for clients, and CORS for pages of other sites."""

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote

from penstock.core.errors import Forbidden, ServeError, Unauthorized
from penstock.core.wording.counted import counted
from penstock.serve.exchange.request import Head

# Open to load balancers and probes without a key; the page's own files hold no secret.
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready", "/")
OPEN_PREFIX = "/page/"
_READY = re.compile(r"/v2/(health/(live|ready)|models/.*/ready)")
ADMIN = "admin"
MIN_CHARACTERS = 16
PREFLIGHT_S = 600
SUBPROTOCOLS = "sec-websocket-protocol"
# Prefix of an offered subprotocol that carries the client's key, percent-encoded.
KEY_PREFIX = "key."
# The same of pages of OpenAI's clients, not encoded; and what Deepgram's offer before the key.
OPENAI_KEY_PREFIX, DEEPGRAM_TOKEN = "openai-insecure-api-key.", "token"
# `Token` is Deepgram's.
_SCHEMES = ("bearer", "token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A client's key, as its digest.

    Args:
        name: Name of the client, for the log.
        digest: SHA-256 of the key.
        admin: Whether the client may load and unload models.
    """

    name: str
    digest: bytes
    admin: bool


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of all clients.

    Args:
        keys: One for each client.
    """

    keys: tuple[Key, ...]

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read a file with a line for each client: its name, its key, and `admin` if it may load models.

        Raises:
            ServeError: The file cannot be read, or a line is malformed.
        """
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ServeError(f"--api-keys {file} cannot be read ({reason}).") from None
        keys: dict[bytes, Key] = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) not in (2, 3) or words[2:] not in ([], [ADMIN]):
                raise ServeError(f"line {number} of {file} is not 'NAME KEY' or 'NAME KEY admin'.")
            if len(words[1]) < MIN_CHARACTERS:
                raise ServeError(
                    f"the key of {words[0]!r} in {file} has {counted(len(words[1]), 'character')}, fewer than "
                    f"{MIN_CHARACTERS}; 'openssl rand -hex 24' makes a good one."
                )
            if not words[1].isascii():
                raise ServeError(
                    f"the key of {words[0]!r} in {file} has characters that a header cannot carry; use ASCII alone."
                )
            digest = _digest(words[1])
            if digest in keys:
                both = f"{keys[digest].name!r} and {words[0]!r}"
                raise ServeError(f"{both} in {file} have the same key; give each client its own.")
            keys[digest] = Key(name=words[0], digest=digest, admin=len(words) == 3)
        if not keys:
            raise ServeError(f"{file} has no keys; write a line 'NAME KEY' for each client.")
        return cls(tuple(keys.values()))

    def check(self, authorization: str | None, *, admin: bool) -> str:
        """Check a key; return the name of its client.

        Args:
            authorization: `Bearer KEY`.
            admin: Whether the request is for admins only.

        Raises:
            Unauthorized: There is no key, or an unknown one.
            Forbidden: The client is no admin.
        """
        found = self.whose(authorization)
        if found is None:
            raise Unauthorized("This server requires an API key; send 'Authorization: Bearer KEY'.")
        if admin and not found.admin:
            raise Forbidden(f"The key of {found.name!r} may not load or unload models; use an admin's.")
        return found.name

    def whose(self, authorization: str | None) -> Key | None:
        """Find the key in `Bearer KEY` or `Token KEY`; None if it is unknown."""
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip()) if scheme.lower() in _SCHEMES else b""
        # All keys are compared, each in constant time, so that the duration reveals nothing about a guess.
        found = [key for key in self.keys if hmac.compare_digest(key.digest, digest)]
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Access:
    """Access rules of a server.

    Args:
        keys: The accepted keys; None if no key is needed.
        origins: Sites whose pages may send requests; `"*"` for all.
    """

    keys: Keys | None = None
    origins: tuple[str, ...] = ()

    def check(self, head: Head, *, admin: bool = False) -> str:
        """Check a request; return the name of the client, empty if no key is needed.

        Raises:
            Unauthorized: It needs a key and has no known one.
            Forbidden: Its key does not suffice.
        """
        if head.path in OPEN_PATHS or head.path.startswith(OPEN_PREFIX):
            return ""
        return self.check_key(_given(head), admin)

    def check_key(self, authorization: str | None, admin: bool) -> str:
        """Check `Bearer KEY`; return the name of the client, empty if no key is needed.

        Raises:
            Unauthorized: A key is needed, and this is not a known one.
            Forbidden: The key does not suffice.
        """
        return "" if self.keys is None else self.keys.check(authorization, admin=admin)

    def check_origin(self, head: Head) -> None:
        """Check that a page may open a stream: this server's own, those of listed sites, and clients that are no page.

        Browsers do not apply CORS to WebSocket, so the server checks the origin.

        Raises:
            Forbidden: The page is of another site.
        """
        origin = head.headers.get("origin")
        if origin is None or "*" in self.origins or origin in self.origins:
            return
        # The header may hold anything, so it is compared and not parsed.
        host = head.headers.get("host")
        if not host or origin.partition("://")[2] != host:
            raise Forbidden(f"Pages of {origin[:200]!r} may not open streams here; the server's --cors lists who may.")

    def client(self, head: Head) -> str | None:
        """Name of the client of a request; None without a known key."""
        return self.client_of(_given(head))

    def client_of(self, authorization: str | None) -> str | None:
        """Name of the client with the key in `Bearer KEY`; None without a known key."""
        key = None if self.keys is None else self.keys.whose(authorization)
        return None if key is None else key.name

    def cors(self, head: Head) -> tuple[tuple[str, str], ...]:
        """Headers that let a browser show the answer to a page of another site."""
        if not self.origins:
            return ()
        origin = head.headers.get("origin")
        if "*" in self.origins:
            return () if origin is None else (("Access-Control-Allow-Origin", "*"), *_EXPOSED)
        if origin not in self.origins:
            # A cache must not serve this answer, which lacks the header, to a listed site.
            return _VARY
        return (("Access-Control-Allow-Origin", origin), *_VARY, *_EXPOSED)

    def preflight(self, head: Head) -> tuple[tuple[str, str], ...] | None:
        """Headers that answer a CORS preflight; None if the head is no preflight, or the site is not listed."""
        if head.method != "OPTIONS" or "access-control-request-method" not in head.headers:
            return None
        allowed = self.cors(head)
        if not any(name == "Access-Control-Allow-Origin" for name, _ in allowed):
            return None
        wanted = head.headers.get("access-control-request-headers", "content-type")
        return (
            *allowed,
            ("Access-Control-Allow-Methods", "GET, HEAD, POST"),
            ("Access-Control-Allow-Headers", wanted),
            ("Access-Control-Max-Age", str(PREFLIGHT_S)),
        )


def is_probe(path: str) -> bool:
    """True for the paths of health: of the server, or of a model."""
    return _READY.fullmatch(path) is not None


_VARY = (("Vary", "Origin"),)
_EXPOSED_NAMES = "Retry-After, Inference-Header-Content-Length, Server-Timing, Penstock-Version, Penstock-Ended"
_EXPOSED = (("Access-Control-Expose-Headers", _EXPOSED_NAMES),)


def _given(head: Head) -> str | None:
    authorization = head.headers.get("authorization")
    if authorization is None and SUBPROTOCOLS in head.headers:
        # A browser can set no other header of a WebSocket.
        offered = [each.strip() for each in head.headers[SUBPROTOCOLS].split(",")]
        for each in offered:
            if each.startswith(KEY_PREFIX):
                return f"Bearer {unquote(each.removeprefix(KEY_PREFIX))}"
            if each.startswith(OPENAI_KEY_PREFIX):
                return f"Bearer {each.removeprefix(OPENAI_KEY_PREFIX)}"
        if len(offered) == 2 and offered[0] == DEEPGRAM_TOKEN:
            return f"Token {offered[1]}"
    # A proxy may add an Authorization of its own, for example `Basic`; X-Api-Key is then used.
    if "x-api-key" in head.headers and (authorization or "").partition(" ")[0].lower() not in _SCHEMES:
        return f"Bearer {head.headers['x-api-key']}"
    return authorization


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

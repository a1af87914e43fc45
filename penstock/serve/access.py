"""Who may ask: API keys for clients, and CORS for the browsers of other sites."""

import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote

from penstock.core.errors import Forbidden, ServeError, Unauthorized
from penstock.serve.wire import Head

# Balancers and probes ask these without a key; the page's own files hold no secret.
OPEN_PATHS = ("/v2/health/live", "/v2/health/ready", "/")
OPEN_PREFIX = "/page/"
ADMIN = "admin"
LEAST_CHARACTERS = 16
PREFLIGHT_S = 600
SUBPROTOCOLS = "sec-websocket-protocol"
# Of a subprotocol that is none: the client's key, percent-encoded.
KEY_PREFIX = "key."


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A client's key, as its digest.

    Args:
        name: The client's, for the log.
        digest: SHA-256 of the key.
        admin: Whether it may load and unload models.
    """

    name: str
    digest: bytes
    admin: bool


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of everybody who may ask.

    Args:
        keys: Of each client.
    """

    keys: tuple[Key, ...]

    @classmethod
    def read(cls, file: Path) -> Self:
        """A file with a line for each client: its name, its key, and `admin` where it may load models.

        Raises:
            ServeError: It cannot be read, or a line is another.
        """
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ServeError(f"the API keys in {file} cannot be read ({error}).") from None
        keys: list[Key] = []
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) not in (2, 3) or words[2:] not in ([], [ADMIN]):
                raise ServeError(f"line {number} of {file} is not 'NAME KEY' or 'NAME KEY admin'.")
            if len(words[1]) < LEAST_CHARACTERS:
                raise ServeError(
                    f"the key of {words[0]!r} in {file} has {len(words[1])} characters, fewer than {LEAST_CHARACTERS}; "
                    f"'openssl rand -hex 24' makes a good one."
                )
            if not words[1].isascii():
                raise ServeError(
                    f"the key of {words[0]!r} in {file} has characters that a header cannot carry; use ASCII alone."
                )
            keys.append(Key(name=words[0], digest=_digest(words[1]), admin=len(words) == 3))
        if not keys:
            raise ServeError(f"{file} has no keys; write a line 'NAME KEY' for each client.")
        owners: dict[bytes, str] = {}
        for key in keys:
            if key.digest in owners:
                both = f"{owners[key.digest]!r} and {key.name!r}"
                raise ServeError(f"{both} in {file} have the same key; give each client its own.")
            owners[key.digest] = key.name
        return cls(tuple(keys))

    def check(self, authorization: str | None, *, admin: bool) -> str:
        """Let a client pass or not; gives its name.

        Args:
            authorization: `Bearer KEY`.
            admin: Whether it wants what only admins may.

        Raises:
            Unauthorized: No key, or one that nobody has.
            Forbidden: It is not an admin's.
        """
        found = self.whose(authorization)
        if found is None:
            raise Unauthorized("This server wants an API key; send 'Authorization: Bearer KEY'.")
        if admin and not found.admin:
            raise Forbidden(f"The key of {found.name!r} may not load or unload models; use an admin's.")
        return found.name

    def whose(self, authorization: str | None) -> Key | None:
        """The client's whose key it is, `Bearer KEY`; None where it is nobody's."""
        scheme, _, given = (authorization or "").partition(" ")
        digest = _digest(given.strip()) if scheme.lower() == "bearer" else b""
        # Every key is compared, each in constant time: how long it takes says nothing of how near a guess is.
        found = [key for key in self.keys if hmac.compare_digest(key.digest, digest)]
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask, and from where.

    Args:
        keys: Where only those with a key may.
        origins: The sites whose pages may ask; `"*"` for all.
    """

    keys: Keys | None = None
    origins: tuple[str, ...] = ()

    def check(self, head: Head, *, admin: bool = False) -> str:
        """Let a request pass or not; gives the name of the client, empty where that is not asked.

        Raises:
            Unauthorized: It needs a key and has none that is known.
            Forbidden: Its key does not suffice.
        """
        if head.path in OPEN_PATHS or head.path.startswith(OPEN_PREFIX):
            return ""
        return self.check_key(_given(head), admin)

    def check_key(self, authorization: str | None, admin: bool) -> str:
        """Let whoever brings a key pass or not, `Bearer KEY`; gives the client's name, empty where nobody has a key.

        Raises:
            Unauthorized: A key is wanted, and this is none that is known.
            Forbidden: It does not suffice.
        """
        return "" if self.keys is None else self.keys.check(authorization, admin=admin)

    def check_origin(self, head: Head) -> None:
        """Let a page open a stream or not: that of this server, those of listed sites, and whoever is no page.

        Browsers let every site's pages open a WebSocket, so here it is not they who keep strangers out.

        Raises:
            Forbidden: It is another site's.
        """
        origin = head.headers.get("origin")
        if origin is None or "*" in self.origins or origin in self.origins:
            return
        # What a client wrote there may be no URL at all, so it is compared and not parsed.
        host = head.headers.get("host")
        if not host or origin.partition("://")[2] != host:
            raise Forbidden(f"Pages of {origin[:200]!r} may not open streams here; the server's --cors lists who may.")

    def client(self, head: Head) -> str | None:
        """The name of the client whose key a request has; None where it has none that is known."""
        key = None if self.keys is None else self.keys.whose(_given(head))
        return None if key is None else key.name

    def cors(self, head: Head) -> tuple[tuple[str, str], ...]:
        """The headers that let a browser show the answer to another site's page."""
        if not self.origins:
            return ()
        origin = head.headers.get("origin")
        if "*" in self.origins:
            return () if origin is None else (("Access-Control-Allow-Origin", "*"), *_EXPOSED)
        if origin not in self.origins:
            # A cache must not give this answer, which lacks the header, to one of the listed sites.
            return _VARY
        return (("Access-Control-Allow-Origin", origin), *_VARY, *_EXPOSED)

    def preflight(self, head: Head) -> tuple[tuple[str, str], ...] | None:
        """The headers that answer a browser which asks before it asks; None where it may not, or the head is none."""
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


_VARY = (("Vary", "Origin"),)
_EXPOSED = (("Access-Control-Expose-Headers", "Retry-After, Inference-Header-Content-Length"),)


def _given(head: Head) -> str | None:
    authorization = head.headers.get("authorization")
    if authorization is None and SUBPROTOCOLS in head.headers:
        # A browser cannot give a WebSocket any other header.
        for offered in head.headers[SUBPROTOCOLS].split(","):
            if offered.strip().startswith(KEY_PREFIX):
                return f"Bearer {unquote(offered.strip().removeprefix(KEY_PREFIX))}"
    # A proxy may have an Authorization of its own, `Basic` say; a key that was meant as one is never passed over.
    if "x-api-key" in head.headers and (authorization or "").partition(" ")[0].lower() != "bearer":
        return f"Bearer {head.headers['x-api-key']}"
    return authorization


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

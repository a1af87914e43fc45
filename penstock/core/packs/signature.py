"""Ed25519 signatures (RFC 8032) of packs, over the bytes of `pack.json`, which has the hash of every other file."""

import base64
import binascii
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock.core.errors import PackCorrupt, PackError

ALGORITHM = "Ed25519"
KEY_BYTES = 32


def new_key(file: Path) -> bytes:
    """Write a new private key as PEM, readable only by its owner, and the public key beside it.

    Args:
        file: Where the private key goes, `KEY.pem`; the public one goes to `KEY.pub.pem`.

    Returns:
        The public key, 32 bytes.

    Raises:
        PackError: One of the files exists, or cannot be written.
    """
    ed25519, serialization = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    for place in (file, public_file(file)):
        if place.exists():
            raise PackError(f"{place} is there already, and a key is never overwritten; choose another name.")
    for place, data, mode in ((file, private, 0o600), (public_file(file), public, 0o644)):
        try:
            with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as sink:
                sink.write(data)
        except OSError as error:
            raise PackError(f"{place} cannot be written ({error.strerror}); choose another place.") from None
    return key.public_key().public_bytes_raw()


def public_file(file: Path) -> Path:
    """The file of the public key that belongs to a private key's file."""
    return file.with_suffix(f".pub{file.suffix}")


def sign(data: bytes, file: Path) -> bytes:
    """Sign bytes and return the content of `pack.sig`.

    Args:
        data: The bytes to sign.
        file: The private key, PEM.

    Raises:
        PackError: It is not an Ed25519 private key.
    """
    ed25519, serialization = _cryptography()
    load = partial(serialization.load_pem_private_key, password=None)
    key = _key(file, "private", _read(file), load, ed25519.Ed25519PrivateKey)
    fields = {
        "algorithm": ALGORITHM,
        "public_key": key_text(key.public_key().public_bytes_raw()),
        "signature": base64.b64encode(key.sign(data)).decode(),
    }
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def verify_signature(data: bytes, signature: bytes, name: str) -> bytes:
    """Verify a signature and return the public key, 32 bytes, that made it.

    Args:
        data: The signed bytes.
        signature: The content of `pack.sig`.
        name: Name of the signature in messages.

    Raises:
        PackCorrupt: The signature does not match these bytes, or is not readable.
        PackError: The package that verifies signatures is not installed.
    """
    ed25519, _ = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        fields = json.loads(signature)
        if fields["algorithm"] != ALGORITHM:
            raise PackCorrupt(f"{name} is made by {fields['algorithm']!r}; only {ALGORITHM} is read. Sign it again.")
        public, made = (base64.b64decode(fields[part], validate=True) for part in ("public_key", "signature"))
        key = ed25519.Ed25519PublicKey.from_public_bytes(public)
    except (ValueError, KeyError, TypeError, binascii.Error, RecursionError) as error:
        raise PackCorrupt(
            f"{name} is not a signature ({type(error).__name__}: {error}); copy the pack again."
        ) from None
    try:
        key.verify(made, data)
    except InvalidSignature:
        raise PackCorrupt(
            f"{name} is not the signature of this pack.json: one of them was altered. Copy the pack again."
        ) from None
    return public


def read_public_key(text: str) -> bytes:
    """Read a public key, 32 bytes, from its base64 or from a PEM file.

    Raises:
        PackError: It is neither.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raw = b""
    if len(raw) == KEY_BYTES:
        return raw
    ed25519, serialization = _cryptography()
    file = Path(text)
    pem = _read(file)
    if b"PRIVATE" in pem:
        raise _not_a_key(file, "public", f"it is a private key; its public key is in {public_file(file).name}")
    return _key(file, "public", pem, serialization.load_pem_public_key, ed25519.Ed25519PublicKey).public_bytes_raw()


def key_text(public: bytes) -> str:
    """A public key as base64."""
    return base64.b64encode(public).decode()


def _key(file: Path, half: str, pem: bytes, load: Callable[[bytes], Any], kind: type) -> Any:
    try:
        key = load(pem)
    except (ValueError, TypeError) as error:
        raise _not_a_key(file, half, str(error)) from None
    if not isinstance(key, kind):
        raise _not_a_key(file, half, "it is of another kind")
    return key


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise PackError(
            f"the key {file} cannot be read ({error.strerror}); make one with 'penstock export --new-key KEY.pem'."
        ) from None


def _not_a_key(file: Path, half: str, cause: str) -> PackError:
    return PackError(
        f"{file} is not an Ed25519 {half} key in PEM ({cause}); make one with 'penstock export --new-key KEY.pem'."
    )


def _cryptography() -> tuple[Any, Any]:
    # Imported only for signed packs, so that others need no more than NumPy.
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise PackError("signatures need the package cryptography; pip install 'penstock-nn[device]'.") from None
    return ed25519, serialization
